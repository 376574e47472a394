"""Rules of operations that choose entries by position or by rank: indexing, embeddings, sorting, running sums, padding.

What is chosen by position is fixed; the axes that only come along are untouched. Index tensors hold
positions of fixed axes, so their values are the same whatever is permuted.
"""

from __future__ import annotations

import torch

from opacus_shuffle.permutation.finding.labels import (
    Dimensions,
    Factors,
    fix_all,
    fixed_dimensions,
    fixed_factors,
    regroup,
    unify_all,
    unify_dimensions,
)
from opacus_shuffle.permutation.finding.rules import as_list, rule, with_fixed
from opacus_shuffle.permutation.finding.rules_layers import reduction
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun


@rule("index")
def indexed(run: TracedRun, call: Call) -> None:
    """Chooses by positions or by a mask along some dimensions: fixed there, untouched elsewhere."""
    source = run.dimensions(call["self"])
    left, place = _untouched(run, call, source)
    chosen = fixed_dimensions(call.out.shape[place : place + call.out.dim() - len(left)])
    run.set(call.out, [*left[:place], *chosen, *left[place:]])


@rule("index_put _index_put_impl")
def index_put(run: TracedRun, call: Call) -> None:
    """Writes at positions along some dimensions: fixed there; elsewhere the values' axes are those of the target."""
    target, values = run.dimensions(call["self"]), call["values"]
    left, place = _untouched(run, call, target)
    chosen = max(
        1 if index.dtype in MASKS else index.dim() for index in call["indices"] if index is not None
    )
    labels: list[Factors | None] = [*left[:place], *[None] * chosen, *left[place:]]
    for dim in range(-values.dim(), 0):
        if values.shape[dim] > 1:
            if (meant := labels[dim]) is None:
                fix_all(run.dimensions(values)[dim])
            else:
                unify_all(run.dimensions(values)[dim], meant)
    run.set(call.out, target)
    run.occurrences.append(left)


MASKS = (torch.bool, torch.uint8)


def _untouched(run: TracedRun, call: Call, dims: Dimensions) -> tuple[Dimensions, int]:
    """Fixes where ``self[indices]`` chooses; returns the other dimensions, and before which of them the chosen ones come."""
    used: list[int] = []
    dim = 0
    for index in call["indices"]:
        width = index.dim() if index is not None and index.dtype in MASKS else 1
        if index is not None:
            used += list(range(dim, dim + width))
            fix_all(*dims[dim : dim + width], *run.dimensions(index))
        dim += width
    left = [each for dim, each in enumerate(dims) if dim not in used]
    return left, used[0] if used == list(range(used[0], used[-1] + 1)) else 0


@rule("index_add index_copy index_fill index_reduce")
def index_add(run: TracedRun, call: Call) -> None:
    """Adds rows at positions: fixed along the dimension; the others agree."""
    target = run.dimensions(call["self"])
    dim = call["dim"] % len(target)
    fix_all(target[dim])
    run.fix([call["index"]])
    source = call.arguments.get("source")
    if source is not None:
        added = run.dimensions(source)
        fix_all(added[dim])
        unify_dimensions(added[:dim] + added[dim + 1 :], target[:dim] + target[dim + 1 :])
    run.set(call.out, target)
    run.reduced(target, [dim])


@rule("gather take_along_dim")
def gathered(run: TracedRun, call: Call) -> None:
    """Chooses by positions along one dimension: fixed there; index and source agree in the others."""
    source, index = call["self"], call["index"]
    dims, chosen = run.dimensions(source), run.dimensions(index)
    along = call["dim"] % source.dim()
    for dim in range(source.dim()):
        if dim != along and source.shape[dim] == index.shape[dim]:
            unify_all(dims[dim], chosen[dim])
        else:
            fix_all([*dims[dim], *chosen[dim]])
    run.set(call.out, chosen)
    run.reduced(chosen, [along])


@rule("embedding")
def embedded(run: TracedRun, call: Call) -> None:
    """Chooses rows by the input: fixed; columns are free."""
    rows, columns = run.dimensions(call["weight"])
    fix_all(rows)
    run.set(call.out, [*run.dimensions(call["indices"]), columns])
    run.occurrences.append(
        [columns]
    )  # the places of the indices are not those of the rows, were they labelled as these
    run.contraction(call.out)


@rule("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(run: TracedRun, call: Call) -> None:
    """Sums rows chosen by the input."""
    rows, columns = run.dimensions(call["weight"])
    fix_all(rows)
    run.fix(call.inputs[1:])
    for tensor in call.outputs:
        follows = tensor.dim() == 2 and tensor.shape[1] == call["weight"].shape[1]
        last = columns if follows else fixed_factors(tensor.shape[-1])
        run.set(tensor, [*fixed_dimensions(tensor.shape[:-1]), last])
    run.contraction(*call.outputs)


@rule("view_as_complex view_as_real view_as_complex_copy view_as_real_copy")
def complex_view(run: TracedRun, call: Call) -> None:
    """Takes real and imaginary part as a fixed axis."""
    dims = run.dimensions(call["self"])
    if "complex" in call.name:
        fix_all(dims[-1])
        run.set(call.out, dims[:-1])
    else:
        run.set(call.out, [*dims, fixed_factors(2)])


@rule("_pack_padded_sequence _pad_packed_sequence")
def packed(run: TracedRun, call: Call) -> None:
    """Lays sequences of several lengths side by side, step by step, or takes them apart: what a step holds comes along."""
    rows, *sizes = call.inputs
    entire = run.dimensions(rows)
    steps = 2 if call.name == "aten._pack_padded_sequence" else 1
    fix_all(*entire[:steps])
    run.fix(sizes)
    run.occurrences.append(entire[steps:])
    out, lengths = call.outputs
    run.set(out, [*fixed_dimensions(out.shape[: 3 - steps]), *entire[steps:]])
    run.set(lengths, fixed_dimensions(lengths.shape))


@rule("pixel_shuffle pixel_unshuffle")
def pixels(run: TracedRun, call: Call) -> None:
    """Makes channels of the places inside a block, or the other way round: (channel, place)."""
    source, out = call.inputs[0], call.out
    dims = list(run.dimensions(source))
    fewer = min(source.shape[-3], out.shape[-3])
    channels, places = regroup(dims[-3], [fewer, source.shape[-3] // fewer])
    fix_all(places, dims[-2], dims[-1])
    run.set(
        out,
        [
            *dims[:-3],
            [*channels, *fixed_factors(out.shape[-3] // fewer)],
            *fixed_dimensions(out.shape[-2:]),
        ],
    )


@rule("channel_shuffle native_channel_shuffle")
def channel_shuffle(run: TracedRun, call: Call) -> None:
    """Makes (channel, group) of (group, channel)."""
    dims = list(run.dimensions(call.inputs[0]))
    groups = int(call["groups"])
    group, inside = regroup(dims[1], [groups, call.out.shape[1] // groups])
    dims[1] = [*inside, *group]
    run.set(call.out, dims)


@rule("sort topk kthvalue median nanmedian max min mode")
def ranked(run: TracedRun, call: Call) -> None:
    """Chooses entries along one dimension by rank, whatever their order was; where that is asked for, too, it is fixed.

    Equal entries and NaN (the largest) have the same values at the same ranks in any order. Fixed,
    too, are results without an order (``topk(sorted=False)``) and a choice between equally frequent
    values, of which PyTorch promises nothing (``mode``).
    """
    if call.arguments.get("dim") is None:
        reduction(run, call)
        return
    dims = list(run.dimensions(call["self"]))
    values, *places = call.outputs
    if dims:
        dim = call["dim"] % len(dims)
        # What was written to somebody else's tensor may be read without notice.
        if call.name == "aten.mode" or not call.arguments.get("sorted", True) or call.written:
            fix_all(dims[dim])
        run.fix_if_read(places, dims[dim])
        run.reduced(dims, [dim])
        dims[dim : dim + 1] = (
            [fixed_factors(values.shape[dim])] if values.dim() == len(dims) else []
        )
    for tensor in call.outputs:
        run.set(tensor, dims)


@rule(
    "flip roll cumsum cumprod logcumsumexp cummax cummin _fft_c2c _fft_r2c _fft_c2r tril triu "
    "index_select"
)
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
        touched = {
            dim % rank for dim in as_list(call.arguments.get("dims", call.arguments.get("dim")))
        } or set(range(rank))
    result = with_fixed(run, call, touched)
    for tensor in call.outputs:
        run.set(tensor, result)
