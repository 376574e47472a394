"""Finding the permutations that leave a network's function alone, by tracing it: ``find_permutations``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from opacus_shuffle.core.progress import enter_phase, progress
from opacus_shuffle.core.validation import instance_of, one_of
from opacus_shuffle.networks.rollback import rolled_back
from opacus_shuffle.networks.running import unwrap, without_graph
from opacus_shuffle.networks.sample_input import Call, call_of, normalise
from opacus_shuffle.permutation.finding.cheap_products import Frugal
from opacus_shuffle.permutation.finding.draws import Draws
from opacus_shuffle.permutation.finding.earlier_calls import EarlierCalls
from opacus_shuffle.permutation.finding.exploring import Explorer
from opacus_shuffle.permutation.finding.nesting import LEVELS, build_spec
from opacus_shuffle.permutation.finding.packings import Packing
from opacus_shuffle.permutation.finding.paths import Place
from opacus_shuffle.permutation.finding.traced_run import TracedRun
from opacus_shuffle.permutation.network import plain_attention, require_apart, require_ready
from opacus_shuffle.permutation.self_check import check_calls
from opacus_shuffle.permutation.spec import PermutationSpec

ROUNDS = 8  # of learning what is packed and what is written to; three did for all networks met, on one sample
MOST_CAUSES = 5  # in an error


def find_permutations(
    module: nn.Module, sample_input: Any = None, *, groups: str = "residual", more_samples: Sequence[Any] = ()
) -> PermutationSpec:
    """Finds which axes of the parameters may be permuted together without changing the network's function.

    The network runs on the sample, in training and in evaluation mode, under a tracer that follows every axis through
    every operation; an operation that it does not know keeps whatever it touches in place. It runs again on fewer and on more
    records, and on shorter and longer ones; where values decide what it does next, they are made to decide otherwise, too. What
    is never reached stays, with all that it may share. The network is left as it was; what its ``forward`` writes to globals
    and classes is not taken back.

    Args:
        module: The network, or Opacus's, a distributed or a compiled wrapper of it.
        sample_input: A tensor, a tuple of arguments or a mapping of keyword arguments of ``module.forward``; only its shapes
            (and valid indices) matter. A batch of 2 will do, but use the length of your data. ``None``: guessed from the first
            layer or from a Hugging Face configuration.
        groups: ``"residual"``: every permutation found. ``"heads"``: without those of the residual streams. ``"paper"``: hidden
            units, query and key dimensions of each head, and one permutation of the values that all heads share, as in
            Yang, Ji and Xiang's weight shuffling (Theorems 3 and 4); no order of heads, no residual stream.
        more_samples: Further inputs, each as ``sample_input``, for a network that does other things on others.

    Returns:
        The permutations, checked numerically (:meth:`PermutationSpec.check`).

    Raises:
        ValueError: If a sample does not run, no axis can be permuted, the numerical check fails, or values decide what the
            network does and it breaks when they decide otherwise (``more_samples`` that take every way are remedy).

    Formal Guarantees:
        Every permutation of the specification leaves the function of ``forward`` as it is, for all values of the parameters and
        all inputs that take a traced way: those of the samples, of other sizes of them, and of every decision in PyTorch's
        sight taken otherwise, one at a time and the first three in every combination; comparisons of sizes and of numbers that
        were read, and counts of calls, count as such. Not seen are optional arguments that no sample gives, sizes and numbers
        that decide as something else (a text, an array of NumPy's) where the code does not speak of them, sizes of which one
        way breaks on all inputs tried (``decisions`` lists them with one way), and other methods than ``forward``. Noise that
        treats entries alike stays the same in distribution.
    """
    one_of("groups", groups, LEVELS)
    network = unwrap(module)
    require_ready(network)
    instance_of("more_samples", more_samples, (list, tuple))
    more = [normalise(each, f"more_samples[{place}]") for place, each in enumerate(more_samples)]
    with progress("finding permutations"):
        return find_on_calls(network, [call_of(network, sample_input), *more], groups, every_way=bool(more))


@contextlib.contextmanager
def _young_garbage_only() -> Iterator[None]:
    """Has Python's collector pass over what there is already, all of which it would look through again and again."""
    frozen = gc.get_freeze_count()  # somebody's, who would not want it thawed
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@_young_garbage_only()
def find_on_calls(
    network: nn.Module,
    calls: list[Call],
    groups: str,
    *,
    others: Sequence[Call] = (),
    checked: Sequence[Call] = (),
    every_way: bool = False,
) -> PermutationSpec:
    """Finds permutations on these arguments and on ``others``, and checks them on the shortest input that will do.

    And on those to be ``checked``, or else on the arguments. The user may answer for it that they take ``every_way`` that
    inputs can.
    """
    draws = Draws()
    try:
        run, explorer = _traced(network, calls, others, draws)
        if explorer.lost and not every_way:
            raise _not_followed(network, *next(iter(explorer.lost.items())))
        run.merge_slices(constant=not explorer.reads())
        spec = build_spec(run, groups, explorer.decisions())
        if not spec.blocks:
            raise _nothing_found(run, spec, network, groups)
        require_apart({**dict(network.named_parameters()), **dict(network.named_buffers())}, spec.blocks)
        if all(parameter.device.type != "meta" for parameter in network.parameters()):
            shortest = explorer.shortest or calls[0]
            check_calls(spec, network, [shortest, *(call for call in checked or calls if call is not shortest)])
    finally:
        draws.restore()
    return spec


def _traced(network: nn.Module, calls: list[Call], others: Sequence[Call], draws: Draws) -> tuple[TracedRun, Explorer]:
    """Traces the network until nothing more is learnt of what is packed and what is written to.

    On ``others`` where their values may matter: those of a form on which nothing depends on values go the same way.
    """
    frugal, earlier = Frugal(network), EarlierCalls(network)
    _run_before(network, calls, frugal, earlier, draws)
    packings: dict[tuple[str, int], set[Packing]] = {}
    written: set[str] = set()
    met: list[Call] = []
    for attempt in range(ROUNDS):
        last = attempt == ROUNDS - 1
        run = TracedRun(network, packings, None if last else written)
        explorer = Explorer(network, run, draws, frugal, earlier)
        with rolled_back(network):
            explorer.count()
            learnt = False
            for place, call in enumerate(calls):
                name = f"more_samples[{place - 1}]" if place else "sample_input"
                for training in (True, False):
                    explorer.trace(call, training=training, name=name)
                learnt |= _learn(run, packings) or bool(run.newly_written)
                if learnt and not last and not place:
                    break  # all the others would be traced anew
            waiting = [call for call in others if (last or not learnt) and not explorer.knows(call, calls[0])]
            if new := [call for call in waiting if not any(call is each for each in met)]:
                _run_before(network, new, frugal, earlier, draws)
                explorer.count()
                met += new
            for call in waiting:
                for training in (True, False):
                    explorer.trace(call, training=training, name="another input")
                learnt |= _learn(run, packings) or bool(run.newly_written)
        if last or not learnt:
            with rolled_back(network):  # a short sample may have changed the network for good
                explorer.explore([*calls, *met])
        written |= run.newly_written
        if not (learnt or run.newly_written or _learn(run, packings)):
            break
    return run, explorer


def _run_before(network: nn.Module, calls: Sequence[Call], frugal: Frugal, earlier: EarlierCalls, draws: Draws) -> None:
    """Runs the network untraced, for what it draws each time and what it keeps of its calls."""
    with rolled_back(network), plain_attention(), draws.watched():
        for args, kwargs in calls:
            for training in (True, False):
                enter_phase("tracing")
                with contextlib.suppress(Exception):  # tracing says what is wrong with it
                    network.train(training)
                    frugal(lambda: without_graph(lambda: network(*args, **kwargs)))  # noqa: B023
                earlier.compare()  # the next call may take it back


def _learn(run: TracedRun, packings: dict[tuple[str, int], set[Packing]]) -> bool:
    """Adds the packings that a run has met; returns whether some were not known."""
    new = False
    for place, found in run.new_packings.items():
        known = packings.setdefault(place, set())
        new |= not found <= known
        known |= found
    return new


def _not_followed(network: nn.Module, place: Place, error: Exception) -> ValueError:
    return ValueError(
        f"module {type(network).__name__} decides by values at {place}, and breaks where they decide otherwise than on the "
        f"sample ({type(error).__name__}: {error}), so nobody knows what it does on other inputs: pass more_samples to "
        "find_permutations, such that every way is taken"
    )


def _nothing_found(run: TracedRun, spec: PermutationSpec, network: nn.Module, groups: str) -> ValueError:
    """Returns an error that says what was looked at, and why none of it may be permuted."""
    looked_at = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(run.tensors.items())[:20]) or "nothing"
    stay = "; ".join(f"{name}: {cause}" for name, cause in list(spec.causes.items())[:MOST_CAUSES] if cause)
    because = f"What fixed them: {stay}." if stay else "It has no hidden axis."
    if unknown := ", ".join(f"{name} ({count} calls)" for name, count in run.unknown.items()):
        because += f" Operations without a rule keep what they touch in place: {unknown}."
    if spec.unreached:
        because += f" {spec.describe_unreached()}"
    return ValueError(
        f"module {type(network).__name__} has no axis that may be permuted at groups={groups!r}. Looked at: {looked_at}. "
        + f"{because} Leave shuffle_weights out, or declare axes that tracing cannot see by register_permutation."
    )
