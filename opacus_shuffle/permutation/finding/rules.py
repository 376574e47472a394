"""The rules of ATen operations: what each operation does to the axes of its operands and results.

A rule is correct if permuting the operands along their axes permutes the results along theirs, for
all values of the operands. If an operation sums over an axis, its rule also records the
intermediate result without this axis, because a permutation of one axis may depend on the position
along another only if that position is determined. Operations that PyTorch marks as pointwise need
no rule. Axes along which an operation chooses by position are fixed. Index tensors hold positions
of fixed axes, so their values do not depend on the permutation. An operation about which there is
doubt has no rule, so it fixes all axes that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from opacus_shuffle.permutation.finding.axes import (
    Axes,
    Axis,
    Factors,
    IncompatibleError,
    concatenation,
    factors,
    fix_all,
    fixed_axes,
    fixed_factors,
    free_factors,
    product,
    regroup,
    size_of,
    split_concatenation,
    unify,
    unify_all,
    unify_axes,
)
from opacus_shuffle.permutation.finding.traced_run import Call, Slices, TracedRun

MASKS = (torch.bool, torch.uint8)
Rearrangement = Callable[[Call, Axes], Axes]
Rule = Callable[[TracedRun, Call], None]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operations, named without ``aten.``, and for their in-place variants."""

    def register(function: Rule) -> Rule:
        for name in names.split():
            RULES[f"aten.{name}"] = function
        return function

    return register


def find_rule(call: Call) -> Rule | None:
    """Returns the rule of an operation, or None."""
    registered = RULES.get(call.name) or RULES.get(call.name.removesuffix("_"))
    return elementwise if registered is None and call.pointwise else registered


@rule(
    "copy fill zero native_dropout _fused_dropout bernoulli rand_like randn_like uniform normal "
    "exponential cauchy geometric log_normal poisson binomial _standard_gamma "
    "hardswish log_sigmoid_forward _prelu_kernel prelu"
)
# PyTorch does not mark every variant of these as pointwise.
@rule("masked_fill rsub threshold gelu mish abs eq ne ge gt le lt")
def elementwise(run: TracedRun, call: Call) -> None:
    """Works entry by entry, with broadcasting; random entries are independent draws."""
    operands = [tensor for tensor in call.inputs if tensor.dim()]
    if len(operands) == 1:
        axes = run.axes_or_slices(operands[0])
    else:
        rank = max((tensor.dim() for tensor in operands), default=0)
        axes = broadcast([run.axes(tensor) for tensor in operands], rank)
    shape = call.out.shape if operands else ()
    for tensor in call.outputs:
        # An empty result of another shape is a buffer that this device does not use.
        run.set(tensor, axes if tensor.shape == shape else fixed_axes(tensor.shape))
    if call.name.removesuffix("_") in ("aten.add", "aten.sub", "aten.rsub", "aten.lerp"):
        origins = {run.origins(tensor) for tensor in operands} - {frozenset()}
        if len(origins) > 1:  # results of different layers are added: a skip connection
            run.streams += [axis for row in run.axes(call.out) for axis in row]


def broadcast(operands: Iterable[Axes], rank: int) -> Axes:
    """Returns the axes of a result of broadcasting, which unifies all axes but those of size 1."""
    waiting = list(operands)
    result: Axes = []
    for dim in range(-rank, 0):
        carriers = [axes[dim] for axes in waiting if len(axes) >= -dim and factors(axes[dim])]
        for other in carriers[1:]:
            unify_all(carriers[0], other)
        result.append(carriers[0] if carriers else [])
    return result


@rule(
    "zeros ones full empty rand randn new_zeros new_ones new_full new_empty zeros_like ones_like "
    "full_like empty_like empty_strided new_empty_strided"
)
def uniform(run: TracedRun, call: Call) -> None:
    """Creates a tensor of equal entries or independent draws, which any permutation keeps."""
    run.mark_uniform(call.out)


def with_fixed(run: TracedRun, call: Call, dims: Iterable[int]) -> Axes:
    """Returns the axes of the first input; those of ``dims`` are fixed, with the result's size."""
    axes = list(run.axes(call.inputs[0]))
    for dim in dims:
        fix_all(axes[dim])
        axes[dim] = fixed_factors(call.out.shape[dim])
    return axes


def as_list(value: Any) -> list[int]:
    """Returns an argument that is one dimension, several or none as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def dims_of(call: Call, argument: str) -> set[int]:
    """Returns the dimensions of the first input that an argument gives; all by default."""
    rank = call.inputs[0].dim()
    return {dim % rank for dim in as_list(call.arguments.get(argument))} or set(range(rank))


# Rearranging, cutting and joining
# ------------------------------------------------------------------------------------------


def shape_rule(names: str) -> Callable[[Rearrangement], Rearrangement]:
    """Registers a rule for operations that rearrange the axes of one tensor."""

    def register(function: Rearrangement) -> Rearrangement:
        @rule(names)
        def apply(run: TracedRun, call: Call) -> None:
            axes = run.axes_or_slices(call.inputs[0])
            if isinstance(axes, Slices):
                changed: Axes | Slices = Slices(
                    axes.marker, [function(call, row) for row in axes.of_each]
                )
            else:
                changed = function(call, axes)
            if call.out is call.inputs[0]:  # in place, so the tensor has another shape now
                run.forget(call.out)
            run.set(call.out, changed)

        return function

    return register


@shape_rule("detach alias clone _to_copy lift_fresh")
def same(call: Call, axes: Axes) -> Axes:
    """Keeps the axes."""
    return list(axes)


@shape_rule("t transpose permute")
def permuted(call: Call, axes: Axes) -> Axes:
    """Reorders the axes; exchanges the last two if none are given."""
    if "dims" in call.arguments:
        return [axes[dim] for dim in call["dims"]]
    result = list(axes)
    if len(axes) > 1:
        one, other = call.arguments.get("dim0", -2), call.arguments.get("dim1", -1)
        result[one], result[other] = result[other], result[one]
    return result


@shape_rule("squeeze unsqueeze")
def squeezed(call: Call, axes: Axes) -> Axes:
    """Removes or adds axes of size 1."""
    asked = as_list(call.arguments.get("dim"))
    if call.name.startswith("aten.unsqueeze"):
        place = asked[0] % (len(axes) + 1)
        return [*axes[:place], [], *axes[place:]]
    drop = {dim % len(axes) for dim in asked} or set(range(len(axes)))
    return [row for dim, row in enumerate(axes) if row or dim not in drop]


@rule("view _unsafe_view reshape _reshape_alias")
def view(run: TracedRun, call: Call) -> None:
    """Regroups factors; parts of a sum that become an axis remain different slices."""
    axes = run.axes_or_slices(call.inputs[0])
    # An empty axis has no factors, as one of size 1.
    before, shape = ([max(size, 1) for size in t.shape] for t in (call.inputs[0], call.out))
    if call.inputs[0].dtype != call.out.dtype or math.prod(before) != math.prod(shape):
        raise IncompatibleError
    if isinstance(axes, Slices):
        rows = ([axis for row in slice_ for axis in row] for slice_ in axes.of_each)
        run.set(call.out, Slices(axes.marker, [regroup(row, shape) for row in rows]))
        return
    row = factors([axis for row in axes for axis in row])
    passed = 1
    for place, axis in enumerate(row):
        if axis.form == "sum" and len({part.size for part in axis.components}) == 1:
            for dim, size in enumerate(shape):
                if size == len(axis.components) and math.prod(shape[:dim]) == passed:
                    slices = [
                        regroup([*row[:place], part, *row[place + 1 :]], _without(shape, dim))
                        for part in axis.components
                    ]
                    _stack(run, call.out, dim, slices)
                    return
        passed *= axis.size
    run.set(call.out, regroup(row, shape))


@rule("expand repeat")
def repeated(run: TracedRun, call: Call) -> None:
    """Repeats entries, as (copy, position); copies are alike."""
    source, out = call.inputs[0], call.out
    new = out.dim() - source.dim()
    sizes = [1] * new + list(source.shape)
    axes: Axes = [[]] * new + run.axes(source)
    copies = [free_factors(size // max(old, 1)) for old, size in zip(sizes, out.shape, strict=True)]
    run.set(out, [[*copy, *row] for copy, row in zip(copies, axes, strict=True)])


@rule("select unbind")
def selected(run: TracedRun, call: Call) -> None:
    """Selects one slice or all; the axis is fixed unless its slices are known to differ."""
    source = call.inputs[0]
    dim = call["dim"] % source.dim()
    pieces: list[torch.Tensor | None] = list(call.outputs)
    if "index" in call.arguments:
        pieces = [None] * source.shape[dim]
        pieces[call["index"]] = call.out
    _cut(run, source, dim, [1] * len(pieces), pieces, kept=False)


@rule("slice")
def sliced(run: TracedRun, call: Call) -> None:
    """Takes a part of a sum, or one entry of each step that divides the axis."""
    source, out = call.inputs[0], call.out
    dim = call["dim"] % source.dim()
    size, step = source.shape[dim], call["step"]
    start, end, _ = slice(call["start"], call["end"]).indices(size)
    if start == 0 and end == size and step == 1:
        run.set(out, run.axes_or_slices(source))
    elif step > 1 and not size % step and out.shape[dim] == size // step:
        axes = list(run.axes(source))
        axes[dim], inside = regroup(axes[dim], [size // step, step])
        fix_all(inside)
        run.set(out, axes)
    elif step != 1 or end <= start:
        run.set(out, with_fixed(run, call, [dim]))
    else:
        _cut(run, source, dim, [start, end - start, size - end], [None, out, None])


@rule("split split_with_sizes unsafe_split unsafe_split_with_sizes")
def split(run: TracedRun, call: Call) -> None:
    """Splits an axis into pieces, as a sum."""
    dim = call["dim"] % call.inputs[0].dim()
    _cut(run, call.inputs[0], dim, [tensor.shape[dim] for tensor in call.outputs], call.outputs)


def _cut(
    run: TracedRun,
    source: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    pieces: Sequence[torch.Tensor | None],
    *,
    kept: bool = True,
) -> None:
    """Sets the axes of pieces of a tensor along one axis, which they have only if ``kept``."""
    axes = run.axes_or_slices(source)
    singly, count = set(sizes) <= {0, 1}, sum(size > 0 for size in sizes)
    if isinstance(axes, Slices) and axes.of_each[0][dim] == [axes.marker] and singly:
        rows: list[tuple[Axes, Factors]] = [(slice_, []) for slice_ in axes.of_each]
    else:
        axes = run.axes(source)
        row = factors(axes[dim])
        if row and set(sizes) <= {0, size_of(row[1:])}:
            run.note_fused(row[0])  # such as (3, d) split into thirds
        if singly:
            fix_all(row)
            rows = [(axes, [])] * count
        else:
            parts = split_concatenation(product(row), [size for size in sizes if size])
            rows = [(axes, factors([part])) for part in parts]
    waiting = iter(rows)
    for size, piece in zip(sizes, pieces, strict=True):
        before, part = next(waiting) if size else (run.axes(source), [])
        if piece is not None:
            run.set(piece, [*before[:dim], *[part] * kept, *before[dim + 1 :]])


@rule("cat")
def concatenated(run: TracedRun, call: Call) -> None:
    """Joins axes to a sum along one dimension, and unifies the others."""
    dim = call["dim"] % call.out.dim()
    tensors = [tensor for tensor in call["tensors"] if tensor.dim() == call.out.dim()]
    if len(tensors) > 1 and all(tensor.shape[dim] == 1 for tensor in tensors):
        _stack(run, call.out, dim, [_without(run.axes(tensor), dim) for tensor in tensors])
        return
    first, *others = (run.axes(tensor) for tensor in tensors)
    for other in others:
        unify_axes(_without(first, dim), _without(other, dim))
    pieces = [product(run.axes(tensor)[dim]) for tensor in tensors if tensor.shape[dim]]
    joined = factors([concatenation(pieces)]) if pieces else []
    run.set(call.out, [*first[:dim], joined, *first[dim + 1 :]])


@rule("stack")
def stacked(run: TracedRun, call: Call) -> None:
    """Stacks tensors along a new dimension."""
    _stack(run, call.out, call["dim"] % call.out.dim(), [run.axes(t) for t in call["tensors"]])


def _stack(run: TracedRun, out: torch.Tensor, dim: int, slices: Sequence[Axes]) -> None:
    """Stacks slices along a new dimension; they remain different until they are unified."""
    marker = Axis(len(slices), fixed=True)
    markers: Factors = [marker] if len(slices) > 1 else []
    rows = [[*row[:dim], markers, *row[dim:]] for row in slices]
    run.set(out, Slices(marker, rows) if markers else rows[0])


def _without(row: Sequence[Any], place: int) -> list[Any]:
    return [*row[:place], *row[place + 1 :]]


# Layers
# ------------------------------------------------------------------------------------------


PRODUCTS = {
    "mm": ("ij", "jk", "ik"),
    "addmm": ("ij", "jk", "ik"),
    "_sparse_addmm": ("ij", "jk", "ik"),
    "bmm": ("bij", "bjk", "bik"),
    "baddbmm": ("bij", "bjk", "bik"),
    "addbmm": ("bij", "bjk", "ik"),
    "mv": ("ij", "j", "i"),
    "addmv": ("ij", "j", "i"),
    "dot": ("i", "i", ""),
    "vdot": ("i", "i", ""),
}
"""Axes of both factors and of the result. Axes that the result lacks are summed over."""


@rule(" ".join(PRODUCTS))
def matrix_product(run: TracedRun, call: Call) -> None:
    """Unifies the axes that are multiplied; those of a bias are unified with the result."""
    name = call.name.removeprefix("aten.").removesuffix("_")
    operands = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
    bias = operands.pop(0) if "add" in name else None
    one, other, result = PRODUCTS[name]
    by_letter = contract(run, call, operands, (one, other), result)
    if bias is not None:
        for dim in range(-bias.dim(), 0):
            if bias.shape[dim] > 1:
                unify_all(run.axes(bias)[dim], by_letter[result[dim]])
        if run.origins(bias):
            run.streams += [axis for letter in result for axis in by_letter[letter]]
    if all(map(run.origins, operands[:2])):  # queries and keys, or weights and values
        run.contracted += by_letter["j"] if "j" in one else by_letter["i"]
        run.heads += by_letter.get("b", [])


def contract(
    run: TracedRun,
    call: Call,
    operands: Iterable[torch.Tensor],
    letters: Iterable[Sequence[str]],
    result: Sequence[str],
) -> dict[str, Factors]:
    """Multiplies and sums tensors as ``torch.einsum`` does; returns the axes by their letters."""
    by_letter: dict[str, Factors] = {}
    for tensor, names in zip(operands, letters, strict=False):
        for letter, row in zip(names, run.axes(tensor), strict=True):
            if by_letter.setdefault(letter, row) is not row:
                unify_all(by_letter[letter], row)
    run.occur(list(by_letter.values()))  # the products before the sum
    run.set(call.out, [by_letter[letter] for letter in result])
    run.contraction(call.out)
    return by_letter


@rule("convolution _convolution cudnn_convolution mkldnn_convolution")
def convolution(run: TracedRun, call: Call) -> None:
    """Unifies channels group by group; fixes most kernel taps and spatial positions."""
    source, kernel = map(run.axes, call.inputs[:2])
    channels = _link_channels(run, call, source, kernel)
    positions = [
        _link_positions(run, call, dim, source, kernel) for dim in range(2 - len(kernel), 0)
    ]
    for bias in call.inputs[2:3]:
        unify_all(run.axes(bias)[0], channels)
    run.set(call.out, [*source[: 1 - len(kernel)], channels, *positions])
    run.contraction(call.out)


def _link_positions(run: TracedRun, call: Call, dim: int, source: Axes, kernel: Axes) -> Factors:
    """Returns the spatial positions of the result along one dimension.

    A kernel of one tap does the same at every position. One that spans all positions sums over
    them, as a matrix product does. All others fix positions and taps.
    """
    size, taps, results = (tensor.shape[dim] for tensor in (*call.inputs[:2], call.out))
    if not call.arguments.get("transposed") and not any(as_list(call["padding"])):
        if taps == 1 and results == size:
            return source[dim]
        if taps == size and results == 1:
            unify_all(source[dim], kernel[dim])
            return []
    fix_all(source[dim], kernel[dim])
    return fixed_factors(results)


def _link_channels(run: TracedRun, call: Call, source: Axes, kernel: Axes) -> Factors:
    """Unifies the channels of a source and of a kernel; returns those of the result."""
    groups, transposed = int(call["groups"]), call.arguments.get("transposed")
    records, channels = source[0], source[1 - len(kernel)]
    leaving, entering = kernel[:2]
    if groups == 1:
        leaving, entering = (entering, leaving) if transposed else (leaving, entering)
        unify_all(channels, entering)
        run.occur([records, channels, leaving])
        return leaving
    if transposed:
        raise IncompatibleError
    # The kernel is ((group, out), in).
    group, inside = regroup(channels, [groups, size_of(channels) // groups])
    group_out, leaving = regroup(leaving, [groups, size_of(leaving) // groups])
    unify_all(group, group_out)
    unify_all(inside, entering)
    run.occur([records, group, inside, leaving])
    return [*group, *leaving]


@rule(
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d mkldnn_max_pool2d replication_pad1d replication_pad2d "
    "replication_pad3d"
)
def pooling(run: TracedRun, call: Call) -> None:
    """Works channel by channel; spatial positions are fixed."""
    positions = 1 if "1d" in call.name else 3 if "3d" in call.name else 2
    axes = run.axes(call.inputs[0])
    fix_all(*axes[-positions:])
    for tensor in call.outputs:
        run.set(tensor, [*axes[:-positions], *fixed_axes(tensor.shape[-positions:])])


@rule("native_layer_norm rms_norm _fused_rms_norm layer_norm")
def layer_norm(run: TracedRun, call: Call) -> None:
    """Treats the entries of the normalized axes alike; unifies them with scale and shift."""
    axes = run.axes(call["input"])
    normalised = range(-len(call["normalized_shape"]), 0)
    for parameter in call.inputs[1:]:
        unify_axes(run.axes(parameter), axes[-parameter.dim() :])
    _symmetric(run, call, axes, normalised)


@rule("native_group_norm")
def group_norm(run: TracedRun, call: Call) -> None:
    """Treats groups alike, and the channels of a group; unifies them with scale and shift."""
    axes = run.axes(call["input"])
    for parameter in call.inputs[1:]:
        unify_all(run.axes(parameter)[0], axes[1])
    run.groups.append((axes[1], int(call["C"]) // int(call["group"])))
    run.set(call.out, axes)
    # Statistics of groups, which no layer of PyTorch reads. If a network does, the check in double
    # precision refuses what was found.
    for statistic in call.outputs[1:]:
        run.set(statistic, fixed_axes(statistic.shape))


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm _batch_norm_with_update _batch_norm_no_update"
)
def batch_norm(run: TracedRun, call: Call) -> None:
    """Works channel by channel; unifies channels with scale, shift and statistics."""
    source = call["input"]
    axes = run.axes(source)
    for tensor in call.inputs[1:]:
        unify_all(run.axes(tensor)[0], axes[1])
    run.reduced(axes, [dim for dim in range(len(axes)) if dim != 1])
    of_shape = {source.shape: axes, source.shape[1:2]: [axes[1]]}
    for tensor in call.outputs:
        run.set(tensor, of_shape.get(tensor.shape) or fixed_axes(tensor.shape))


@rule("_softmax _log_softmax _safe_softmax")
def softmax(run: TracedRun, call: Call) -> None:
    """Treats all entries along its axis alike."""
    _symmetric(run, call, run.axes(call["self"]), [call["dim"]])


@rule("glu")
def glu(run: TracedRun, call: Call) -> None:
    """Multiplies two halves of one axis."""
    axes = list(run.axes(call["self"]))
    dim = call["dim"] % len(axes)
    one, other = split_concatenation(product(axes[dim]), [call.out.shape[dim]] * 2)
    unify(one, other)
    axes[dim] = [one]
    run.set(call.out, axes)


@rule(
    "linalg_vector_norm norm mean sum nansum prod amax amin any all _is_all_true logsumexp "
    "aminmax var std var_mean std_mean count_nonzero"
)
def reduction(run: TracedRun, call: Call) -> None:
    """Treats all reduced entries alike."""
    if len(call.inputs) > 1:
        raise IncompatibleError
    axes = run.axes(call.inputs[0])
    gone = dims_of(call, "dim")
    kept: Axes = [[] if dim in gone else row for dim, row in enumerate(axes)]
    remaining = [row for dim, row in enumerate(axes) if dim not in gone]
    for tensor in call.outputs:
        run.set(tensor, kept if tensor.dim() == len(axes) else remaining)


@rule("argmax argmin max min median nanmedian mode kthvalue")
def choice(run: TracedRun, call: Call) -> None:
    """Reduces to one entry; where a result holds its position, the reduced dimensions stay."""
    if len(call.outputs) > 1 or call.name in ("aten.argmax", "aten.argmin"):
        axes = run.axes(call.inputs[0])
        fix_all(*(axes[dim] for dim in dims_of(call, "dim")))
    reduction(run, call)


def _symmetric(run: TracedRun, call: Call, axes: Axes, over: Iterable[int]) -> None:
    """Keeps the axes; statistics lack the axes over which they are computed."""
    statistics = run.reduced(axes, over)
    run.set(call.out, axes)
    for tensor in call.outputs[1:]:
        fits = tensor.dim() == len(axes)
        run.set(tensor, statistics if fits else fixed_axes(tensor.shape))


# Choosing by position
# ------------------------------------------------------------------------------------------


@rule("index")
def indexed(run: TracedRun, call: Call) -> None:
    """Fixes the dimensions along which an index or a mask chooses entries; the others are free."""
    axes = run.axes(call["self"])
    used: list[int] = []
    dim = 0
    for index in call["indices"]:
        width = index.dim() if index is not None and index.dtype in MASKS else 1
        if index is not None:
            used += list(range(dim, dim + width))
            fix_all(*axes[dim : dim + width], *run.axes(index))
        dim += width
    others = [row for dim, row in enumerate(axes) if dim not in used]
    # PyTorch puts the chosen dimensions first unless they are neighbours.
    start = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    chosen = fixed_axes(call.out.shape[start : start + call.out.dim() - len(others)])
    run.set(call.out, [*others[:start], *chosen, *others[start:]])


@rule("embedding")
def embedded(run: TracedRun, call: Call) -> None:
    """Chooses rows by the input, so they are fixed; columns are free."""
    rows, columns = run.axes(call["weight"])
    fix_all(rows)
    run.set(call.out, [*run.axes(call["indices"]), columns])
    run.occur([columns])  # positions of indices are unrelated to positions of rows
    run.contraction(call.out)


@rule(
    "flip roll sort topk cumsum cumprod logcumsumexp cummax cummin tril triu "
    "index_select constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d"
)
def along(run: TracedRun, call: Call) -> None:
    """Depends on the order along some dimensions, which are fixed; the others are free."""
    run.fix(call.inputs[1:])
    rank = call.inputs[0].dim()
    dims = dims_of(call, "dims" if "dims" in call.arguments else "dim")
    if call.name.startswith(("aten.tril", "aten.triu")):
        dims = {rank - 2, rank - 1}
    elif "pad" in call.name:
        amounts = as_list(call.arguments.get("pad", call.arguments.get("padding")))
        dims = {rank - 1 - number // 2 for number, amount in enumerate(amounts) if amount}
    axes = with_fixed(run, call, dims)
    for tensor in call.outputs:
        run.set(tensor, axes)
