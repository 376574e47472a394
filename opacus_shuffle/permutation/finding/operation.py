"""Seeing one operation of a traced run with its arguments by the names of the operator's schema.

>>> import torch
>>> x = torch.ones(2, 3)
>>> call = bind(torch.ops.aten.sum.dim_IntList, (x, [1]), {}, x.sum(1))
>>> call.name, call["dim"], call["keepdim"]
('aten.sum', [1], False)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation: its arguments by their names in the operator's schema, and what came out."""

    name: str
    arguments: dict[str, Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: list[torch.Tensor]
    pointwise: bool

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def out(self) -> torch.Tensor:
        """The first tensor that came out."""
        return self.outputs[0]


def bind(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Call:
    """Returns the call with every argument under its schema's name."""
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            arguments[argument.name] = args[position]
        elif argument.name in kwargs:
            arguments[argument.name] = kwargs[argument.name]
        else:
            arguments[argument.name] = argument.default_value if argument.has_default_value() else None
    inputs, outputs = (
        [leaf for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in ((args, kwargs), result)
    )
    changed = [
        arguments[each.name] for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    written = [leaf for leaf in tree_leaves(changed) if isinstance(leaf, torch.Tensor)]
    return Call(str(func.overloadpacket), arguments, inputs, outputs, written, torch.Tag.pointwise in func.tags)


RESTRIDE = (torch.ops.aten.as_strided, torch.ops.aten.as_strided_)


def same_entries(result: torch.Tensor, args: Sequence[Any], strides: Sequence[int]) -> bool:
    """Returns whether new strides changed nothing but the memory order of axes of size 1."""
    source, size, stride = args[:3]
    offset = args[3] if len(args) > 3 and args[3] is not None else source.storage_offset()
    moving = [dim for dim, each in enumerate(size) if each > 1]
    return (
        tuple(size) == tuple(source.shape)
        and offset == source.storage_offset()
        and all(stride[dim] == strides[dim] for dim in moving if dim < len(strides))
    )
