"""Finding permutations that leave a network's function alone, by tracing it.

Which axes move is decided in four steps, of which this file has the first:

1. The network runs on the sample, on other sizes of it, and once more for each line at which a
   value decides what it does (:func:`_trace_all_ways`). ``finding/trace.py`` tells every operation
   to ``finding/traced_run.py``, where a rule (``finding/rules*.py``) says which axes are the same,
   and which stay (``finding/axes.py``).
2. What is left free may be permuted: ``finding/nesting.py`` says inside of what.
3. ``spec.py`` describes it.
4. ``float64_check.py`` makes sure that the function stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.core.validation import instance_of, one_of
from opacus_shuffle.networks.running import results, rolled_back, unwrap, without_graph
from opacus_shuffle.networks.sample_input import Call, call_of, normalise
from opacus_shuffle.permutation.finding.axes import fix_all
from opacus_shuffle.permutation.finding.nesting import LEVELS, build_spec
from opacus_shuffle.permutation.finding.trace import Tracer
from opacus_shuffle.permutation.finding.traced_run import Learned, TracedRun
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.network import check_apart, check_ready
from opacus_shuffle.permutation.spec import PermutationSpec

SHORT = 8
"""A length that shows what a network does on shorter inputs."""

MOST_CAUSES = 5
"""In an error."""


def find_permutations(
    module: nn.Module,
    sample_input: Any = None,
    *,
    groups: str = "residual",
    more_samples: Sequence[Any] = (),
) -> PermutationSpec:
    """Finds which axes of parameters may be permuted together without changing the function.

    The network runs under a tracer that follows every axis through every operation, in training
    mode on the sample and in evaluation mode on other sizes of it; an operation that the tracer
    does not know keeps whatever it touches in place. The network runs again for each line at which
    a value decides what it does next, with another answer there. What is never reached stays, with
    all that it may share. The network is left as it was; what its ``forward`` writes to globals and
    classes is not taken back.

    Args:
        module: The network, or Opacus's, a distributed or a compiled wrapper of it.
        sample_input: A tensor, a tuple of arguments or a mapping of keyword arguments of
            ``module.forward``; only its shapes (and valid indices) matter. A batch of 2 will do,
            but use the length of your data. ``None``: guessed from the first layer or from a
            Hugging Face configuration.
        groups: ``"residual"``: every permutation found. ``"heads"``: without those of the residual
            streams. ``"paper"``: hidden units, query and key dimensions of each head, and one
            permutation of the values that all heads share, as in Yang, Ji and Xiang's weight
            shuffling (Theorems 3 and 4); no order of heads, no residual stream.
        more_samples: Further inputs, each as ``sample_input``, for a network that does other things
            on others.

    Returns:
        The permutations, checked numerically (:meth:`PermutationSpec.check`).

    Raises:
        ValueError: If a sample does not run, no axis can be permuted, the numerical check fails, or
            a value decides what the network does and it breaks where it decides otherwise
            (``more_samples`` that take every way are the remedy).

    Formal Guarantees:
        Every permutation of the specification leaves the function of ``forward`` as it is, for all
        values of the parameters and all inputs that take a traced way: those of the samples and of
        a few other sizes of them, with every line at which PyTorch gives a value to Python answered
        as it was and otherwise. What is not seen is one list in "How permutations are found". Noise
        that treats entries alike stays the same in distribution.
    """
    one_of("groups", groups, LEVELS)
    network = unwrap(module)
    check_ready(network)
    instance_of("more_samples", more_samples, (list, tuple))
    more = [
        normalise(sample, f"more_samples[{number}]") for number, sample in enumerate(more_samples)
    ]
    return find_on_calls(network, [call_of(network, sample_input), *more], groups)


def find_on_calls(network: nn.Module, calls: Sequence[Call], groups: str) -> PermutationSpec:
    """Finds permutations on these arguments, and checks them numerically.

    The check runs on the shortest arguments that will do, and on all given ones but the first.

    Args:
        network: The network, without wrappers.
        calls: Arguments; the first is the sample, of which other sizes are made. If there are more,
            the user answers for it that they take every way that inputs can.
        groups: As of :func:`find_permutations`.
    """
    with rolled_back(network):
        traces = _trace_all(network, calls)
    spec = build_spec(traces.run, groups, tuple(traces.reads))
    if not spec.blocks:
        raise _nothing_found(traces.run, spec, network, groups)
    check_apart(dict(network.named_parameters()) | dict(network.named_buffers()), spec.blocks)
    if all(parameter.device.type != "meta" for parameter in network.parameters()):
        check_calls(spec, network, [traces.shortest, *calls[1:]])
    return spec


def _trace_all(network: nn.Module, calls: Sequence[Call]) -> _Traces:
    """Traces a network on its samples and on other sizes."""
    learned = Learned()
    while True:
        traces = _Traces(network, learned, calls[0])
        traces.trace_samples(calls)
        if not traces.run.outdated:
            traces.trace_other_sizes()
        # A run may learn what it should have known from its start, such as that an axis has parts.
        if not traces.run.outdated:
            return traces


class _Traces:
    """The runs of a network, traced into one record of its axes.

    Attributes:
        run: The record.
        shortest: The smallest arguments on which the network ran in both modes.
        reads: The lines at which Python reads a value.
    """

    def __init__(self, network: nn.Module, learned: Learned, sample: Call) -> None:
        self.run = TracedRun(network, learned)
        self.shortest = sample
        self.reads: dict[str, None] = {}
        self._network, self._sample = network, sample
        self._shapes: list[torch.Size] = []  # of the results on the sample

    def trace_samples(self, calls: Sequence[Call]) -> None:
        """Traces the network on arguments that must run in both modes."""
        for number, call in enumerate(calls):
            for training in (True, False):
                try:
                    self._trace(call, training=training)
                except Exception as error:
                    name = f"more_samples[{number - 1}]" if number else "sample_input"
                    mode = "training" if training else "evaluation"
                    raise ValueError(
                        f"{name} does not run through {type(self._network).__name__} in {mode} "
                        f"mode: {type(error).__name__}: {error}"
                    ) from error

    def trace_other_sizes(self) -> None:
        """Traces shorter inputs with one more record, and one longer record, in evaluation mode."""
        whole = self.run.atoms()
        shorter, longer = _other_sizes(self._sample)
        for alternatives in (longer, shorter):
            call = next((call for call in alternatives if self._runs(call, training=False)), None)
            if call is not None:
                self._trace(call, training=False)
                short = alternatives is shorter and _entries(call) < _entries(self._sample)
                if short and self._runs(call, training=True):
                    self.shortest = call
        # An axis that is split at these sizes alone is split elsewhere at others.
        fix_all(
            (atom for atom in whole if atom.kind != "atom"),
            cause="split at a position that depends on the input's size",
        )

    def _runs(self, call: Call, *, training: bool) -> bool:
        """Returns whether the network runs on arguments, with results for each record as before."""
        self._network.train(training)
        args, kwargs = call
        try:
            outputs = results(without_graph(lambda: self._network(*args, **kwargs)))
        except Exception:
            return False
        before, now = _records(self._sample), _records(call)
        return len(outputs) == len(self._shapes) and all(
            tensor.dim() == len(shape) and (shape[:1] != before or tensor.shape[:1] == now)
            for tensor, shape in zip(outputs, self._shapes, strict=True)
        )

    def _trace(self, call: Call, *, training: bool) -> None:
        """Traces one run."""
        args, kwargs = call

        def follow() -> Tracer:
            tracer = Tracer(self._network, self.run)
            tracer.trace(lambda: self._network(*args, **kwargs))
            return tracer

        self._network.train(training)
        tracer = without_graph(follow)
        self._shapes = self._shapes or tracer.shapes
        self.reads |= tracer.reads


def _records(call: Call) -> torch.Size:
    """Returns the number of records, as the beginning of a shape."""
    leaves = (leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next((leaf.shape[:1] for leaf in leaves), torch.Size())


def _entries(call: Call) -> int:
    """Returns how many entries the tensors among arguments have."""
    return sum(leaf.numel() for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor))


def _other_sizes(sample: Call) -> tuple[list[Call], list[Call]]:
    """Returns shorter inputs with one more record, and longer ones of one record.

    Each is a list of alternatives, of which those come first that change most: images change along
    all dimensions from the third on, texts along their second one.
    """
    leaves = (leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor) and leaf.dim())
    first = next(leaves, torch.empty(0))
    if not first.numel():
        return [], []
    records, *lengths = first.shape
    dims = list(range(1, first.dim()))
    together = [dims[1:], dims[:1]] if len(dims) > 2 else [[dim] for dim in dims]
    # Along a length of 1 nothing is carried on.
    halves = {size: max(min(size, 2), size // 2) for size in lengths}
    more = _resized(sample, [0], {records: records + 1})
    shorter = [
        _resized(more, range(1, 9), {lengths[dim - 1]: sizes[lengths[dim - 1]] for dim in changed})
        for sizes in ({size: min(size, SHORT) for size in lengths}, halves)
        for changed in together
    ]
    one = _resized(sample, [0], {records: 1})
    longer = [
        _resized(one, range(1, 9), {lengths[dim - 1]: 2 * lengths[dim - 1] for dim in changed})
        for changed in together
    ]
    return [*shorter, more], longer


def _resized(call: Call, dims: Collection[int], sizes: Mapping[int, int]) -> Call:
    """Returns the call with its tensors cut or repeated where these dimensions have these sizes."""

    def change(leaf: torch.Tensor) -> torch.Tensor:
        for dim in dims:
            if dim < leaf.dim() and (size := leaf.shape[dim]) in sizes:
                leaf = leaf.index_select(dim, torch.arange(sizes[size], device=leaf.device) % size)
        return leaf

    return tree_map_only(torch.Tensor, change, call)


def _nothing_found(
    run: TracedRun, spec: PermutationSpec, network: nn.Module, groups: str
) -> ValueError:
    """Returns an error that says what was looked at, and why none of it may be permuted."""
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in run.tensors.items()]
    stay = [f"{name}: {cause}" for name, cause in spec.causes.items() if cause][:MOST_CAUSES]
    because = f"What fixed them: {'; '.join(stay)}." if stay else "It has no hidden axis."
    if unknown := ", ".join(f"{name} ({count} calls)" for name, count in run.unknown.items()):
        because += f" Operations without a rule keep what they touch in place: {unknown}."
    return ValueError(
        f"module {type(network).__name__} has no axis that may be permuted at groups={groups!r}. "
        f"Looked at: {', '.join(shapes[:20]) or 'nothing'}. {because} "
        f"{spec.describe_unreached()}Leave shuffle_weights out, or write the network with "
        "PyTorch's own operations."
    )
