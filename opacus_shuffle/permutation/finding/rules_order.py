"""Rules of operations that put entries in order, and of those that go through them one after another.

The entries of a sorted axis are a function of the entries alone, not of their order: the axis before may be permuted, the axis
after has fixed places. Where they stood before depends on their order, and with equal entries on more than that.
"""

from __future__ import annotations

import torch

from opacus_shuffle.permutation.finding.labels import (
    IncompatibleError,
    fix_all,
    fixed_dimensions,
    fixed_factors,
    unify_dimensions,
)
from opacus_shuffle.permutation.finding.rules import as_list, rule, with_fixed
from opacus_shuffle.permutation.finding.rules_layers import reduction
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun


@rule("sort topk kthvalue median nanmedian max min mode")
def ranked(run: TracedRun, call: Call) -> None:
    """Chooses entries along one dimension by rank, whatever their order was; where that is asked for, too, it is fixed.

    Equal entries and NaN (the largest) have the same values at the same ranks in any order. Fixed, too, are results without an
    order (``topk(sorted=False)``) and a choice between equally frequent values, of which PyTorch promises nothing (``mode``).
    """
    if call.arguments.get("dim") is None:
        reduction(run, call)
        return
    dims = list(run.dimensions(call["self"]))
    values, *places = call.outputs
    if dims:
        dim = call["dim"] % len(dims)
        read = any(call.reads(tensor) for tensor in places)
        if read or call.name == "aten.mode" or not call.arguments.get("sorted", True):
            fix_all(dims[dim])
        run.reduced(dims, [dim])
        dims[dim : dim + 1] = [fixed_factors(values.shape[dim])] if values.dim() == len(dims) else []
    for tensor in call.outputs:
        run.set(tensor, dims)


@rule("histc histogram bincount")
def counted(run: TracedRun, call: Call) -> None:
    """Counts entries by their values, whatever their order was; each weight belongs to the entry at its own place."""
    weights = call.arguments.get("weights", call.arguments.get("weight"))
    if weights is not None:
        unify_dimensions(run.dimensions(weights), run.dimensions(call["self"]))
    run.fix([call["bins"]] if isinstance(call.arguments.get("bins"), torch.Tensor) else [])
    for tensor in call.outputs:
        run.set(tensor, fixed_dimensions(tensor.shape))


@rule("_unique2")
def different(run: TracedRun, call: Call) -> None:
    """Lists the values that occur, in order. Of several NaN, which all differ, it depends on their order which is which."""
    values, places, counts = call.outputs
    entries = run.dimensions(call["self"])
    if not call["sorted"] or (call.reads(places) and call["self"].is_floating_point()):
        fix_all(*entries)
    run.set(places, entries if call["return_inverse"] else fixed_dimensions(places.shape))
    for tensor in (values, counts):
        run.set(tensor, fixed_dimensions(tensor.shape))


@rule("isin")
def contained(run: TracedRun, call: Call) -> None:
    """Says of each entry whether it is one of some values, in whatever order these are."""
    if call["assume_unique"]:
        raise IncompatibleError
    elements = call.arguments.get("elements")
    run.set(call.out, [] if elements is None else run.dimensions(elements))


@rule("flip roll cumsum cumprod logcumsumexp cummax cummin _fft_c2c _fft_r2c _fft_c2r tril triu index_select")
@rule("constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d")
def along(run: TracedRun, call: Call) -> None:
    """Depends on the order along some dimensions (all that change their size, at least): fixed there, untouched elsewhere."""
    run.fix(call.inputs[1:])
    rank = call.inputs[0].dim()
    name = call.name.removesuffix("_").removeprefix("aten.")
    if name in ("tril", "triu"):
        touched = {rank - 2, rank - 1}
    elif name == "constant_pad_nd":
        touched = {rank - 1 - i // 2 for i, amount in enumerate(call["pad"]) if amount}
    elif name.startswith("reflection_pad"):
        touched = {rank - 1 - i for i in range(len(call["padding"]) // 2)}
    else:
        touched = {dim % rank for dim in as_list(call.arguments.get("dims", call.arguments.get("dim")))} or set(range(rank))
    result = with_fixed(run, call, touched)
    for tensor in call.outputs:
        run.set(tensor, result)
