"""Functions that users write for batches, called on one record at a time, so that nothing in them can mix records."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from opacus_shuffle.sco.records import described, map_data

T = TypeVar("T")


class Vectorised:
    """A choice between a fast way by ``torch.func.vmap`` and a slow one, record by record; slow from the first failure on.

    The user's function is called ``name`` in messages; ``remedy`` is what the warning that it is slow says besides.
    """

    def __init__(self, name: str, remedy: str = "") -> None:
        self.name, self._remedy, self._fast = name, remedy, True

    def __call__(self, fast: Callable[[], T], slow: Callable[[], T]) -> T:
        """Returns the answer of either, and refuses a function that draws random numbers."""
        if not self._fast:
            return slow()
        try:
            return fast()
        except RuntimeError as error:
            refuse_randomness_or_memory(error, self.name)
            values = slow()  # an error of the function itself comes up here, without vmap around it
            self._fast = False
            warnings.warn(
                f"{self.name} cannot be vectorised by torch.func.vmap ({str(error).splitlines()[0][:120]}); it is called once "
                f"per record, which is slow. Write it with PyTorch operations and no branches on values{self._remedy}",
                stacklevel=3,
            )
            return values


class EachRecord:
    """A function of batches that is given batches of one, vectorised if it can be.

    It answers a tensor of the shape of its first argument. ``name`` and ``remedy`` are :class:`Vectorised`'s.
    """

    def __init__(self, function: Callable[..., Tensor], name: str, remedy: str = "") -> None:
        self._function, self._choose = function, Vectorised(name, remedy)

    def __call__(self, first: Tensor, *others: Any) -> Tensor:
        """Returns the function's values (B, ...), each of one record."""
        records = (first, *others)
        if not len(first):
            return torch.empty_like(first)
        return self._choose(lambda: torch.func.vmap(self._one)(*records), lambda: self._loop(records))

    def _one(self, *record: Any) -> Tensor:
        """Returns one record's value, without the first dimension."""
        batch = [batch_of_one(part) for part in record]
        wanted = batch[0].shape
        value: Any = self._function(*batch)
        if not isinstance(value, Tensor) or value.shape != wanted:
            raise ValueError(
                f"{self._choose.name} must return a tensor of shape {tuple(wanted)} for a batch of one record, got "
                f"{described(value)}"
            )
        return value[0]

    def _loop(self, records: Any) -> Tensor:
        """Returns the values, computed record by record."""
        values = []
        for i in range(len(records[0])):
            with no_random_draws(self._choose.name):
                values.append(self._one(*map_data(operator.itemgetter(i), records)))
        return torch.stack(values)


def batch_of_one(record: Any) -> Any:
    """Returns a record, whose tensors lack the users' dimension, as a batch."""
    return map_data(lambda x: x.unsqueeze(0), record)


def one_loss(value: Any, name: str) -> Tensor:
    """Returns the loss of a batch of one as a number, and refuses anything else."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(
            f"{name} must return one loss per record (it is called with one record at a time), got {described(value)}: sum or "
            "average over everything but the records, with reduction='sum' or 'mean' say"
        )
    return value.reshape(())


def refuse_randomness_or_memory(error: RuntimeError, name: str) -> None:
    """Raises an error that no slower way would mend: too little memory, or random numbers in a loss."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if "randomness" in str(error):
        raise _random_loss(name) from error


@contextlib.contextmanager
def no_random_draws(name: str) -> Iterator[None]:
    """Refuses, with a ``ValueError`` of this name, a block that has drawn from PyTorch's global generator on the CPU."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise _random_loss(name)


def _random_loss(name: str) -> ValueError:
    return ValueError(f"{name} must be a function of theta and the record, got one that draws random numbers; take them out")
