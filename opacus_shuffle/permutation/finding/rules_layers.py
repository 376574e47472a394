"""Rules of the operations that sum: products, convolutions, normalisation, softmax, reductions, pooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opacus_shuffle.permutation.finding.labels import (
    Dimensions,
    IncompatibleError,
    atoms,
    factors,
    fix_all,
    fixed_dimensions,
    fixed_factors,
    product,
    regroup,
    split_sum,
    unify,
    unify_all,
)
from opacus_shuffle.permutation.finding.rules import as_list, broadcast, elementwise, rule
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun


@rule("mm bmm matmul mv dot vdot addmm baddbmm addmv _sparse_addmm linear")
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
    result = [*left[:-1], *columns]
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


@rule("_cdist_forward _euclidean_dist _pdist_forward")
def distances(run: TracedRun, call: Call) -> None:
    """Measures rows against rows: every norm treats the coordinates alike. Of pairs in one tensor the rows are fixed."""
    if call.name == "aten._pdist_forward":
        rows, coordinates = run.dimensions(call["self"])
        fix_all(rows)
        run.occurrences.append([coordinates])
        run.set(call.out, fixed_dimensions(call.out.shape))
    else:
        left, right = run.dimensions(call["x1"]), run.dimensions(call["x2"])
        unify_all(left[-1], right[-1])
        result = [*broadcast([left[:-2], right[:-2]], call.out.dim() - 2), left[-2], right[-2]]
        run.occurrences.append([*result, left[-1]])
        run.set(call.out, result)
    run.contraction(call.out)


@rule("mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits")
def loss(run: TracedRun, call: Call) -> None:
    """Compares entry by entry, and takes the sum or the mean of all if told to."""
    if call["reduction"] == 0:
        elementwise(run, call)
    else:
        run.occurrences.append(broadcast(map(run.dimensions, call.inputs), max(tensor.dim() for tensor in call.inputs)))
        run.set(call.out, [])
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
    if set(atoms(left[0])) & set(atoms(right[0])):  # labelled alike, but a row's place is not that of its group
        run.occurrences.append([left[1], right[2]])
    run.choices.choose(call.inputs[2], left[0], right[0])
    run.set(call.out, [left[0], right[2]])
    run.contraction(call.out)


@rule("convolution _convolution cudnn_convolution mkldnn_convolution")
def convolution(run: TracedRun, call: Call) -> None:
    """Links channels in and out, group by group; kernel taps and places are fixed."""
    source, kernel, groups = call.inputs[0], call.inputs[1], int(call["groups"])
    places = kernel.dim() - 2
    dims, weight = run.dimensions(source), run.dimensions(kernel)
    channels = dims[-places - 1]
    fix_all(*weight[2:], *dims[-places:])
    result, entering = weight[:2]
    if groups == 1:
        if call.arguments.get("transposed"):
            entering, result = result, entering
        unify_all(channels, entering)
        run.occurrences.append([dims[0], channels, result])
    elif call.arguments.get("transposed"):  # input (group, in), kernel ((group, in), out), result (group, out)
        unify_all(channels, result)
        group, inside = regroup(channels, [groups, kernel.shape[0] // groups])
        run.occurrences.append([dims[0], group, inside, entering])
        result = [*group, *entering]
    else:  # input (group, in), kernel ((group, out), in), result (group, out)
        group_in, inside = regroup(channels, [groups, source.shape[-places - 1] // groups])
        group_out, outside = regroup(result, [groups, kernel.shape[0] // groups])
        unify_all(group_in, group_out)
        unify_all(inside, entering)
        run.occurrences.append([dims[0], group_in, inside, outside])
    for bias in call.inputs[2:3]:
        unify_all(run.dimensions(bias)[0], result)
    head = [dims[0]] if source.dim() == places + 2 else []
    run.set(call.out, [*head, result, *fixed_dimensions(call.out.shape[-places:])])
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


@rule("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm")
@rule("_batch_norm_with_update _batch_norm_no_update batch_norm")
def batch_norm(run: TracedRun, call: Call) -> None:
    """Works channel by channel; scale, shift and running statistics follow."""
    source, *statistics = call.inputs
    dims = run.dimensions(source)
    for parameter in statistics:
        unify_all(run.dimensions(parameter)[0], dims[1])
    run.reduced(dims, [i for i in range(len(dims)) if i != 1])
    run.set(call.out, dims)
    for tensor in call.outputs[1:]:
        run.set(tensor, [dims[1]] if tensor.shape == source.shape[1:2] else fixed_dimensions(tensor.shape))


@rule("_softmax _log_softmax _safe_softmax softmax log_softmax")
def softmax(run: TracedRun, call: Call) -> None:
    """Treats all entries along its dimension alike."""
    _symmetric(run, call, run.dimensions(call["self"]), [call["dim"]])


@rule("linalg_vector_norm norm mean sum nansum prod amax amin any all _is_all_true _is_any_true logsumexp aminmax")
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
        run.set(tensor, [[] if dim in gone else each for dim, each in enumerate(dims) if keep or dim not in gone])


@rule("glu")
def glu(run: TracedRun, call: Call) -> None:
    """Multiplies two halves of one axis."""
    dims = list(run.dimensions(call["self"]))
    dim = call["dim"] % len(dims)
    half = call.out.shape[dim]
    one, other = split_sum(product(factors(dims[dim])), [half, half])
    unify(one, other)
    dims[dim] = [one]
    run.set(call.out, dims)


@rule("max_pool2d_with_indices max_pool3d_with_indices max_pool2d max_pool1d avg_pool1d avg_pool2d avg_pool3d")
@rule("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d")
@rule("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d")
@rule("upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa grid_sampler_3d")
@rule("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d replication_pad3d")
@rule("_upsample_bicubic2d_aa replication_pad1d replication_pad2d grid_sampler_2d cudnn_grid_sampler mkldnn_max_pool2d")
def pooling(run: TracedRun, call: Call) -> None:
    """Works channel by channel; places are fixed."""
    source = call.inputs[0]
    places = 1 if "1d" in call.name else 3 if "3d" in call.name else 2
    dims = run.dimensions(source)
    fix_all(*dims[-places:])
    for grid in call.inputs[1:]:
        records, *rest = run.dimensions(grid)
        unify_all(records, dims[0])
        fix_all(*rest)
    for tensor in call.outputs:
        run.set(tensor, [*dims[:-places], *fixed_dimensions(tensor.shape[-places:])])


@rule("fractional_max_pool2d fractional_max_pool3d")
def fractional_pooling(run: TracedRun, call: Call) -> None:
    """Works channel by channel, in windows drawn for each channel of each record."""
    source, draws = run.dimensions(call["self"]), run.dimensions(call["random_samples"])
    places = call["random_samples"].shape[-1]
    fix_all(*source[-places:], draws[-1])
    for one, other in zip(source[:-places], draws[places - len(source) - 1 : -1], strict=True):
        unify_all(one, other)
    for tensor in call.outputs:
        run.set(tensor, [*source[:-places], *fixed_dimensions(tensor.shape[-places:])])


@rule("im2col")
def unfolded(run: TracedRun, call: Call) -> None:
    """Makes patches: (channel, tap) by place."""
    dims = run.dimensions(call["self"])
    fix_all(*dims[-2:])
    taps = fixed_factors(math.prod(call["kernel_size"]))
    run.set(call.out, [*dims[:-3], [*dims[-3], *taps], fixed_factors(call.out.shape[-1])])


@rule("col2im")
def folded(run: TracedRun, call: Call) -> None:
    """Adds up patches, (channel, tap) by place, where they came from."""
    dims = run.dimensions(call["self"])
    taps = math.prod(call["kernel_size"])
    channels, inside = regroup(dims[-2], [call["self"].shape[-2] // taps, taps])
    fix_all(inside, dims[-1])
    run.set(call.out, [*dims[:-2], channels, *fixed_dimensions(call.out.shape[-2:])])


@rule("renorm")
def renorm(run: TracedRun, call: Call) -> None:
    """Shortens the slices along one axis to a norm, to which all their entries contribute alike."""
    dims = run.dimensions(call["self"])
    _symmetric(run, call, dims, [dim for dim in range(len(dims)) if dim != call["dim"] % len(dims)])


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


@rule("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def recurrent_cell(run: TracedRun, call: Call) -> None:
    """Adds gates that lie end to end, each of as many entries as there are units, and mixes them with the state unit by unit.

    An LSTM's cell and a GRU's are this one kernel on GPUs, and a dozen plain operations on the CPU.
    """
    state = call.arguments["cx" if "lstm" in call.name else "hx"]
    records, units = run.dimensions(state)
    for tensor in call.inputs:
        if tensor is not state:
            *rows, gates = run.dimensions(tensor)
            count = tensor.shape[-1] // state.shape[-1]
            for gate in split_sum(product(factors(gates)), [state.shape[-1]] * count):
                unify_all([gate], units)
            for each in rows:
                unify_all(each, records)
    for tensor in call.outputs:
        is_state = tensor.shape == state.shape
        run.set(tensor, [records, units if is_state else fixed_factors(tensor.shape[-1])])


def _symmetric(run: TracedRun, call: Call, dims: Dimensions, over: Sequence[int]) -> None:
    """Labels a result with the same axes; statistics inside have lost the dimensions that they are taken over."""
    statistics = run.reduced(dims, over)
    run.set(call.out, dims)
    for tensor in call.outputs[1:]:
        run.set(tensor, statistics if tensor.dim() == len(dims) else fixed_dimensions(tensor.shape))
