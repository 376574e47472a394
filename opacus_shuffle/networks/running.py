"""Handling a network as it is found: out of its wrappers, and its results apart from its caches."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from opacus_shuffle.core.opacus_compat import WRAPPER_NAMES, WRAPPING_PACKAGES

Result = TypeVar("Result")
_WRAPPERS = re.compile(rf"^(?:(?:{'|'.join(WRAPPER_NAMES)})\.)+")
ATTRIBUTES = frozenset(vars(nn.Module()))
"""What all modules have; hooks among them."""
CACHES = ("past_key_values", "cache_params")
"""Results of Hugging Face models that only save work for the next call."""
CLOSED = (
    torch.Tensor,
    nn.Module,
    ModuleType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
)
"""What is not looked into for tensors."""


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the network inside of Opacus's, distributed and compiled wrappers."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    while any(kind.__module__.startswith(WRAPPING_PACKAGES) for kind in type(module).__mro__):
        inside = [child for name, child in module.named_children() if name in WRAPPER_NAMES]
        if len(inside) != 1:
            break
        module = inside[0]
    return module


def plain_name(name: str) -> str:
    """Returns a parameter's name without what wrappers have put before it."""
    return _WRAPPERS.sub("", name)


def without_graph(run: Callable[[], Result]) -> Result:
    """Returns what a run gives that notes nothing for gradients; if it takes gradients itself, it runs again, and may note."""
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return run()


def seed_draws(seed: int) -> None:
    """Seeds PyTorch's draws where there are any: ``torch.manual_seed`` would also seed GPUs that are yet to be used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def results(outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a network returned, wherever they are, but for caches of past keys and values."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    waiting = [outputs]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        if each is None or isinstance(each, CLOSED) or id(each) in seen:
            continue
        if any(kind.__module__ == "transformers.cache_utils" for kind in type(each).__mro__):
            continue
        seen[id(each)] = each
        if isinstance(each, Mapping):
            waiting += [value for name, value in each.items() if name not in CACHES]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            waiting += list(each)
        else:
            slots = [getattr(kind, "__slots__", ()) for kind in type(each).__mro__]
            names = [name for slot in slots for name in ([slot] if isinstance(slot, str) else slot)]
            waiting += [
                getattr(each, name, None)
                for name in [*getattr(each, "__dict__", ()), *names]
                if name not in CACHES
            ]
    return found[::-1]


def has_records(value: Any, records: int, axis: int) -> bool:
    """Returns whether a value is a tensor with ``records`` rows along an axis."""
    return isinstance(value, torch.Tensor) and value.dim() > axis and value.shape[axis] == records
