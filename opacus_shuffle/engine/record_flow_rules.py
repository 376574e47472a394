"""Which records the results of PyTorch's operations may depend on, given those of their arguments.

Bits never miss a record. They may name one too many: wherever that is so, a network is looked at in another way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from opacus_shuffle.permutation.finding.traced_run import Call, bind

Bits: TypeAlias = torch.Tensor
"""A byte for each entry of a tensor: bit i stands for record i."""


class Known:
    """An operation that was performed, with its arguments and the records that each of these depends on.

    Args:
        func: The operation of ATen.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        result: What it returned.
        bits: For each tensor among the arguments, by ``id``, which records its entries depend on; missing if on none.
        records: How many there are.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, result: Any, bits: dict[int, Bits | None], records: int) -> None:
        self.call: Call = bind(func, args, kwargs, result)
        self._done, self._bits, self.records = (func, args, kwargs), bits, records
        seen = set(map(id, self.call.outputs))
        self.results = [*self.call.outputs, *(each for each in self.call.written if id(each) not in seen)]

    def flow(self) -> list[Bits]:
        """Returns which records each result, or argument that is written to, depends on, in a shape that expands to its own."""
        rule = RULES.get(self.call.name, _entry_by_entry if self.call.pointwise else _everything)
        found = list(rule(self))
        return [*found, *[self.together()] * (len(self.results) - len(found))]

    def of(self, tensor: Any) -> Bits | None:
        """Returns which records an argument's entries depend on, None if on none."""
        return self._bits.get(id(tensor))

    def full(self, tensor: torch.Tensor) -> Bits:
        """Returns which records an argument's entries depend on, zeros if on none."""
        found = self.of(tensor)
        return torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device) if found is None else found

    def met(self) -> list[Bits]:
        """Returns which records the entries depend on of each argument that depends on any."""
        return [found for each in self.call.inputs if (found := self.of(each)) is not None]

    def pooled(self, bits: Bits, axes: Iterable[int] | None = None) -> Bits:
        """Returns the union of the bits along some axes (all by default), which have length one afterwards."""
        chosen = sorted({axis % bits.dim() for axis in (range(bits.dim()) if axes is None else axes)}) if bits.dim() else []
        if not chosen:
            return bits
        if not bits.numel():
            return bits.new_zeros([1 if axis in chosen else size for axis, size in enumerate(bits.shape)])
        highest = bits.amax(chosen, keepdim=True)
        if bool((highest == bits.amin(chosen, keepdim=True)).all()):
            return highest
        return united((bits & (1 << record)).amax(chosen, keepdim=True) for record in range(self.records))

    def together(self) -> Bits:
        """Returns one number: the union of the bits of all arguments."""
        return united(self.pooled(each).reshape(()) for each in self.met())

    def again(self, bits_of: Callable[[torch.Tensor], torch.Tensor], **instead: Any) -> Bits:
        """Performs the operation again, with ``bits_of(each)`` for each tensor and ``instead`` for arguments by name."""
        func = self._done[0]
        arguments = {**self.call.arguments, **instead}
        names = [each.name for each in func._schema.arguments]
        values = tree_map_only(torch.Tensor, bits_of, [arguments[name] for name in names])
        positional = sum(not each.kwarg_only for each in func._schema.arguments)
        return func(*values[:positional], **dict(zip(names[positional:], values[positional:], strict=True)))  # type: ignore[no-any-return]


Rule: TypeAlias = Callable[[Known], Sequence[Bits]]
"""Returns the bits of each result, in a shape that expands to its own; results left out at the end depend on all arguments."""

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of some operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys((f"aten.{name}" for name in names), function))
        return function

    return register


def united(bits: Iterable[Bits]) -> Bits:
    """Returns the union of several tensors of bits, entry by entry."""
    return functools.reduce(torch.bitwise_or, bits)


def _everything(known: Known) -> list[Bits]:
    return []


@rule(
    *("_to_copy", "clone", "native_dropout", "native_dropout_backward", "bernoulli", "masked_fill_", "masked_fill", "rsub"),
    *("_prelu_kernel", "_prelu_kernel_backward", "hardswish", "hardswish_", "hardswish_backward", "hardsigmoid_backward"),
    *("hardtanh_backward", "hardshrink_backward", "softshrink_backward", "softplus_backward", "mish_backward", "elu_backward"),
    *("leaky_relu_backward", "log_sigmoid_forward", "log_sigmoid_backward", "floor_divide"),
)
def _entry_by_entry(known: Known) -> list[Bits]:
    return [united(known.met())] * len(known.call.outputs)


@rule("copy_", "copy", "fill_", "fill", "bernoulli_")
def _filled(known: Known) -> list[Bits]:
    """The result depends on what is written; what the target held before does not matter."""
    return [united([_nothing(known)[0], *(known.full(each) for each in known.call.inputs[1:])])]


@rule(
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "zero_", "normal_"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "uniform_", "random_", "exponential_"),
)
def _nothing(known: Known) -> list[Bits]:
    return [torch.zeros((), dtype=torch.uint8, device=each.device) for each in known.call.outputs]


@rule(
    *("cat", "stack", "repeat", "roll", "flip", "tril", "triu", "slice_backward", "select_backward", "slice_scatter"),
    *("select_scatter", "diagonal_scatter", "diagonal_backward", "pixel_shuffle", "pixel_unshuffle"),
    *(
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
    ),
)
def _moved(known: Known) -> list[Bits]:
    """Entries are only moved, to places that no value decides: the operation on the bits gives those of the result."""
    return [known.again(known.full)]


@rule("constant_pad_nd")
def _padded(known: Known) -> list[Bits]:
    """Entries are moved, and what is added around them depends on no record, whatever its value."""
    return [known.again(known.full, value=0)]


@rule("embedding")
def _looked_up(known: Known) -> list[Bits]:
    """Each row of the result depends on its index, and on all of the table if that depends on records."""
    found = known.full(known.call["indices"]).unsqueeze(-1)
    table = known.of(known.call["weight"])
    return [found if table is None else found | known.pooled(table).reshape(())]


@rule("gather", "index_select")
def _picked(known: Known) -> list[Bits]:
    """Picks entries along an axis; an index that depends on records may have picked any entry along it."""
    source, index, axis = known.call["self"], known.call["index"], known.call["dim"]
    chosen = known.of(index)
    data = known.full(source)
    if chosen is None:
        return [known.again(lambda each: data if each is source else each)]
    if not source.dim() or (chosen.dim() > 1 and known.call.name == "aten.index_select"):
        return []
    data = known.pooled(data, [axis]).expand(source.shape).contiguous()
    if known.call.name == "aten.index_select":
        chosen = chosen.view([-1 if place == axis % source.dim() else 1 for place in range(source.dim())])
    return [known.again(lambda each: data if each is source else each) | chosen]


def _may_be_masks(indices: Iterable[torch.Tensor | None]) -> bool:
    """Returns whether any index is a mask, which picks the entries where it is true."""
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _decided(known: Known) -> tuple[list[int], Bits | None]:
    """Returns the axes whose indices depend on records, and these indices' bits, in a shape that expands to the result's."""
    dim, indices = known.call["self"].dim(), known.call["indices"]
    decided = [axis for axis, each in enumerate(indices) if each is not None and known.of(each) is not None]
    if not decided:
        return [], None
    given = [axis for axis, each in enumerate(indices) if each is not None]
    together = given == list(range(given[0], given[-1] + 1))
    after = dim - 1 - given[-1] if together else dim - len(given)
    chosen = united(known.full(indices[axis]) for axis in decided)
    return decided, chosen.reshape(*chosen.shape, *[1] * after)


@rule("index", "_unsafe_index")
def _indexed(known: Known) -> list[Bits]:
    source = known.call["self"]
    data = known.full(source)
    decided, chosen = _decided(known)
    if decided and _may_be_masks(known.call["indices"]):
        return []  # a mask takes more axes than one
    if decided:
        data = known.pooled(data, decided).expand(source.shape)
    found = known.again(lambda each: data if each is source else each)
    return [found if chosen is None else found | chosen]


@rule("index_put", "index_put_", "_index_put_impl_")
def _put(known: Known) -> list[Bits]:
    """Writes values at indices; where an index depends on records, any place along its axis may have been written to."""
    target, values = known.call["self"], known.full(known.call["values"])
    decided, chosen = _decided(known)
    if decided and _may_be_masks(known.call["indices"]):
        return []
    written = values if chosen is None else values | chosen
    count = torch.zeros(target.shape, dtype=torch.int32, device=target.device)
    places = [
        torch.index_put(count, known.call["indices"], (written >> record & 1).int(), accumulate=True) > 0
        for record in range(known.records)
    ]
    reached = united(each.to(torch.uint8) << record for record, each in enumerate(places))
    return [known.full(target) | (known.pooled(reached, decided) if decided else reached)]


@rule("scatter", "scatter_", "scatter_add", "scatter_add_")
def _scattered(known: Known) -> list[Bits]:
    """Writes values along an axis by index: each place may have got any value along that axis."""
    target, index, axis = known.call["self"], known.call["index"], known.call["dim"]
    source = known.call.arguments.get("src")
    if not target.dim() or any(
        index.shape[each] != target.shape[each] for each in range(target.dim()) if each != axis % target.dim()
    ):
        return []
    moved = [known.full(index)]
    if source is not None:
        moved.append(known.full(source)[tuple(map(slice, index.shape))])
    return [known.full(target) | known.pooled(united(moved), [axis])]


@rule("_pack_padded_sequence", "_ctc_loss")
def _sized(known: Known) -> list[Bits]:
    """Lengths decide the sizes of the results, so lengths that depend on records end the run; else all depends on all."""
    if any(known.of(each) is not None for name, each in known.call.arguments.items() if "lengths" in name):
        raise ValueError("sizes come of lengths")
    return []


@rule("unfold_backward")
def _folded(known: Known) -> list[Bits]:
    axis = known.call["dim"] % known.call.out.dim()  # of the result, which has one axis fewer
    return [known.pooled(known.full(known.call["grad_in"]), [axis, -1]).squeeze(-1)]


def _along(known: Known, axes: Any) -> Bits:
    """Returns the union of the bits of all arguments along some axes, which have length one afterwards."""
    chosen = None if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
    return united(known.pooled(each, chosen) for each in known.met())


@rule(
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "any", "all", "logsumexp"),
    *("argmax", "argmin", "norm", "linalg_vector_norm", "median", "nanmedian", "mode", "kthvalue", "nansum", "count_nonzero"),
)
def _reduced(known: Known) -> list[Bits]:
    axes = known.call.arguments.get("dim")
    if len(known.call.inputs) > 1 or known.call.out.dim() not in (known.call.inputs[0].dim(), _left(known, axes)):
        return []  # the maximum of two tensors, which is another operation
    found = _along(known, axes)
    if found.dim() != known.call.out.dim():
        chosen = range(found.dim()) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
        found = found.squeeze([axis % found.dim() for axis in chosen])
    return [found] * len(known.call.outputs)


def _left(known: Known, axes: Any) -> int:
    dim: int = known.call.inputs[0].dim()
    return 0 if axes is None or axes == [] else dim - (1 if isinstance(axes, int) else len(set(axes)))


@rule(
    *("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "cumsum", "cumprod"),
    *("logcumsumexp", "cummax", "cummin", "sort", "topk", "glu", "glu_backward"),
)
def _along_axis(known: Known) -> list[Bits]:
    return [_along(known, known.call["dim"])] * len(known.call.outputs)


@rule("mm", "bmm")
def _product(known: Known) -> list[Bits]:
    """Each entry depends on a whole row of the left matrix and on a whole column of the right one."""
    left, right = (known.of(each) for each in known.call.inputs[:2])
    return [united(_sides(known, left, right))]


def _sides(known: Known, left: Bits | None, right: Bits | None) -> list[Bits]:
    rows = [] if left is None else [known.pooled(left, [-1])]
    return rows if right is None else [*rows, known.pooled(right, [-2])]


@rule("addmm", "baddbmm")
def _sum_with_product(known: Known) -> list[Bits]:
    bias, left, right = (known.of(each) for each in known.call.inputs)
    return [united([*_sides(known, left, right), *([] if bias is None else [bias])])]


@rule("mv")
def _rows_by_vector(known: Known) -> list[Bits]:
    matrix, vector = known.full(known.call["self"]), known.full(known.call["vec"])
    return [known.pooled(matrix, [-1]).squeeze(-1) | known.pooled(vector)]


@rule("native_batch_norm", "native_batch_norm_backward")
def _normed_by_channel(known: Known) -> list[Bits]:
    """A channel's statistics depend on all of it where they are computed; ``nn.InstanceNorm2d`` has a channel per record."""
    backward = known.call.name.endswith("backward")
    computed = known.call["train" if backward else "training"]
    if computed and not backward and known.call["running_mean"] is not None:
        raise ValueError("statistics are written to, of which the operation says nothing")
    if backward and not known.call["output_mask"][0]:
        return []
    width = known.call.inputs[0].dim()
    others = [axis for axis in range(width) if axis != 1]
    found = [each.view(1, -1, *[1] * (width - 2)) if each.dim() == 1 else each for each in known.met()]
    result = united(known.pooled(each, others) if computed else each for each in found)
    return [result] if backward else [result, *[known.pooled(result, others).flatten()] * 2]


@rule("native_layer_norm", "_fused_rms_norm")
def _normed(known: Known) -> list[Bits]:
    return [_along(known, range(-len(known.call["normalized_shape"]), 0))] * len(known.call.outputs)


@rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _norm_s_gradient(known: Known) -> list[Bits]:
    if not known.call["output_mask"][0]:
        return []
    return [_along(known, range(-len(known.call["normalized_shape"]), 0))]


LIES_IN_ROWS = frozenset(
    ("self", "input", "grad_output", "grad_out", "query", "key", "value", "out", "logsumexp", "indices", "mean", "rstd", "grid")
)
"""Names of arguments whose first axis is the batch, in operations that treat each row of the batch by itself."""


@rule(
    *("convolution", "native_group_norm", "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
    *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "avg_pool2d_backward", "avg_pool3d_backward"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward"),
    *("_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "grid_sampler_2d", "grid_sampler_3d", "upsample_nearest1d"),
    *("upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d", "upsample_nearest1d_backward"),
    *("upsample_nearest2d_backward", "upsample_bilinear2d_backward", "upsample_linear1d_backward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"),
    *("convolution_backward", "native_group_norm_backward", "fractional_max_pool2d", "fractional_max_pool2d_backward"),
    *("upsample_nearest3d", "upsample_nearest3d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward"),
    *("upsample_bicubic2d_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward", "max_unpool2d"),
    *("_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward", "max_unpool3d", "channel_shuffle", "im2col", "col2im"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward"),
    *("replication_pad2d_backward", "replication_pad3d_backward"),
)
def _row_by_row(known: Known) -> list[Bits]:
    """Row n of a result comes from row n of what has the batch's rows, and from all the rest."""
    mask = known.call.arguments.get("output_mask")
    first = known.call.outputs[0]
    rows = first.shape[0] if first.dim() > 1 else 0
    if not rows or known.call.arguments.get("N", rows) != rows or (mask is not None and not mask[0]):
        return []  # without the first result, which is the one that has rows
    found = []
    for name, each in known.call.arguments.items():
        if not isinstance(each, torch.Tensor) or (bits := known.of(each)) is None:
            continue
        apart = (name in LIES_IN_ROWS or (name.startswith("attn_") and each.dim() == 4)) and each.dim() > 1
        apart = apart and each.shape[0] == rows
        found.append(known.pooled(bits, range(1, bits.dim())).reshape(-1) if apart else known.pooled(bits).reshape(1))
    of_rows = united(found)
    outputs = known.call.outputs if mask is None or "scaled_dot" in known.call.name else [first]
    return [
        of_rows.view(-1, *[1] * (each.dim() - 1)) if each.dim() > 1 and each.shape[0] == rows else known.together()
        for each in outputs
    ]
