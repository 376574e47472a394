"""Functions that users write for batches, called on one record at a time, so that nothing in them can mix records.

>>> import torch
>>> centred = EachRecord(lambda x: x - x.mean(dim=0, keepdim=True) + 1, "centred")
>>> centred(torch.tensor([0.0, 2.0, 7.0])).tolist()  # each record is a batch of its own, and is its mean
[1.0, 1.0, 1.0]
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from opacus_shuffle.sco.records import map_data


class EachRecord:
    """A function of batches that is given batches of one.

    Args:
        function: From batches to a tensor of the shape of its first argument. It is vectorised by ``torch.func.vmap`` if that
            can be; else called once per record, with a warning that it is slow.
        name: For messages.
        remedy: For the warning: how to promise that the function treats records one by one.
    """

    def __init__(self, function: Callable[..., Tensor], name: str, remedy: str = "") -> None:
        self._function, self._name, self._remedy = function, name, remedy
        self._vectorised = True

    def __call__(self, first: Tensor, *others: Any) -> Tensor:
        """The function's values (B, ...), each of one record.

        Raises:
            ValueError: A value is no tensor of its record's shape, or random numbers are drawn.
        """
        records = (first, *others)
        if not len(first):
            return torch.empty_like(first)
        if self._vectorised:
            try:
                values: Tensor = torch.func.vmap(self._one)(*records)
                return values
            except RuntimeError as error:
                refuse_randomness_or_memory(error, self._name)
                values = self._loop(records)  # an error of the function itself comes up here, without vmap around it
                self._vectorised = False
                warnings.warn(
                    f"{self._name} cannot be vectorised by torch.func.vmap ({str(error).splitlines()[0][:120]}); it is called "
                    f"once per record, which is slow. Write it with PyTorch operations and no branches on values{self._remedy}",
                    stacklevel=2,
                )
                return values
        return self._loop(records)

    def _one(self, *record: Any) -> Tensor:
        """One record's value, without the first dimension."""
        batch = [map_data(lambda x: x.unsqueeze(0), part) for part in record]
        wanted = batch[0].shape
        value: Any = self._function(*batch)
        if not isinstance(value, Tensor) or value.shape != wanted:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{self._name} must return a tensor of shape {tuple(wanted)} for a batch of one record, got {found}"
            )
        return value[0]

    def _loop(self, records: Any) -> Tensor:
        """The values, record by record."""
        values = []
        for i in range(len(records[0])):
            with no_random_draws(self._name):
                values.append(self._one(*map_data(operator.itemgetter(i), records)))
        return torch.stack(values)


def one_loss(value: Any, name: str) -> Tensor:
    """The loss of a batch of one as a number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{name} must return one loss per record (it is called with one record at a time), got {found}: sum or average "
            "over everything but the records, with reduction='sum' or 'mean' say"
        )
    return value.reshape(())


def refuse_randomness_or_memory(error: RuntimeError, name: str) -> None:
    """Raises what no slower way would mend: the want of memory, and random numbers in a loss."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if "randomness" in str(error):
        raise _random_loss(name) from error


@contextlib.contextmanager
def no_random_draws(name: str) -> Iterator[None]:
    """Refuses code that draws from PyTorch's global generator."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(before, torch.get_rng_state()):
        raise _random_loss(name)


def _random_loss(name: str) -> ValueError:
    return ValueError(f"{name} must be a function of theta and the record, got one that draws random numbers; take them out")
