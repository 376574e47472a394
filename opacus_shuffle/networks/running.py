"""Handling a network as users bring it: without its wrappers, its results without its caches."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from opacus_shuffle.core.opacus_compat import WRAPPER_NAMES, WRAPPING_PACKAGES

Result = TypeVar("Result")
_WRAPPERS = re.compile(rf"^(?:(?:{'|'.join(WRAPPER_NAMES)})\.)+")
_CLOSED = (nn.Module, ModuleType, FunctionType, type, str, bytes)
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
    """Returns what a run gives without noting anything for gradients, if it takes none itself."""
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return run()


def seed_draws(seed: int) -> None:
    """Seeds the global random states of Python, NumPy, and PyTorch on the devices in use."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (networks may draw from the global one)
    # torch.manual_seed would also seed GPUs that are yet to be used.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def results(outputs: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a network returned, wherever they are, in no promised order."""
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # held, so that no identity is given anew
    waiting = [outputs]
    while waiting:
        value = waiting.pop()
        # Caches of past keys and values only save work for the next call.
        cache = type(value).__module__ == "transformers.cache_utils"
        if id(value) in seen or cache or isinstance(value, _CLOSED):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            waiting += gc.get_referents(value)  # what a container or another object holds
    return tensors
