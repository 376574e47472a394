"""Users' records, and who has taken part.

Records are a tensor, or a tuple, list or dict of such, all with one leading dimension, the users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import integer
from opacus_shuffle.protocols.grid_sum import real_numbers

_UNUSED = -1


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


def take(data: Any, users: Any) -> Any:
    """Returns the records of these users, whose numbers are in range, in the structure of the data."""
    rows = torch.as_tensor(users, dtype=torch.long)
    return map_data(lambda x: x[rows.to(x.device)], data)


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


def real_vector(name: str, value: Any, size: int | None = None) -> Tensor:
    """Returns a copy of a finite vector (of this size), float64, on the CPU, and refuses anything else."""
    vector = real_numbers(name, value)
    if vector.ndim != 1 or not len(vector) or size not in (None, len(vector)):
        raise ValueError(f"{name} must have shape ({size or 'd'},), got {tuple(vector.shape)}")
    if not bool(vector.isfinite().all()):
        raise ValueError(f"{name} must hold {len(vector)} finite numbers, got NaN or infinity in it")
    return vector.to("cpu", torch.float64).clone()


def refuse_unless_finite(subject: str, value: Any, shape: tuple[int, ...]) -> None:
    """Refuses all but finite tensors of this shape; ``subject`` says who "must be" or "must return" one."""
    if not isinstance(value, Tensor) or value.shape != shape or not bool(value.isfinite().all()):
        found = described(value) if getattr(value, "shape", None) != shape else "NaN or infinity in it"
        raise ValueError(f"{subject} a finite tensor of shape {tuple(shape)}, got {found}")


class UserLedger:
    """Hands out users 0, …, n − 1, each at most once, and counts the batches.

    No user is in two rounds of the sequentially interactive algorithms, or they would not be as private as one round.
    """

    def __init__(self, num_users: int) -> None:
        self.num_users = integer("num_users", num_users)
        self.batches = 0
        self._batch_of = torch.full((self.num_users,), _UNUSED, dtype=torch.long)

    @property
    def used(self) -> int:
        """The number of users who have been handed out."""
        return int((self._batch_of != _UNUSED).sum())

    def claim(self, indices: Any) -> Tensor:
        """Marks a batch of users as used, and returns their numbers as an int64 vector on the CPU.

        Raises:
            ValueError: If the batch is empty, no vector of whole numbers, out of range, or holds a user who is in it twice or
                was handed out before; nobody is then marked.
        """
        batch = _as_indices(indices, self.batches)
        outside = batch[(batch < 0) | (batch >= self.num_users)]
        if outside.numel():
            raise ValueError(
                f"batches must hold users from 0 to {self.num_users - 1}, but batch {self.batches} holds {int(outside[0])}; "
                "remove it"
            )
        seen = batch[self._batch_of[batch] != _UNUSED]
        if seen.numel():
            user = int(seen[0])
            raise ValueError(
                f"batches must use every user at most once, but user {user} is in batch {self.batches} and was in batch "
                f"{int(self._batch_of[user])}; leave it out of one of them"
            )
        found, times = torch.unique(batch, return_counts=True)
        if len(found) < len(batch):
            user = int(found[times > 1][0])
            raise ValueError(f"batches must use every user at most once, but user {user} is twice in batch {self.batches}")
        self._batch_of[batch] = self.batches
        self.batches += 1
        return batch

    def claim_all(self, batches: Iterable[Any]) -> list[Tensor]:
        """Claims one batch after the other, before anything is computed from any of them."""
        scalar = getattr(batches, "ndim", 1) == 0  # an array or tensor that says it is iterable
        if not isinstance(batches, Iterable) or isinstance(batches, str) or scalar:
            raise ValueError(f"batches must be a list of vectors of user numbers, got {batches!r}")
        claimed = [self.claim(batch) for batch in batches]
        if not claimed:
            raise ValueError("batches must hold at least one batch of users, got none; leave it out for batches at random")
        return claimed


def _as_indices(indices: Any, number: int) -> Tensor:
    """Returns a batch as a non-empty int64 vector."""
    try:
        batch = torch.as_tensor(indices).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"batches must hold tensors of user numbers, but batch {number} is {type(indices).__name__}") from None
    whole = not (batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool)
    if batch.ndim != 1 or not batch.numel() or not whole:
        raise ValueError(
            f"batches must hold non-empty vectors of whole numbers, but batch {number} has shape {tuple(batch.shape)} and "
            f"type {batch.dtype}; pass user numbers, not a mask"
        )
    return batch.long()
