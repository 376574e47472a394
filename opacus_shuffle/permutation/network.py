"""A network as it is found: inside its wrappers, run without a trace left, its results apart from its caches.

>>> import torch
>>> unwrap(torch.nn.Linear(2, 2)).out_features
2
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

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
    held = [(each, dict(each._buffers)) for each in network.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers() if buffer.device.type != "meta"]
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


def results(outputs: Any) -> Any:
    """What a network returns, without caches of past keys and values, which are no results."""
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type | Mapping):
        outputs = vars(outputs)
    if isinstance(outputs, Mapping):
        return {name: value for name, value in outputs.items() if "past_key_values" not in name and "cache" not in name}
    return outputs
