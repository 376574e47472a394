"""Rules of operations that rearrange, cut and join tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opacus_shuffle.permutation.finding.labels import (
    Axis,
    Dimensions,
    Factors,
    IncompatibleError,
    concatenation,
    factors,
    fix_all,
    fixed_factors,
    free_factors,
    product,
    regroup,
    split_sum,
    unify_dimensions,
)
from opacus_shuffle.permutation.finding.packings import Stacked
from opacus_shuffle.permutation.finding.rules import as_list, rule, with_fixed
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun

Rearrangement = Callable[[Call, Dimensions], Dimensions]


def shape_rule(names: str) -> Callable[[Rearrangement], Rearrangement]:
    """Registers a rule of operations with one tensor in and one out that only rearrange dimensions."""

    def register(function: Rearrangement) -> Rearrangement:
        def apply(run: TracedRun, call: Call) -> None:
            labels = run.labels(call.inputs[0])
            if call.out is call.inputs[0] and call.name.endswith(
                "_"
            ):  # the tensor itself has another shape now
                changed = function(call, run.dimensions(call.out))
                run.forget(call.out)
                run.set(call.out, changed)
            elif isinstance(labels, list):
                run.set(call.out, function(call, labels))
            else:
                run.set(
                    call.out,
                    Stacked(labels.marker, [function(call, each) for each in labels.alternatives]),
                )

        rule(names)(apply)
        return function

    return register


@shape_rule(
    "detach alias clone _to_copy contiguous lift_fresh lift_fresh_copy lift dropout to _conj"
)
def same(call: Call, dims: Dimensions) -> Dimensions:
    """Keeps the axes."""
    return list(dims)


@shape_rule("t numpy_T adjoint mT transpose swapaxes swapdims")
def transposed(call: Call, dims: Dimensions) -> Dimensions:
    """Exchanges two axes, the last two if none are named."""
    result = list(dims)
    if len(dims) > 1:
        one, other = [value for name, value in call.arguments.items() if name != "self"] or (-2, -1)
        result[one], result[other] = result[other], result[one]
    return result


@shape_rule("permute")
def permuted(call: Call, dims: Dimensions) -> Dimensions:
    """Brings the axes into another order."""
    return [dims[dim] for dim in call["dims"]]


@shape_rule("unsqueeze")
def unsqueezed(call: Call, dims: Dimensions) -> Dimensions:
    """Adds an axis of size 1."""
    result = list(dims)
    result.insert(call["dim"] % (len(dims) + 1), [])
    return result


@shape_rule("squeeze")
def squeezed(call: Call, dims: Dimensions) -> Dimensions:
    """Drops axes of size 1."""
    rank = len(dims)
    asked = call.arguments.get("dim")
    drop = set(range(rank)) if asked is None else {dim % rank for dim in as_list(asked)}
    return [each for dim, each in enumerate(dims) if each or dim not in drop]


@rule("view _unsafe_view reshape _reshape_alias _reshape_copy view_copy")
def view(run: TracedRun, call: Call) -> None:
    """Cuts the same factors into other sizes; equal parts laid end to end that become an axis of their own stay different."""
    labels = run.labels(call.inputs[0])
    if call.inputs[0].dtype != call.out.dtype:
        raise IncompatibleError
    shape = [
        max(size, 1) for size in call.out.shape
    ]  # an empty dimension has no factors, as one of size 1
    if not call.out.numel() and math.prod(
        max(size, 1) for size in call.inputs[0].shape
    ) != math.prod(shape):
        raise IncompatibleError
    if not isinstance(labels, list):
        rows = ([axis for each in dims for axis in each] for dims in labels.alternatives)
        run.set(call.out, Stacked(labels.marker, [regroup(row, shape) for row in rows]))
        return
    row = factors([axis for each in labels for axis in each])
    before = 1
    for place, axis in enumerate(row):
        parts = (
            axis.parts
            if axis.kind == "sum" and len({part.size for part in axis.parts}) == 1
            else []
        )
        places = [
            i
            for i, size in enumerate(shape)
            if parts and size == len(parts) and math.prod(shape[:i]) == before
        ]
        if places:
            results = [
                regroup([*row[:place], part, *row[place + 1 :]], _without(shape, places[0]))
                for part in parts
            ]
            _stack(run, call.out, places[0], results)
            return
        before *= axis.size
    run.set(call.out, regroup(row, shape))


@rule("expand repeat")
def repeated(run: TracedRun, call: Call) -> None:
    """Lays copies end to end: (copy, position). They are alike, so any permutation of them will do."""
    source, out = call.inputs[0], call.out
    new = out.dim() - source.dim()
    before: list[tuple[int, Factors]] = [(1, [])] * new + list(
        zip(source.shape, run.dimensions(source), strict=True)
    )
    run.set(
        out,
        [
            [*free_factors(b // max(a, 1)), *each]
            for (a, each), b in zip(before, out.shape, strict=True)
        ],
    )


@rule("select select_copy unbind unbind_copy")
def selected(run: TracedRun, call: Call) -> None:
    """Takes one slice or all: different things where they are known to be, else the dimension is fixed."""
    if not call.outputs:  # of an axis without entries
        return
    source = call.inputs[0]
    dim = call["dim"] % source.dim()
    labels = run.labels(source)
    indices = [call["index"]] if "index" in call.arguments else range(len(call.outputs))
    if not isinstance(labels, list) and labels.alternatives[0][dim] == [labels.marker]:
        slices = labels.alternatives
    else:
        slices = [run.dimensions(source)] * source.shape[dim]
        row = factors(slices[0][dim])
        if len(row) == 1:
            run.note_packing(row[0])
        fix_all(slices[0][dim])
    for index, tensor in zip(indices, call.outputs, strict=True):
        run.set(tensor, _without(slices[index], dim))


@rule("slice slice_copy")
def sliced(run: TracedRun, call: Call) -> None:
    """Cuts out a piece, a part of a sum; of steps that divide the axis, one entry of each; with others the axis is fixed."""
    source, out = call.inputs[0], call.out
    dim = call["dim"] % source.dim()
    size, step = source.shape[dim], call["step"]
    start, end, _ = slice(call["start"], call["end"]).indices(size)
    if start == 0 and end == size and step == 1:
        run.set(out, run.labels(source))
    elif step > 1 and not size % step and out.shape[dim] == size // step:
        dims = run.dimensions(source)
        taken, inside = regroup(dims[dim], [size // step, step])
        fix_all(inside)
        run.set(out, [*dims[:dim], taken, *dims[dim + 1 :]])
    elif step != 1 or end <= start:
        run.set(out, with_fixed(run, call, [dim]))
    else:
        _cut(run, source, dim, [start, end - start, size - end], [None, out, None])


@rule(
    "split split_with_sizes split_copy split_with_sizes_copy chunk unsafe_split unsafe_chunk "
    "tensor_split"
)
def split(run: TracedRun, call: Call) -> None:
    """Cuts a sum into pieces."""
    dim = call["dim"] % call.inputs[0].dim()
    _cut(run, call.inputs[0], dim, [tensor.shape[dim] for tensor in call.outputs], call.outputs)


def _cut(
    run: TracedRun,
    source: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    pieces: Sequence[torch.Tensor | None],
) -> None:
    """Labels the pieces of one dimension."""
    labels = run.labels(source)
    if (
        not isinstance(labels, list)
        and labels.alternatives[0][dim] == [labels.marker]
        and set(sizes) <= {0, 1}
    ):
        present = [piece for size, piece in zip(sizes, pieces, strict=True) if size]
        for chosen, piece in zip(labels.alternatives, present, strict=True):
            if piece is not None:
                run.set(piece, [*chosen[:dim], [], *chosen[dim + 1 :]])
        return
    dims = run.dimensions(source)
    row = factors(dims[dim])
    whole = product(row) if row else Axis(1, fixed=True)
    majors = row[0].size if row and row[0].kind == "atom" else 1
    minor = whole.size // majors
    if majors > 1 and set(sizes) <= {0, minor}:
        run.note_packing(row[0])
    if (
        majors > 1 and minor > 1 and all(size % minor == 0 for size in sizes)
    ):  # whole majors, as (3, d) cut into thirds
        fix_all(row[:1])
        parts = [product([*fixed_factors(size // minor), *row[1:]]) for size in sizes if size]
    else:
        parts = split_sum(whole, [size for size in sizes if size])
    waiting = iter(parts)
    for size, piece in zip(sizes, pieces, strict=True):
        part = next(waiting) if size else Axis(1)
        if piece is not None:
            run.set(piece, [*dims[:dim], factors([part]) if size else [], *dims[dim + 1 :]])


@rule("cat concat concatenate")
def concatenated(run: TracedRun, call: Call) -> None:
    """Joins axes to a sum along one dimension; the others agree, of empty tensors too (but for those of shape (0,))."""
    dim = call["dim"] % call.out.dim()
    tensors = [tensor for tensor in call["tensors"] if tensor.dim() == call.out.dim()]
    if len(tensors) > 1 and all(tensor.shape[dim] == 1 for tensor in tensors):
        _stack(run, call.out, dim, [_without(run.dimensions(tensor), dim) for tensor in tensors])
        return
    first, *others = (run.dimensions(tensor) for tensor in tensors)
    for other in others:
        unify_dimensions(_without(first, dim), _without(other, dim))
    pieces = [run.dimensions(tensor)[dim] for tensor in tensors if tensor.shape[dim]]
    result = list(first)
    result[dim] = pieces[0] if pieces else []
    if len(pieces) > 1:
        result[dim] = _end_to_end(pieces)
    run.set(call.out, result)


def _end_to_end(pieces: Sequence[Factors]) -> Factors:
    return [concatenation([product(piece) if piece else Axis(1, fixed=True) for piece in pieces])]


@rule("stack")
def stacked(run: TracedRun, call: Call) -> None:
    """Stacks tensors along a new dimension."""
    _stack(
        run,
        call.out,
        call["dim"] % call.out.dim(),
        [run.dimensions(tensor) for tensor in call["tensors"]],
    )


def _stack(run: TracedRun, out: torch.Tensor, dim: int, slices: Sequence[Dimensions]) -> None:
    """Labels slices side by side along a new dimension; they stay different things until they are treated alike."""
    if len(slices) == 1:
        run.set(out, [*slices[0][:dim], [], *slices[0][dim:]])
        return
    marker = Axis(len(slices), fixed=True)
    run.set(out, Stacked(marker, [[*each[:dim], [marker], *each[dim:]] for each in slices]))


def _without(row: Sequence[Any], place: int) -> list[Any]:
    return [*row[:place], *row[place + 1 :]]
