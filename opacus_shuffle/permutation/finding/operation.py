"""One operation of a traced run, with its arguments by the names of the operator's schema."""

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
    """Returns the call of an ATen operator, defaults filled in."""
    schema = func._schema.arguments
    arguments = {each.name: each.default_value if each.has_default_value() else None for each in schema}
    arguments |= {each.name: value for each, value in zip(schema, args, strict=False)} | kwargs
    changed = [arguments[each.name] for each in schema if each.alias_info is not None and each.alias_info.is_write]
    inputs, outputs, written = (
        [leaf for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)] for each in ((args, kwargs), result, changed)
    )
    return Call(str(func.overloadpacket), arguments, inputs, outputs, written, torch.Tag.pointwise in func.tags)
