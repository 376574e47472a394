"""Rules of operations on channels at places: convolutions, pooling, resizing, patches. Places are fixed, channels are not."""

from __future__ import annotations

from opacus_shuffle.permutation.finding.labels import (
    Dimensions,
    Factors,
    fix_all,
    fixed_dimensions,
    fixed_factors,
    product,
    regroup,
    unify_all,
    unify_dimensions,
)
from opacus_shuffle.permutation.finding.rules import as_list, rule
from opacus_shuffle.permutation.finding.traced_run import Call, TracedRun


@rule("convolution _convolution cudnn_convolution mkldnn_convolution")
def convolution(run: TracedRun, call: Call) -> None:
    """Links channels in and out, group by group; kernel taps and places are fixed, unless they meet as in a matrix product."""
    source, kernel = map(run.dimensions, call.inputs[:2])
    result = _link_channels(run, call, source, kernel)
    places = len(kernel) - 2
    left = [
        _meet(run, call, place - places, source[place - places], kernel[place - places])
        for place in range(places)
    ]
    for bias in call.inputs[2:3]:
        unify_all(run.dimensions(bias)[0], result)
    head = source[: -places - 1]
    run.set(call.out, [*head, result, *left])
    run.contraction(call.out)


def _meet(run: TracedRun, call: Call, dim: int, places: Factors, taps: Factors) -> Factors:
    """Returns what is left of the places along one dimension, after they have met the kernel's taps there.

    A kernel of one tap does the same at every place, and leaves all of them where they are. One
    that spans all places sums over them, as a matrix product does.
    """
    size, count = call.inputs[0].shape[dim], call.inputs[1].shape[dim]
    plain = not call.arguments.get("transposed") and not any(as_list(call["padding"]))
    if plain and count == 1 and call.out.shape[dim] == size:
        return places
    if plain and count == size and call.out.shape[dim] == 1:
        unify_all(places, taps)
        return []
    fix_all(places, taps)
    return fixed_factors(call.out.shape[dim])


def _link_channels(run: TracedRun, call: Call, dims: Dimensions, weight: Dimensions) -> Factors:
    """Makes the channels of a source and of a kernel agree; returns those of the result."""
    groups, places = int(call["groups"]), len(weight) - 2
    channels = dims[-places - 1]
    result, entering = weight[:2]
    if groups == 1:
        if call.arguments.get("transposed"):
            entering, result = result, entering
        unify_all(channels, entering)
        run.occurrences.append([dims[0], channels, result])
    elif call.arguments.get(
        "transposed"
    ):  # input (group, in), kernel ((group, in), out), result (group, out)
        unify_all(channels, result)
        group, inside = regroup(channels, [groups, product(weight[0]).size // groups])
        run.occurrences.append([dims[0], group, inside, entering])
        result = [*group, *entering]
    else:  # input (group, in), kernel ((group, out), in), result (group, out)
        group_in, inside = regroup(channels, [groups, product(channels).size // groups])
        group_out, outside = regroup(result, [groups, product(weight[0]).size // groups])
        unify_all(group_in, group_out)
        unify_all(inside, entering)
        run.occurrences.append([dims[0], group_in, inside, outside])
    return result


POOLING = (
    "max_pool2d_with_indices max_pool3d_with_indices max_pool2d max_pool1d avg_pool1d avg_pool2d "
    "avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
    "adaptive_avg_pool1d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "mkldnn_max_pool2d "
    "replication_pad1d replication_pad2d replication_pad3d"
)


@rule(POOLING)
def pooling(run: TracedRun, call: Call) -> None:
    """Works channel by channel; places are fixed."""
    places = 1 if "1d" in call.name else 3 if "3d" in call.name else 2
    first, *others = map(run.dimensions, call.inputs)
    for each in (first, *others):
        fix_all(*each[-places:])
        unify_dimensions(each[:-places], first[:-places])
    for tensor in call.outputs:
        run.set(tensor, [*first[:-places], *fixed_dimensions(tensor.shape[-places:])])
