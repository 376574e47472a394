"""What is known of an operator of PyTorch, looked up once: a tracer asks at every operation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator.

    Attributes:
        name: As in ``aten.add``.
        arguments: What each is by default, None where it has none; in the order of the schema.
        written: Names of arguments that it writes to.
        pointwise: Whether it works entry by entry.
        draws: Whether it draws.
        asks: Whether it gives a value of a tensor's to Python.
        counts: Whether the shape of its result depends on values.
        reshapes: Whether it gives its input another shape, in place.
        asserts: Whether it checks something.
    """

    name: str
    arguments: dict[str, Any]
    written: tuple[str, ...]
    pointwise: bool
    draws: bool
    asks: bool
    counts: bool
    reshapes: bool
    asserts: bool


@functools.cache
def operator_of(func: Any) -> Operator:
    """Returns what is known of an operator."""
    schema = func._schema.arguments
    return Operator(
        str(func.overloadpacket),
        {each.name: each.default_value if each.has_default_value() else None for each in schema},
        tuple(each.name for each in schema if each.alias_info is not None and each.alias_info.is_write),
        pointwise=torch.Tag.pointwise in func.tags,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        asks=torch.Tag.data_dependent_output in func.tags,
        counts=torch.Tag.dynamic_output_shape in func.tags,
        reshapes=torch.Tag.inplace_view in func.tags and func.overloadpacket is not torch.ops.aten.detach_,
        asserts="assert" in str(func),
    )
