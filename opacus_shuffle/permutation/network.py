"""What the finder needs of a network: plain attention, seeds of all draws, its tensors and where their memory lies."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Has attention computed as the plain operations that it consists of, without fused kernels."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _PlainAttention():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


class _PlainAttention(TorchFunctionMode):
    """Computes each attention plainly, also where a network asks for fused kernels."""

    FUSED = (
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.functional.multi_head_attention_forward,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.FUSED:
            return func(*args, **(kwargs or {}))
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **(kwargs or {}))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in the arguments or results of an operation: lists at most, for which a general tree takes long."""
    found: list[torch.Tensor] = []
    _collect((values,), found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, _SEQUENCES):
            _collect(each, found)
        elif isinstance(each, dict):
            _collect(each.values(), found)


_SEQUENCES = (list, tuple)


def storage(tensor: torch.Tensor) -> int:
    """Returns where the tensor's memory begins, or 0 if it has none of its own."""
    try:
        with torch._C.DisableTorchFunction():  # to look at it here is no use of it by the network
            return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def recomputed_weights(network: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the weights that ``torch.nn.utils`` computes before every pass, and leaves behind as attributes."""
    for module in network.modules():
        names = [name.rpartition("_") for name, _ in module.named_parameters(recurse=False)]
        values = [getattr(module, name, None) for name, _, kind in names if kind in ("g", "orig")]
        yield from (value for value in values if isinstance(value, torch.Tensor))


def movable_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters, and buffers that a checkpoint holds: numbers and masks, but no indices."""
    yield from module.named_parameters(remove_duplicate=False)
    for place, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            kept = name not in getattr(part, "_non_persistent_buffers_set", ())
            numbers = (
                buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool
            )
            if kept and numbers and buffer.dim() and buffer.layout == torch.strided:
                yield f"{place}.{name}" if place else name, buffer


def require_ready(network: nn.Module) -> None:
    """Refuses by name parameters that do not exist yet, or share memory so that they cannot be moved one by one."""
    parameters = dict(network.named_parameters())
    tensors = parameters | dict(network.named_buffers())
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ValueError(f"module: {name} is not initialised yet: run the network once before")
    require_apart(tensors, set(parameters))


def require_apart(tensors: Mapping[str, torch.Tensor], moving: Collection[str]) -> None:
    """Refuses by name tensors that would move and share memory with others, or with themselves."""
    spans: list[tuple[int, int, str]] = []
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if (
            id(tensor) in seen
            or not tensor.numel()
            or tensor.device.type == "meta"
            or tensor.layout != torch.strided
        ):
            continue
        seen.add(id(tensor))
        axes = list(zip(tensor.shape, tensor.stride(), strict=True))
        if name in moving and any(stride == 0 and size > 1 for size, stride in axes):
            raise ValueError(
                f"module: {name} is an expanded tensor, whose entries share memory: clone it"
            )
        span = sum((size - 1) * abs(stride) for size, stride in axes)
        spans.append(
            (tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size(), name)
        )
    spans.sort()
    for place, (_, stop, one) in enumerate(spans):
        for start, _, other in spans[place + 1 :]:
            if start >= stop:
                break
            if one in moving or other in moving:
                raise ValueError(
                    f"module: {one} and {other} share memory without being the same tensor: untie "
                    "them"
                )
