"""Records of users: a tensor, or a tuple, list or dict of such, all with one leading dimension, the users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def number_of_users(data: Any) -> int:
    """Returns the number of records, and refuses data without a tensor or with leading dimensions that differ."""
    shapes: list[torch.Size] = []
    map_data(lambda x: shapes.append(x.shape), data)
    if () in shapes:
        raise ValueError("data must have the users as first dimension, got a tensor of shape ()")
    sizes = [shape[0] for shape in shapes]
    if not sizes or len(set(sizes)) > 1:
        raise ValueError(f"data must hold tensors with one leading dimension, the users, got {sizes or 'no tensor'}")
    return sizes[0]


def take(data: Any, indices: Any) -> Any:
    """Returns the records of these users, whose numbers are a tensor or list of integers, in the structure of the data."""
    wanted = torch.as_tensor(indices)
    wanted = wanted.to(torch.long) if wanted.numel() == 0 else wanted
    if wanted.ndim != 1 or wanted.dtype not in (torch.long, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"indices must be integers of shape (B,), got {wanted.dtype} of shape {tuple(wanted.shape)}")
    wanted, count = wanted.to(torch.long), number_of_users(data)
    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < count:
        raise ValueError(f"indices must lie in [0, {count}), got {int(wanted.min())} to {int(wanted.max())}")
    return map_data(lambda x: x[wanted.to(x.device)], data)


def map_data(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Applies a function to each tensor and returns the results in the structure of the data."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, dict):
        return {key: map_data(function, value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        parts = [map_data(function, value) for value in data]
        return parts if isinstance(data, list) else tuple(parts)
    raise ValueError(
        f"data must be a tensor, or a tuple, list or dict of tensors, got {type(data).__name__}; "
        "torch.as_tensor converts arrays, and a TensorDataset has .tensors"
    )


def described(value: Any) -> str:
    """Returns what a value is, for messages: a tensor's shape, or the type of anything else."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def as_double(x: Tensor) -> Tensor:
    """Returns floating-point tensors in double precision, others as they are; all on the CPU."""
    return x.detach().to("cpu", torch.float64) if x.is_floating_point() else x.detach().to("cpu")
