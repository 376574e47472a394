"""Users' records: tensors in tuples, lists or dicts, with one row for each user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.protocols.grid_sum import real_numbers


def number_of_users(data: Any) -> int:
    """Returns the number of records.

    Raises:
        ValueError: If the data have no tensor, or tensors with different first dimensions.
    """
    shapes: list[torch.Size] = []
    map_data(lambda tensor: shapes.append(tensor.shape), data)
    if () in shapes:
        raise ValueError("data must have the users as first dimension, got a tensor of shape ()")
    sizes = [shape[0] for shape in shapes]
    if not sizes or len(set(sizes)) > 1:
        raise ValueError(
            "data must hold tensors with one leading dimension, the users, got "
            f"{sizes or 'no tensor'}"
        )
    return sizes[0]


def take(data: Any, users: Any) -> Any:
    """Returns the records of some users, by their numbers, in the structure of the data."""
    rows = torch.as_tensor(users, dtype=torch.long)
    return map_data(lambda tensor: tensor[rows.to(tensor.device)], data)


def map_data(function: Callable[[Tensor], Any], data: Any) -> Any:
    """Applies a function to each tensor and returns the results in the structure of the data."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, dict):
        return {key: map_data(function, value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        mapped = [map_data(function, value) for value in data]
        return mapped if isinstance(data, list) else tuple(mapped)
    raise ValueError(
        f"data must be a tensor, or a tuple, list or dict of tensors, got {type(data).__name__}; "
        "torch.as_tensor converts arrays, and a TensorDataset has .tensors"
    )


def describe(value: Any) -> str:
    """Returns a tensor's type and shape, or an object's type, for messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def real_vector(name: str, value: Any, size: int | None = None) -> Tensor:
    """Returns a copy of a finite vector, float64, on the CPU.

    Raises:
        ValueError: If the value is not such a vector, or not of this size.
    """
    vector = real_numbers(name, value)
    if vector.ndim != 1 or not len(vector) or size not in (None, len(vector)):
        raise ValueError(f"{name} must have shape ({size or 'd'},), got {tuple(vector.shape)}")
    if not bool(vector.isfinite().all()):
        raise ValueError(
            f"{name} must hold {len(vector)} finite numbers, got NaN or infinity in it"
        )
    return vector.to("cpu", torch.float64).clone()


def check_point(theta: Any, dimension: int | None, rows: int | None = None) -> None:
    """Checks a point θ of shape (d,), or one point for each record, of shape (B, d).

    Args:
        theta: The point or points.
        dimension: d; None for any.
        rows: B; None for any.

    Raises:
        ValueError: If θ is not a floating-point tensor of such a shape, or not finite.
    """
    fits = (
        isinstance(theta, Tensor)
        and theta.is_floating_point()
        and theta.ndim in (1, 2)
        and dimension in (None, theta.shape[-1])
        and (theta.ndim == 1 or rows in (None, len(theta)))
    )
    if not fits:
        raise ValueError(
            f"theta must be a floating-point tensor of shape ({dimension or 'd'},), or have such "
            f"a row for each record, got {describe(theta)}"
        )
    if not bool(theta.isfinite().all()):
        raise ValueError("theta must be finite, got NaN or infinity in it; take smaller steps")
