"""Which tensors of a call have an axis of records, and other records in the place of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus_shuffle.networks.sample_input import Call

KEPT = 1
"""The record that stays: not the first, with which others are compared, and early for few rows."""

Result = TypeVar("Result")


def extents(value: Any, axis: int) -> list[int]:
    """Returns the extents along an axis of the tensors in containers."""
    # Packed sequences of several records lie in one tensor, which cannot be cut into them.
    leaves = tree_leaves(value, is_leaf=lambda part: isinstance(part, PackedSequence))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tensor.shape[axis] for tensor in tensors if tensor.dim() > axis]


def has_records(value: Any, records: int, axis: int) -> bool:
    """Whether it is a tensor with so many records along an axis."""
    return isinstance(value, torch.Tensor) and value.dim() > axis and value.shape[axis] == records


def first_of(call: Call, whole: int, records: int, axis: int) -> Call:
    """Returns the first records of a call of ``whole`` ones, which are repeated to be enough."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(records, device=tensor.device) % whole
        return tensor.index_select(axis, rows) if has_records(tensor, whole, axis) else tensor

    return tree_map_only(torch.Tensor, cut, call)


def with_others(
    run: Callable[[Call], Result], call: Call, records: int, axis: int, *, counted: bool = False
) -> Result:
    """Returns what a run gives with all records changed but one, in the first way that it takes.

    It may take no probability above one, say, and no index beyond those that there are.

    Args:
        run: Of a network or a loss, on a call.
        call: The arguments.
        records: How many they have.
        axis: Where they have them.
        counted: Whether they may say what a loss of the whole batch is divided by: then records
            keep their order, and integers below two, true and false stay.

    Raises:
        Exception: What the run raises if it takes no change.
    """

    def other(way: set[str], value: torch.Tensor) -> torch.Tensor:
        if not has_records(value, records, axis):
            return value
        changed = value.roll(-1, axis) if "order" in way else value.clone()
        if value.is_floating_point() or value.is_complex():
            # Numbers of either sign change theirs: a network may choose by it.
            signed = value.is_floating_point() and bool((value < 0).any())
            changed = (-20 if signed else 20) * changed + 0.25 if "numbers" in way else changed
        elif value.dtype == torch.bool:
            changed = ~changed if "flags" in way else changed
        elif "integers" in way and ("flags" in way or int(value.max()) > 1):
            changed = torch.where(changed > 0, changed - 1, changed)
        changed.select(axis, KEPT).copy_(value.select(axis, KEPT))
        return changed

    every = {"order", "numbers", "integers", "flags"}
    ways = [every, {"order"}, {"numbers"}]
    for way in [{"numbers", "integers"}, {"numbers"}] if counted else ways:
        try:
            return run(tree_map_only(torch.Tensor, partial(other, way), call))
        except Exception as error:
            failure = error
    raise failure
