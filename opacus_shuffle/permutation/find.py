"""Finds permutations of weights that keep a network's function, by tracing the network.

There are four steps. This file has the first:

1. The network runs on the samples and on other sizes of the first one. ``finding/trace.py`` reports
   every operation to ``finding/traced_run.py``. A rule (``finding/rules.py``) determines which axes
   are the same, and which are fixed (``finding/axes.py``).
2. Free axes may be permuted. ``finding/nesting.py`` determines which of them have a permutation of
   their own for every position along another axis.
3. ``spec.py`` describes the result.
4. ``float64_check.py`` checks that the function stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.core.validation import instance_of, one_of
from opacus_shuffle.networks.running import Snapshot, results, rolled_back, unwrap, without_graph
from opacus_shuffle.networks.sample_input import Call, call_of, normalise
from opacus_shuffle.permutation.finding.axes import fix_all
from opacus_shuffle.permutation.finding.nesting import LEVELS, build_spec
from opacus_shuffle.permutation.finding.trace import Tracer
from opacus_shuffle.permutation.finding.traced_run import Findings, TracedRun
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.network import check_ready, check_separate_memory
from opacus_shuffle.permutation.spec import PermutationSpec

SHORT_LENGTH = 8
"""Length of the shorter inputs on which a network is traced too."""

MAX_CAUSES = 5
"""How many causes an error gives."""


def find_permutations(
    module: nn.Module,
    sample_input: Any = None,
    *,
    groups: str = "residual",
    more_samples: Sequence[Any] = (),
) -> PermutationSpec:
    """Finds which axes of parameters may be permuted together without changing the function.

    The network runs under a tracer that follows every axis through every operation: on the samples
    in both modes, and on other sizes of the first sample in evaluation mode. An operation that the
    tracer does not know fixes all axes that it touches. Parameters that no run reaches stay, with
    every axis that may be shared with them. The network is restored afterwards, except for globals
    and class attributes that its ``forward`` writes to.

    Args:
        module: The network, or a wrapper of it (Opacus's, distributed or compiled).
        sample_input: A tensor, a tuple of arguments or a mapping of keyword arguments of
            ``module.forward``. Only its shapes (and valid indices) matter. A batch of 2 is enough,
            but use the length of your data. ``None``: an input is guessed from the first layer or
            from a Hugging Face configuration.
        groups: ``"residual"``: every permutation found. ``"heads"``: without those of the residual
            streams. ``"paper"``: hidden units, query and key dimensions of each head, and one
            permutation of the values that all heads share, as in Yang, Ji and Xiang's weight
            shuffling (Theorems 3 and 4); no order of heads, no residual stream.
        more_samples: Further inputs in the form of ``sample_input``, for a network that takes other
            paths on them.

    Returns:
        The permutations, checked numerically (:meth:`PermutationSpec.check`).

    Raises:
        ValueError: If a sample does not run, no axis can be permuted, or the numerical check fails.

    Formal Guarantees:
        Every permutation of the specification keeps the function of ``forward``, for all values of
        the parameters and all inputs that take a traced path: that of a sample, or of the other
        sizes of the first sample. The limits of tracing are listed in "How permutations are found".
        Noise that is distributed alike for all entries keeps its distribution.
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

    The check runs on the shortest arguments that were traced, and on all given ones but the first.

    Args:
        network: The network, without wrappers.
        calls: Arguments. Other sizes are derived from the first ones.
        groups: As of :func:`find_permutations`.
    """
    before = Snapshot(network)
    with rolled_back(network, before):
        traces = _trace_all(network, calls)
    spec = build_spec(traces.run, groups, tuple(traces.reads))
    if not spec.blocks:
        raise _nothing_found(traces.run, spec, network, groups)
    check_separate_memory(
        dict(network.named_parameters()) | dict(network.named_buffers()), spec.blocks
    )
    if all(parameter.device.type != "meta" for parameter in network.parameters()):
        check_calls(spec, network, [traces.shortest, *calls[1:]], before)
    return spec


def _trace_all(network: nn.Module, calls: Sequence[Call]) -> _Traces:
    """Traces a network on its samples and on other sizes."""
    findings = Findings()
    while True:
        traces = _Traces(network, findings, calls[0])
        traces.trace_samples(calls)
        if not traces.run.outdated:
            traces.trace_other_sizes()
        # A run may find facts that it needed from its start, such as that an axis has parts.
        if not traces.run.outdated:
            return traces


class _Traces:
    """The runs of a network, traced into one record of its axes.

    Attributes:
        run: The record.
        shortest: The smallest arguments on which the network ran in both modes.
        reads: The lines at which Python reads a value.
    """

    def __init__(self, network: nn.Module, findings: Findings, sample: Call) -> None:
        self.run = TracedRun(network, findings)
        self.shortest = sample
        self.reads: dict[str, None] = {}
        self._network, self._sample = network, sample
        self._shapes: list[torch.Size] = []  # of the results on the sample

    def trace_samples(self, calls: Sequence[Call]) -> None:
        """Traces the network on arguments that must run in both modes."""
        for number, call in enumerate(calls):
            for training in (True, False):
                if self.run.outdated:
                    return
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
        """Traces shorter inputs of one more record, and longer ones of one, in evaluation mode."""
        atoms_of_samples = self.run.atoms()
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
            (atom for atom in atoms_of_samples if atom.form != "atom"),
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
    """Returns shorter inputs with one more record, and longer inputs of one record.

    Each is a list of alternatives, those with most changes first. Images change along all
    dimensions from the third on, texts along their second one.
    """
    leaves = (leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor) and leaf.dim())
    first = next(leaves, torch.empty(0))
    if not first.numel():
        return [], []
    records, *lengths = first.shape
    dims = list(range(1, first.dim()))
    together = [dims[1:], dims[:1]] if len(dims) > 2 else [[dim] for dim in dims]
    # A length of 1 would hide operations between neighbours.
    halves = {size: max(min(size, 2), size // 2) for size in lengths}
    more = _resized(sample, [0], {records: records + 1})
    shorter = [
        _resized(more, range(1, 9), {lengths[dim - 1]: sizes[lengths[dim - 1]] for dim in changed})
        for sizes in ({size: min(size, SHORT_LENGTH) for size in lengths}, halves)
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
    """Returns an error with the tensors, and the causes why none of them may be permuted."""
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in run.tensors.items()]
    stay = [f"{name}: {cause}" for name, cause in spec.causes.items() if cause][:MAX_CAUSES]
    reasons = f"What fixed them: {'; '.join(stay)}." if stay else "It has no hidden axis."
    if unknown := ", ".join(f"{name} ({count} calls)" for name, count in run.unknown.items()):
        reasons += f" Operations without a rule keep what they touch in place: {unknown}."
    return ValueError(
        f"module {type(network).__name__} has no axis that may be permuted at groups={groups!r}. "
        f"Looked at: {', '.join(shapes[:20]) or 'nothing'}. {reasons} "
        f"{spec.describe_unreached()}Leave shuffle_weights out, or write the network with "
        "PyTorch's own operations."
    )
