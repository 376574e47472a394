"""Properties of networks that finding permutations needs: tensors, memory, plain kernels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

NO_TENSORS = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size}
"""Types of most arguments, which are no tensors."""


@contextlib.contextmanager
def plain_operations(network: nn.Module) -> Iterator[None]:
    """Computes attention and recurrent layers without fused kernels inside of the block."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # A fused recurrent layer cannot be traced, and cuDNN draws dropout inside of it.
        if any(isinstance(submodule, nn.RNNBase) for submodule in network.modules()):
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


class FastMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without PyTorch's wrapper around each call, which disables its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Returns the tensors among arguments or results, faster than PyTorch's ``tree_leaves``."""
    result: list[torch.Tensor] = []
    for value in values:
        if type(value) in NO_TENSORS:
            continue
        if isinstance(value, torch.Tensor):
            result.append(value)
        elif isinstance(value, list | tuple):
            result += tensors_in(*value)
        elif isinstance(value, dict):
            result += tensors_in(*value.values())
    return result


def storage(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's storage, or 0 if it has none."""
    try:
        with torch._C.DisableTorchFunction():  # this call is not the network's
            return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def movable_tensors(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters, and persistent buffers of floating-point numbers or booleans."""
    yield from network.named_parameters(remove_duplicate=False)
    for prefix, submodule in network.named_modules(remove_duplicate=False):
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False):
            kept = name not in getattr(submodule, "_non_persistent_buffers_set", ())
            numbers = (
                buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool
            )
            if kept and numbers and buffer.dim() and buffer.layout == torch.strided:
                yield f"{prefix}.{name}" if prefix else name, buffer


def check_ready(network: nn.Module) -> None:
    """Refuses parameters that are not initialized yet, or that share memory."""
    parameters = dict(network.named_parameters())
    tensors = parameters | dict(network.named_buffers())
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ValueError(f"module: {name} is not initialized yet: run the network once before")
    check_separate_memory(tensors, parameters)


def check_separate_memory(tensors: Mapping[str, torch.Tensor], moving: Collection[str]) -> None:
    """Refuses tensors that would move and whose entries share memory."""
    spans: list[tuple[int, int, str]] = []
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values():
        if not tensor.numel() or tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        reach = [
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        if name in moving and math.prod(tensor.shape) > 1 + sum(reach):
            raise ValueError(
                f"module: {name} is an expanded tensor, whose entries share memory: clone it"
            )
        start = tensor.data_ptr()
        spans.append((start, start + (1 + sum(reach)) * tensor.element_size(), name))
    spans.sort()
    for number, (_, stop, one) in enumerate(spans):
        for start, _, other in spans[number + 1 :]:
            if start < stop and (one in moving or other in moving):
                raise ValueError(
                    f"module: {one} and {other} share memory without being the same tensor: untie "
                    "them"
                )
