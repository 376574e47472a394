"""Finding the permutations that leave a network's function alone, by tracing it: ``find_permutations``."""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus_shuffle.core.validation import one_of
from opacus_shuffle.permutation.finding.handlers import HandlerError, declared_axes
from opacus_shuffle.permutation.finding.nesting import LEVELS, build_spec
from opacus_shuffle.permutation.finding.trace import Tracer
from opacus_shuffle.permutation.finding.traced_run import Packing, TracedRun
from opacus_shuffle.permutation.network import kept_activations, require_apart, require_ready, results, state_kept, unwrap
from opacus_shuffle.permutation.sample_input import call_of
from opacus_shuffle.permutation.self_check import check_call
from opacus_shuffle.permutation.spec import PermutationSpec

ROUNDS = 6  # of learning what is packed and what is written to; three are enough for all networks met


def find_permutations(module: nn.Module, sample_input: Any = None, *, groups: str = "residual") -> PermutationSpec:
    """Finds which axes of the parameters may be permuted together without changing the network's function.

    The network runs twice on the sample, in training and in evaluation mode, under a tracer that follows every axis through
    every operation; an operation that it does not know keeps whatever it touches in place. The network is left as it was.

    Args:
        module: The network, or Opacus's, a distributed or a compiled wrapper of it.
        sample_input: A tensor, a tuple of arguments or a mapping of keyword arguments of ``module.forward``; only its shapes
            (and valid indices) matter. A batch of 2 will do, but use the length of your data. ``None``: guessed from the first
            layer or from a Hugging Face configuration.
        groups: ``"residual"``: every permutation found. ``"heads"``: without those of the residual streams. ``"paper"``: hidden
            units, query and key dimensions of each head, and one permutation of the values that all heads share, as in
            Yang, Ji and Xiang's weight shuffling (Theorems 3 and 4); no order of heads, no residual stream.

    Returns:
        The permutations, checked numerically (:meth:`PermutationSpec.check`).

    Raises:
        ValueError: If the sample does not run, no axis can be permuted, or the numerical check fails.

    Formal Guarantees:
        Every permutation of the specification leaves the function computed on the traced path as it is, for all values of the
        parameters and all inputs; a network whose operations depend on values of the data is covered on the path that the
        sample takes. Dropout and other noise that treats entries alike stay the same in distribution.
    """
    one_of("groups", groups, LEVELS)
    network = unwrap(module)
    require_ready(network)
    args, kwargs = call_of(network, sample_input)
    packings: dict[tuple[str, int], set[Packing]] = {}
    written: set[int] = set()
    best: PermutationSpec | None = None
    for attempt in range(ROUNDS):
        run = TracedRun(network, packings, written if attempt < ROUNDS - 1 else None)
        with state_kept(network):
            for training in (True, False):
                network.train(training)
                _forward(run, network, args, kwargs)
        learnt = bool(run.newly_written)
        for place, found in run.new_packings.items():
            known = packings.setdefault(place, set())
            learnt |= not found <= known
            known |= found
        if run.newly_written:  # these labels are worthless
            written |= run.newly_written
            continue
        spec = build_spec(run, groups)
        if best is None or spec.log2_size() > best.log2_size():
            best = spec
        if not learnt:
            break
    assert best is not None
    if not best.blocks:
        raise _nothing_found(run, network, groups)
    require_apart({**dict(network.named_parameters()), **dict(network.named_buffers())}, best.blocks)
    if all(parameter.device.type != "meta" for parameter in network.parameters()):
        check_call(best, network, args, kwargs)
    return best


def _nothing_found(run: TracedRun, network: nn.Module, groups: str) -> ValueError:
    """Returns an error that says what was looked at, and why none of it may be permuted."""
    looked_at = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(run.tensors.items())[:20]) or "nothing"
    because = "It has no hidden axis, or something along its hidden axes has fixed places (a constant, an order, an output)."
    if unknown := ", ".join(f"{name} ({count} calls)" for name, count in run.unknown.items()):
        because = f"Operations without a rule keep what they touch in place: {unknown} (see register_permutation)."
    return ValueError(
        f"module {type(network).__name__} has no axis that may be permuted at groups={groups!r}. Looked at: {looked_at}. "
        + because
    )


def _forward(run: TracedRun, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs the network once, traced, in its present mode."""
    tracer = Tracer(network, run)
    with declared_axes(network, tracer):
        try:
            outputs = tracer.trace(lambda: network(*args, **kwargs))
        except HandlerError:
            raise
        except Exception as error:
            mode = "training" if network.training else "evaluation"
            raise ValueError(
                f"sample_input does not run through {type(network).__name__} in {mode} mode: {type(error).__name__}: {error}"
            ) from error
    run.fix([*results(outputs), *kept_activations(network)])
