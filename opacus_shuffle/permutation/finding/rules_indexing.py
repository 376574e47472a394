"""Rules of operations that choose entries by position: indexing, gathering, embeddings, rearranged pixels.

What is chosen by position is fixed; the axes that only come along are untouched. Index tensors hold positions of fixed axes, so
their values are the same whatever is permuted.
"""

from __future__ import annotations

import torch

from opacus_shuffle.permutation.finding.labels import (
    Dimensions,
    Factors,
    IncompatibleError,
    fix_all,
    fixed_dimensions,
    fixed_factors,
    regroup,
    unify_all,
    unify_dimensions,
)
from opacus_shuffle.permutation.finding.rules import rule, with_fixed
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun


@rule("index")
def indexed(run: TracedRun, call: Call) -> None:
    """Chooses by positions or by a mask along some dimensions: fixed there, untouched elsewhere."""
    source = run.dimensions(call["self"])
    left, place = _untouched(run, call, source)
    chosen = fixed_dimensions(call.out.shape[place : place + call.out.dim() - len(left)])
    dims = [(dim, index) for dim, index in enumerate(call["indices"]) if index is not None]
    if len(dims) == 1 and dims[0][1].dtype not in MASKS:
        run.choices.choose(dims[0][1], [axis for each in chosen for axis in each], source[dims[0][0]])
    run.set(call.out, [*left[:place], *chosen, *left[place:]])


@rule("index_put _index_put_impl")
def index_put(run: TracedRun, call: Call) -> None:
    """Writes at positions along some dimensions: fixed there; elsewhere the values' axes are those of the target."""
    target, values = run.dimensions(call["self"]), call["values"]
    left, place = _untouched(run, call, target)
    chosen = max(1 if index.dtype in MASKS else index.dim() for index in call["indices"] if index is not None)
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


@rule("scatter scatter_add scatter_reduce")
def scattered(run: TracedRun, call: Call) -> None:
    """Writes entries to positions along one dimension, which is fixed in the target; index, source and target agree in others.

    A sum, product or extreme of what comes to one position forgets its order, and so does one value for all; of entries that
    overwrite each other the last one stays, so their order is fixed.
    """
    tensors = [call[name] for name in ("self", "index", "src") if isinstance(call.arguments.get(name), torch.Tensor)]
    target, *written = rows = [run.dimensions(tensor) for tensor in tensors]
    along = call["dim"] % len(target)
    for dim in range(len(target)):
        meeting = written if dim == along else rows
        sizes = {tensor.shape[dim] for tensor in tensors[-len(meeting) :]}
        for dims in meeting[1:] if len(sizes) == 1 else []:
            unify_all(meeting[0][dim], dims[dim])
        if len(sizes) > 1:
            fix_all(*(dims[dim] for dims in meeting))
    fix_all(target[along])
    if "src" in call.arguments and call.name.removesuffix("_") == "aten.scatter" and call.arguments.get("reduce") is None:
        fix_all(*(dims[along] for dims in written))
    run.reduced(written[0], [along])
    run.set(call.out, target)


@rule("bucketize searchsorted")
def placed(run: TracedRun, call: Call) -> None:
    """Says of each entry between which sorted values it lies, which have fixed places."""
    values = run.dimensions(call["boundaries" if call.name == "aten.bucketize" else "sorted_sequence"])
    entries = run.dimensions(call["self"])
    if call.arguments.get("sorter") is not None:
        raise IncompatibleError
    fix_all(values[-1])
    for one, other in zip(values[:-1], entries[:-1], strict=False):
        unify_all(one, other)
    run.set(call.out, entries)


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
    run.occurrences.append([columns])  # the places of the indices are not those of the rows, were they labelled as these
    run.contraction(call.out)


@rule("embedding_dense_backward")
def embedding_backward(run: TracedRun, call: Call) -> None:
    """Adds up what comes to each row: fixed; columns are free."""
    *places, columns = run.dimensions(call["grad_output"])
    run.fix([call["indices"]])
    fix_all(*places)
    run.set(call.out, [fixed_factors(call.out.shape[0]), columns])
    run.occurrences.append([columns])
    run.contraction(call.out)


@rule("embedding_renorm")
def embedding_renorm(run: TracedRun, call: Call) -> None:
    """Shortens the rows that the input chooses to a norm, to which all columns contribute alike."""
    rows, columns = run.dimensions(call["self"])
    fix_all(rows)
    run.reduced([rows, columns], [1])
    run.set(call.out, [rows, columns])


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


@rule("unfold unfold_copy")
def windows(run: TracedRun, call: Call) -> None:
    """Makes windows along one dimension, which is fixed."""
    run.set(call.out, [*with_fixed(run, call, [call["dimension"] % call["self"].dim()]), fixed_factors(call["size"])])


@rule("as_strided")
def restrided(run: TracedRun, call: Call) -> None:
    """Looks at the same memory with other strides: axes that stay as they were are kept, the others are fixed.

    An axis of n entries, s apart in dense memory, stays if one new axis of n entries is s apart, too, and everything else in an
    address is a multiple of n * s and a rest below s: the new place along it is then the old one.
    """
    source, out = call["self"], call.out
    new = list(zip(out.shape, out.stride(), strict=True))
    start = out.storage_offset() - source.storage_offset()
    stop = start + sum((size - 1) * step for size, step in new)
    if out is source or not _is_dense(source) or not 0 <= start <= stop < max(source.numel(), 1):
        raise IncompatibleError
    result = fixed_dimensions(out.shape)
    for labels, size, step in zip(run.dimensions(source), source.shape, source.stride(), strict=True):
        place = new.index((size, step)) if (size, step) in new else None
        whole = max(size * step, 1)
        rest = start % whole + sum((n - 1) * s for i, (n, s) in enumerate(new) if i != place and s % whole)
        if place is not None and rest < step:
            result[place] = labels
        else:
            fix_all(labels)
    run.set(out, result)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether entries fill their piece of memory, each place once."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


@rule("masked_scatter")
def masked_scatter(run: TracedRun, call: Call) -> None:
    """Puts rows one after the other where a mask is true: fixed, but for the last axes if the mask is the same along them."""
    target, mask, source = call["self"], call["mask"], call["source"]
    steps = torch.broadcast_to(mask, target.shape).stride()
    rows = next((dim for dim in range(target.dim(), 0, -1) if target.shape[dim - 1] > 1 and steps[dim - 1]), 0)
    count = target.dim() - rows
    if not count or source.shape[source.dim() - count :] != target.shape[rows:]:
        raise IncompatibleError
    written, dims = run.dimensions(source), run.dimensions(target)
    fix_all(*dims[:rows], *written[:-count], *run.dimensions(mask))
    unify_dimensions(dims[rows:], written[-count:])
    run.occurrences.append(dims[rows:])
    run.set(call.out, dims)


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


@rule("nonzero masked_select multinomial")
def by_place(run: TracedRun, call: Call) -> None:
    """Depends on the places of all entries (as ``nonzero`` does), so every axis is fixed."""
    run.fix_everything(call)


@rule("pixel_shuffle pixel_unshuffle")
def pixels(run: TracedRun, call: Call) -> None:
    """Makes channels of the places inside a block, or the other way round: (channel, place)."""
    source, out = call.inputs[0], call.out
    dims = list(run.dimensions(source))
    fewer = min(source.shape[-3], out.shape[-3])
    channels, places = regroup(dims[-3], [fewer, source.shape[-3] // fewer])
    fix_all(places, dims[-2], dims[-1])
    run.set(out, [*dims[:-3], [*channels, *fixed_factors(out.shape[-3] // fewer)], *fixed_dimensions(out.shape[-2:])])


@rule("channel_shuffle native_channel_shuffle")
def channel_shuffle(run: TracedRun, call: Call) -> None:
    """Makes (channel, group) of (group, channel)."""
    dims = list(run.dimensions(call.inputs[0]))
    groups = int(call["groups"])
    group, inside = regroup(dims[1], [groups, call.out.shape[1] // groups])
    dims[1] = [*inside, *group]
    run.set(call.out, dims)
