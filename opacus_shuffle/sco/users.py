"""``UserLedger``: who has sent a message already, so that each user takes part in one round.

The sequentially interactive algorithms are as private as one round because no user is in two of them (parallel composition).
That is a promise about indices, so it is checked where the batches are handed out, whoever chose them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.core.validation import integer

_UNUSED = -1


class UserLedger:
    """Hands out users 0, …, n − 1, each at most once, and counts the batches."""

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
        ordered = batch.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.numel():
            user = int(twice[0])
            raise ValueError(f"batches must use every user at most once, but user {user} is twice in batch {self.batches}")
        self._batch_of[batch] = self.batches
        self.batches += 1
        return batch

    def claim_all(self, batches: Iterable[Any]) -> list[Tensor]:
        """Claims one batch after the other, before anything is computed from any of them."""
        if not isinstance(batches, Iterable) or isinstance(batches, str):
            raise ValueError(f"batches must be a list of vectors of user numbers, got {batches!r}")
        claimed = [self.claim(batch) for batch in batches]
        if not claimed:
            raise ValueError("batches must hold at least one batch of users, got none; leave it out for batches at random")
        return claimed


def split(users: Tensor, size: int) -> list[Tensor]:
    """Returns groups of ``size`` users in order, the last one smaller if need be."""
    return [users[first : first + size] for first in range(0, len(users), size)]


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
