"""Rules say what each ATen operation does to axis labels: a small one per operation, and none on a guess.

A rule holds if permuting the operands along their labels permutes the result along its labels.
Where an operation sums over an axis it also notes the intermediate result without it, because a
permutation of one axis may depend on the position along another only where that position is known.
Operations that work entry by entry need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from opacus_shuffle.permutation.finding.labels import (
    Dimensions,
    factors,
    fix_all,
    fixed_dimensions,
    fixed_factors,
    unify_all,
)
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun

Rule = Callable[[TracedRun, Call], None]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of these operations (without their ``aten.``; in-place twins are meant too)."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            RULES[f"aten.{name}"] = function
        return function

    return register


def find_rule(call: Call) -> Rule | None:
    """Returns the rule of an operation, None if there is none."""
    found = RULES.get(call.name) or RULES.get(call.name.removesuffix("_"))
    return elementwise if found is None and call.pointwise else found


@rule(
    "copy fill zero native_dropout _fused_dropout bernoulli rand_like randn_like uniform "
    "exponential cauchy geometric"
)
@rule("log_normal poisson binomial _standard_gamma")
@rule("rrelu_with_noise hardswish log_sigmoid_forward _prelu_kernel prelu polar complex")
# Of these PyTorch does not mark every variant as working entry by entry.
@rule("masked_fill rsub threshold gelu mish abs eq ne ge gt le lt")
def elementwise(run: TracedRun, call: Call) -> None:
    """Works entry by entry, with broadcasting; random entries are independent and alike, so they may be permuted too."""
    operands = [tensor for tensor in call.inputs if tensor.dim()]
    for tensor in call.outputs:
        # An empty result that is not made of its operands is a buffer that this device has no use
        # for.
        if not tensor.numel() and tensor.shape != torch.broadcast_shapes(
            *(each.shape for each in operands)
        ):  # type: ignore[no-untyped-call]
            run.set(tensor, fixed_dimensions(tensor.shape))
            continue
        if len(operands) == 1 and operands[0].shape == tensor.shape:
            run.set(tensor, run.labels(operands[0]))
            continue
        run.set(tensor, broadcast([run.dimensions(each) for each in operands], tensor.dim()))
    if call.name.removesuffix("_") in ("aten.add", "aten.sub", "aten.rsub", "aten.lerp"):
        origins = {run.origins(tensor) for tensor in operands} - {frozenset()}
        if len(origins) > 1:  # results of different layers: a skip connection
            run.streams += [axis for each in run.dimensions(call.out) for axis in each]


@rule("normal")
def normal(run: TracedRun, call: Call) -> None:
    """Draws entry by entry with the means and spreads that are tensors; with numbers alone, entries that are all alike."""
    elementwise(run, call) if call.inputs else run.equal_entries(call.out)


def broadcast(operands: Iterable[Dimensions], rank: int) -> Dimensions:
    """Returns the labels of a result in which every entry meets those at its own place: all agree but those of size 1."""
    waiting = list(operands)
    result: Dimensions = []
    for dim in range(-rank, 0):
        carriers = [dims[dim] for dims in waiting if len(dims) >= -dim and factors(dims[dim])]
        for other in carriers[1:]:
            unify_all(carriers[0], other)
        result.append(carriers[0] if carriers else [])
    return result


@rule(
    "zeros ones full empty rand randn new_zeros new_ones new_full new_empty zeros_like ones_like "
    "full_like empty_like"
)
@rule("empty_strided new_empty_strided")
def uniform(run: TracedRun, call: Call) -> None:
    """Makes entries that are all alike, or independent and alike: any permutation will do."""
    run.equal_entries(call.out)


def with_fixed(run: TracedRun, call: Call, where: Iterable[int]) -> Dimensions:
    """Returns the labels of an operation's first input, along some dimensions fixed and of the result's size."""
    dims = list(run.dimensions(call.inputs[0]))
    for dim in where:
        fix_all(dims[dim])
        dims[dim] = fixed_factors(call.out.shape[dim])
    return dims


def as_list(value: Any) -> list[int]:
    """Returns one dimension or several as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
