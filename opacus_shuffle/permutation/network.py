"""A network as it is found: inside its wrappers, run without a trace left, its results apart from its caches.

>>> import torch
>>> unwrap(torch.nn.Linear(2, 2)).out_features
2
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

WRAPPING_PACKAGES = ("opacus.grad_sample", "opacus.distributed", "torch.nn.parallel", "torch._dynamo")
WRAPPER_NAMES = ("_module", "module", "_orig_mod")
"""Where Opacus, distributed training and ``torch.compile`` define their wrappers, and under which names these keep the
network."""


def unwrap(module: nn.Module) -> nn.Module:
    """The network inside of Opacus's, distributed and compiled wrappers."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    while any(kind.__module__.startswith(WRAPPING_PACKAGES) for kind in type(module).__mro__):
        inside = [child for name, child in module.named_children() if name in WRAPPER_NAMES]
        if len(inside) != 1:
            break
        module = inside[0]
    return module


@contextlib.contextmanager
def state_kept(network: nn.Module) -> Iterator[None]:
    """Random states, buffers and the training flag of every module are afterwards as before."""
    flags = [(each, each.training) for each in network.modules()]
    held = [(each, dict(each._buffers)) for each in network.modules() if isinstance(each._buffers, dict)]
    buffers = [
        (buffer, buffer.detach().clone())
        for buffer in network.buffers()
        if buffer.device.type != "meta" and buffer.layout == torch.strided
    ]
    devices = {parameter.device.index for parameter in network.parameters() if parameter.device.type == "cuda"}
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  (others use the global one)
    try:
        with torch.random.fork_rng(devices=[index for index in devices if index is not None]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for each, flag in flags:
            each.training = flag
        for each, before in held:
            each._buffers.update(before)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


CACHES = ("past_key_values", "cache_params")
"""Results of Hugging Face models that only save work for the next call."""

PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type, torch.dtype, torch.device)
"""What holds no tensors inside."""


def results(outputs: Any) -> list[torch.Tensor]:
    """The tensors that a network returns, wherever they are, without caches of past keys and values, which are no results.

    Raises:
        ValueError: If it returns something that cannot be looked into.
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [outputs]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        if (
            each is None
            or isinstance(each, torch.Tensor | bool | int | float | complex | str | bytes | type)
            or id(each) in seen
        ):
            continue
        seen.add(id(each))
        if isinstance(each, Mapping):
            waiting += [value for name, value in each.items() if name not in CACHES]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += list(each)
        elif hasattr(each, "__dict__") or hasattr(each, "__slots__"):
            names = [*getattr(each, "__dict__", ()), *getattr(type(each), "__slots__", ())]
            waiting += [getattr(each, name, None) for name in names if name not in CACHES]
        else:
            raise ValueError(f"the network returns a {type(each).__name__}, which cannot be looked into for tensors")
    return found[::-1]


def kept_activations(network: nn.Module) -> list[torch.Tensor]:
    """Tensors that the modules keep as plain attributes after a run; a loss may read them."""
    own = ("_parameters", "_buffers", "_modules")
    attributes = [value for module in network.modules() for name, value in vars(module).items() if name not in own]
    return [leaf for leaf in tree_leaves(attributes) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)]


def require_ready(network: nn.Module) -> None:
    """Refuses networks whose parameters do not exist yet, or share memory so that they cannot be moved one by one.

    Raises:
        ValueError: It names them.
    """
    spans: list[tuple[int, int, str]] = []
    seen: set[int] = set()
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"module: {name} is not initialised yet: run the network once before")
        if id(tensor) in seen or not tensor.numel() or tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        seen.add(id(tensor))
        stretched = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if stretched and (tensor.is_floating_point() or isinstance(tensor, nn.Parameter)):
            raise ValueError(f"module: {name} is an expanded tensor, whose entries share memory: clone it")
        span = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size(), name))
    spans.sort()
    for (_, stop, one), (start, _, other) in itertools.pairwise(spans):
        if start < stop:
            raise ValueError(f"module: {one} and {other} share memory without being the same tensor: untie them")
