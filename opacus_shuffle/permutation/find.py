"""Finding the permutations that leave a network's function alone, by tracing it: ``find_permutations``."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.core.progress import enter_phase, progress
from opacus_shuffle.core.validation import instance_of, one_of
from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import unwrap, without_graph
from opacus_shuffle.networks.sample_input import Call, call_of, normalise
from opacus_shuffle.permutation.finding.control_flow import ControlFlow, was_raised
from opacus_shuffle.permutation.finding.handlers import HandlerError, declared_axes
from opacus_shuffle.permutation.finding.labels import fix_all
from opacus_shuffle.permutation.finding.nesting import LEVELS, build_spec
from opacus_shuffle.permutation.finding.packings import Packing
from opacus_shuffle.permutation.finding.trace import Tracer
from opacus_shuffle.permutation.finding.traced_run import TracedRun
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.network import require_apart, require_ready
from opacus_shuffle.permutation.spec import PermutationSpec

ROUNDS = 8  # of learning what is packed and what is written to; three did for all networks met
MOST_WAYS = 100  # through a network
SHORT = 8  # a length that shows what a network does on shorter inputs
MOST_CAUSES = 5  # in an error


def find_permutations(
    module: nn.Module,
    sample_input: Any = None,
    *,
    groups: str = "residual",
    more_samples: Sequence[Any] = (),
) -> PermutationSpec:
    """Finds which axes of the parameters may be permuted together without changing the network's function.

    The network runs on the sample, in training and in evaluation mode, under a tracer that follows
    every axis through every operation; an operation that it does not know keeps whatever it touches
    in place. It runs again on more records, shorter and longer ones, and once for each line at
    which a value decides what it does next, with another answer there. What is never reached stays,
    with all that it may share. The network is left as it was; what its ``forward`` writes to
    globals and classes is not taken back.

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
    require_ready(network)
    instance_of("more_samples", more_samples, (list, tuple))
    more = [
        normalise(sample, f"more_samples[{place}]") for place, sample in enumerate(more_samples)
    ]
    with progress("finding permutations"):
        return find_on_calls(
            network, [call_of(network, sample_input), *more], groups, every_way=bool(more)
        )


def find_on_calls(
    network: nn.Module, calls: Sequence[Call], groups: str, *, every_way: bool = False
) -> PermutationSpec:
    """Finds permutations on these arguments, and checks them on the shortest that will do and on all but the first.

    Args:
        network: The network, without wrappers.
        calls: Arguments; the first is the sample, of which other sizes are made.
        groups: As of :func:`find_permutations`.
        every_way: Whether the user answers for it that the arguments take every way that inputs
            can.
    """
    with _young_garbage_only():
        packings: dict[tuple[str, int], set[Packing]] = {}
        written: set[str] = set()
        for attempt in range(ROUNDS):
            run = TracedRun(network, packings, None if attempt == ROUNDS - 1 else written)
            explorer = _Explorer(network, run)
            for place, call in enumerate(calls):
                explorer.trace_sample(
                    call, f"more_samples[{place - 1}]" if place else "sample_input"
                )
            if not _learn(run, packings, written):
                explorer.explore(calls[0], every_way=every_way)
                if not _learn(run, packings, written):
                    break
        spec = build_spec(run, groups, explorer.decisions)
        if not spec.blocks:
            raise _nothing_found(run, spec, network, groups)
        require_apart(
            {**dict(network.named_parameters()), **dict(network.named_buffers())}, spec.blocks
        )
        if all(parameter.device.type != "meta" for parameter in network.parameters()):
            check_calls(spec, network, [explorer.shortest or calls[0], *calls[1:]])
    return spec


@contextlib.contextmanager
def _young_garbage_only() -> Iterator[None]:
    """Has Python's collector pass over what there is already, all of which it would look through after every pass."""
    frozen = gc.get_freeze_count()  # somebody's, who would not want it thawed
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def _learn(
    run: TracedRun, packings: dict[tuple[str, int], set[Packing]], written: set[str]
) -> bool:
    """Adds what a run has learnt of packed axes and of constants that are written to; returns whether some is new."""
    new = not run.newly_written <= written
    written |= run.newly_written
    for place, met in run.new_packings.items():
        known = packings.setdefault(place, set())
        new |= not met <= known
        known |= met
    return new


@dataclasses.dataclass(frozen=True)
class _Way:
    """A run: on what, in which mode, and at which lines values are answered otherwise."""

    call: Call
    training: bool
    otherwise: frozenset[str] = frozenset()
    always: bool = False

    def inputs(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(self.call) if isinstance(leaf, torch.Tensor)]


class _Explorer:
    """Traces a network on the ways that it can be seen to take.

    Attributes:
        shortest: The shortest arguments that it ran on in both modes, for what can be found out on
            any.
    """

    def __init__(self, network: nn.Module, run: TracedRun) -> None:
        self._network, self._run = network, run
        self._first: dict[str, _Way] = {}  # per line at which values decide, a run that has met it
        self._asks: dict[str, bool] = {}  # per line, whether it is answered by yes or no
        self._ways: dict[str, int] = {}
        self.shortest: Call | None = None

    @property
    def decisions(self) -> Mapping[str, int]:
        """The lines at which values decide, with the number of ways that were followed there."""
        return dict(sorted(self._ways.items()))

    def trace_sample(self, call: Call, name: str) -> None:
        """Traces the network on arguments that must run in both modes; an error calls them by their ``name``."""
        for training in (True, False):
            try:
                self._trace(_Way(call, training))
            except HandlerError:
                raise
            except Exception as error:
                mode = "training" if training else "evaluation"
                raise ValueError(
                    f"{name} does not run through {type(self._network).__name__} in {mode} mode: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def explore(self, sample: Call, *, every_way: bool) -> None:
        """Traces runs on other sizes of the sample, and runs in which values decide otherwise."""
        entire = self._run.atoms()
        for place, alternatives in enumerate(_other_sizes(sample)):
            for call in alternatives:
                if self._try(_Way(call, training=False)) is None:
                    if place == 0 and self._try(_Way(call, training=True)) is None:
                        self.shortest = call
                    break
        # What is cut at these sizes and was not at the sample's is cut elsewhere at others.
        fix_all(
            (atom for atom in entire if atom.kind != "atom"),
            cause="cut at a place that depends on the input's size",
        )
        tried: set[str] = set()
        while waiting := [line for line in self._first if line not in tried][
            : MOST_WAYS - len(tried)
        ]:
            for line in waiting:  # other answers may lead to other lines
                tried.add(line)
                first = self._first[line]
                other = dataclasses.replace(first, otherwise=first.otherwise | {line})
                error = self._try(other)
                # What a mask chose may be empty against the answer, as in ``if mask.any():
                # x[mask].max()``.
                if error is None or self._try(dataclasses.replace(other, always=True)) is None:
                    self._ways[line] += 1
                elif self._asks[line] and not every_way and not was_raised(error):
                    raise _not_followed(self._network, line, error)
        if (
            self._run.unreached() and self._first
        ):  # a loop over experts may have gone past some every time
            self._try(_Way(sample, training=False, always=True))

    def _try(self, way: _Way) -> Exception | None:
        """Traces a run that may be impossible; returns why, and then has labelled nothing."""
        try:
            with rolled_back(self._network):
                self._network.train(way.training)
                answers = ControlFlow(
                    [*way.inputs(), *self._network.parameters()], way.otherwise, always=way.always
                )
                without_graph(lambda: self._run_in(answers, way))
        except Exception as error:
            return error
        self._trace(way)
        return None

    def _run_in(self, mode: ControlFlow, way: _Way) -> None:
        args, kwargs = way.call
        with mode:
            self._network(*args, **kwargs)

    def _trace(self, way: _Way) -> None:
        enter_phase("tracing")
        args, kwargs = way.call

        def run() -> Tracer:
            tracer = Tracer(
                self._network, self._run, way.inputs(), way.otherwise, always=way.always
            )
            with declared_axes(self._network, tracer):
                tracer.trace(lambda: self._network(*args, **kwargs))
            return tracer

        with rolled_back(self._network):
            self._network.train(way.training)
            tracer = without_graph(run)
        for line, asks in tracer.decisions.items():
            self._first.setdefault(line, way)
            self._ways.setdefault(line, 1)
            self._asks[line] = self._asks.get(line, True) and asks


def _other_sizes(call: Call) -> Iterator[list[Call]]:
    """Yields inputs with one more record, and shorter, then with one record, and longer.

    Each is a list of alternatives, of which those come first that change most: images change along
    all dimensions from the third on, texts along their second one.
    """
    first = next(
        (leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()), None
    )
    if first is None or not first.numel():
        return
    records, *lengths = first.shape
    dims = list(range(1, first.dim()))
    ways = [dims[1:], dims[:1]] if len(dims) > 2 else [[dim] for dim in dims]
    half = [
        max(min(size, 2), size // 2) for size in lengths
    ]  # along a length of 1 nothing is carried on
    for count, changes in (
        (records + 1, [[min(size, SHORT) for size in half], half]),
        (1, [[2 * n for n in lengths]]),
    ):
        batch = _resized(call, [0], {records: count})
        yield [
            *(
                _resized(batch, range(1, 9), {lengths[d - 1]: new[d - 1] for d in way})
                for new in changes
                for way in ways
            ),
            batch,
        ]


def _resized(call: Call, dims: Collection[int], sizes: Mapping[int, int]) -> Call:
    """Returns the call with all its tensors cut or repeated along those of these dimensions that have one of these sizes."""

    def change(leaf: torch.Tensor) -> torch.Tensor:
        for dim in dims:
            if dim < leaf.dim() and (size := leaf.shape[dim]) in sizes:
                leaf = leaf.index_select(dim, torch.arange(sizes[size], device=leaf.device) % size)
        return leaf

    return tree_map_only(torch.Tensor, change, call)


def _not_followed(network: nn.Module, line: str, error: Exception) -> ValueError:
    return ValueError(
        f"module {type(network).__name__} decides by values at {line}, and breaks where they "
        "decide otherwise than on the "
        f"sample ({type(error).__name__}: {error}), so nobody knows what it does on other inputs: "
        "pass more_samples to "
        "find_permutations, such that every way is taken"
    )


def _nothing_found(
    run: TracedRun, spec: PermutationSpec, network: nn.Module, groups: str
) -> ValueError:
    """Returns an error that says what was looked at, and why none of it may be permuted."""
    looked_at = (
        ", ".join(
            f"{name} {tuple(tensor.shape)}" for name, tensor in list(run.tensors.items())[:20]
        )
        or "nothing"
    )
    stay = "; ".join(
        f"{name}: {cause}" for name, cause in list(spec.causes.items())[:MOST_CAUSES] if cause
    )
    because = f"What fixed them: {stay}." if stay else "It has no hidden axis."
    if unknown := ", ".join(f"{name} ({count} calls)" for name, count in run.unknown.items()):
        because += f" Operations without a rule keep what they touch in place: {unknown}."
    if spec.unreached:
        because += f" {spec.describe_unreached()}"
    return ValueError(
        f"module {type(network).__name__} has no axis that may be permuted at groups={groups!r}. "
        f"Looked at: {looked_at}. "
        + f"{because} Leave shuffle_weights out, or declare axes that tracing cannot see by register_permutation."
    )
