"""Rules of the operations that sum: products, normalisation, softmax, reductions."""

from __future__ import annotations

from collections.abc import Sequence

from opacus_shuffle.permutation.finding.labels import (
    Dimensions,
    IncompatibleError,
    atoms,
    factors,
    fix_all,
    fixed_dimensions,
    product,
    regroup,
    split_sum,
    unify,
    unify_all,
    unify_dimensions,
)
from opacus_shuffle.permutation.finding.rules import as_list, rule
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun


@rule("mm bmm matmul mv dot vdot addmm baddbmm addbmm addmv _sparse_addmm linear")
def matrix_product(run: TracedRun, call: Call) -> None:
    """Makes the contracted axes one, and batch axes too; a bias follows the result."""
    name = call.name.removesuffix("_").removeprefix("aten.")
    operands = list(call.arguments.values())
    bias = operands.pop(0) if "add" in name else operands[2] if name == "linear" else None
    one, other = operands[:2]
    left, right = run.dimensions(one), run.dimensions(other)
    right = right[::-1] if name == "linear" else right
    if (len(left) > 3 and name != "linear") or len(right) > 3:
        raise IncompatibleError
    unify_all(left[-1], right[-2] if len(right) > 1 else right[-1])
    batched = len(right) == 3
    if batched:
        unify_all(left[0], right[0])
    columns = right[-1:] if len(right) > 1 else []
    result = [*left[name == "addbmm" : -1], *columns]
    if bias is not None:
        for dim in range(-bias.dim(), 0):
            if bias.shape[dim] > 1:
                unify_all(run.dimensions(bias)[dim], result[dim])
    if not run.is_parameter(one) and not run.is_parameter(other):
        run.contracted += left[-1]
        if batched:
            run.heads += left[0]
    run.set(call.out, result)
    run.occurrences.append([*left, *columns])  # the products before they are summed
    if bias is not None and not run.is_parameter(bias):
        run.streams += [axis for each in result for axis in each]
    run.contraction(call.out)


@rule("_grouped_mm")
def grouped_product(run: TracedRun, call: Call) -> None:
    """Multiplies the rows of each group by a matrix of its own (experts)."""
    one, other = call.inputs[:2]
    left, right = run.dimensions(one), run.dimensions(other)
    if len(left) != 2 or len(right) != 3 or call.arguments.get("bias") is not None:
        raise IncompatibleError
    fix_all([*left[0], *right[0]])
    unify_all(left[1], right[1])
    run.occurrences.append([left[0], left[1], right[2]])
    if set(atoms(left[0])) & set(
        atoms(right[0])
    ):  # labelled alike, but a row's place is not that of its group
        run.occurrences.append([left[1], right[2]])
    run.set(call.out, [left[0], right[2]])
    run.contraction(call.out)


@rule("native_layer_norm rms_norm _fused_rms_norm layer_norm")
def layer_norm(run: TracedRun, call: Call) -> None:
    """Treats the normalised axes alike; scale and shift follow them."""
    dims = run.dimensions(call["input"])
    normalised = range(-len(call["normalized_shape"]), 0)
    for parameter in call.inputs[1:]:
        for dim in normalised:
            unify_all(run.dimensions(parameter)[dim], dims[dim])
    _symmetric(run, call, dims, normalised)


@rule("native_group_norm")
def group_norm(run: TracedRun, call: Call) -> None:
    """Treats the channels of a group alike, and the groups; scale and shift follow."""
    dims, groups = run.dimensions(call["input"]), int(call["group"])
    channels = dims[1]
    group, inside = regroup(channels, [groups, int(call["C"]) // groups])
    dims = [dims[0], [*group, *inside], *dims[2:]]
    for parameter in call.inputs[1:]:
        unify_all(run.dimensions(parameter)[0], channels)
    run.set(call.out, dims)
    run.occurrences.append([dims[0], group])
    for tensor in call.outputs[1:]:
        run.set(tensor, [dims[0], group])


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "cudnn_batch_norm"
)
@rule("_batch_norm_with_update _batch_norm_no_update batch_norm")
def batch_norm(run: TracedRun, call: Call) -> None:
    """Works channel by channel; scale, shift and statistics follow."""
    source = call["input"]
    dims = run.dimensions(source)
    for tensor in call.inputs:
        unify_dimensions(run.dimensions(tensor), dims if tensor.dim() == len(dims) else [dims[1]])
    run.reduced(dims, [i for i in range(len(dims)) if i != 1])
    for tensor in call.outputs:
        each = dims if tensor.shape == source.shape else [dims[1]]
        run.set(
            tensor,
            each
            if tensor.shape in (source.shape, source.shape[1:2])
            else fixed_dimensions(tensor.shape),
        )


@rule("_softmax _log_softmax _safe_softmax softmax log_softmax")
def softmax(run: TracedRun, call: Call) -> None:
    """Treats all entries along its dimension alike."""
    _symmetric(run, call, run.dimensions(call["self"]), [call["dim"]])


@rule(
    "linalg_vector_norm norm mean sum nansum prod amax amin any all _is_all_true _is_any_true "
    "logsumexp aminmax"
)
@rule("var std var_mean std_mean count_nonzero argmax argmin")
def reduction(run: TracedRun, call: Call) -> None:
    """Treats all that is reduced alike; where the result says which entry has won, what is reduced is fixed."""
    if len(call.inputs) > 1:
        raise IncompatibleError
    source = call.inputs[0]
    rank = source.dim()
    gone = {dim % rank for dim in as_list(call.arguments.get("dim"))} or set(range(rank))
    dims = run.dimensions(source)
    if call.name in ("aten.argmax", "aten.argmin"):
        fix_all(*(dims[dim] for dim in gone))
    for tensor in call.outputs:
        keep = tensor.dim() == rank
        run.set(
            tensor,
            [
                [] if dim in gone else each
                for dim, each in enumerate(dims)
                if keep or dim not in gone
            ],
        )


@rule("glu")
def glu(run: TracedRun, call: Call) -> None:
    """Multiplies two halves of one axis."""
    dims = list(run.dimensions(call["self"]))
    dim = call["dim"] % len(dims)
    half = call["self"].shape[dim] // 2
    one, other = split_sum(product(factors(dims[dim])), [half, half])
    unify(one, other)
    run.set(call.out, [*dims[:dim], [one], *dims[dim + 1 :]])


@rule("_weight_norm_interface _weight_norm")
def weight_norm(run: TracedRun, call: Call) -> None:
    """Makes a weight of a direction and a length for each entry of one axis."""
    dims = run.dimensions(call["v"])
    dim = call["dim"] % len(dims)
    unify_all(run.dimensions(call["g"])[dim], dims[dim])
    _symmetric(run, call, dims, [i for i in range(len(dims)) if i != dim])


@rule("_trilinear")
def trilinear(run: TracedRun, call: Call) -> None:
    """Multiplies three tensors, with axes of size 1 put in, and sums over some axes (``torch.nn.Bilinear``)."""
    rank = call["i1"].dim() + len(call["expand1"])
    result: Dimensions = [[] for _ in range(rank)]
    for name in "123":
        waiting = iter(run.dimensions(call[f"i{name}"]))
        for dim in range(rank):
            if dim in call[f"expand{name}"]:
                continue
            each = next(waiting)
            if result[dim]:
                unify_all(result[dim], each)
            else:
                result[dim] = each
    run.occurrences.append(result)
    run.set(call.out, [each for dim, each in enumerate(result) if dim not in call["sumdim"]])
    run.contraction(call.out)


def _symmetric(run: TracedRun, call: Call, dims: Dimensions, over: Sequence[int]) -> None:
    """Labels a result with the same axes; statistics inside have lost the dimensions that they are taken over."""
    statistics = run.reduced(dims, over)
    run.set(call.out, dims)
    for tensor in call.outputs[1:]:
        run.set(tensor, statistics if tensor.dim() == len(dims) else fixed_dimensions(tensor.shape))
