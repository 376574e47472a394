"""The samplers that draw which records are in each batch, and the plan of how many there are.

For every batch that they draw, they leave a ticket with the loader that yields it. How many there
are is decided before anything is touched, in exact integers. Stock Opacus divides floats: ``int(1 /
(1 / L))`` is L − 1 for L = 93, and ``int(n * (1 / L))`` is 0 for n = 49, B = 1. Here the number of
steps is the loader's own length, and the averaging batch size is ``round(n / L)``.

>>> sampler = FixedSizeSampler(
...     num_samples=10, batch_size=4, steps=3, generator=torch.Generator().manual_seed(0))
>>> [len(set(batch)) for batch in sampler]
[4, 4, 4]
>>> from torch.utils.data import TensorDataset
>>> loader = DataLoader(TensorDataset(torch.zeros(930, 1)), batch_size=10)
>>> plan = plan_sampling("shuffled_checkin", loader, "poisson")
>>> plan.kind, plan.steps_per_epoch, plan.batch_size, plan.sample_rate == 1 / 93
('poisson', 93, 10, True)
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from opacus_shuffle.core.opacus_compat import POISSON_SAMPLERS
from opacus_shuffle.core.participation import allocate, bernoulli_indices, subset
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import integer
from opacus_shuffle.engine.ranks import Ranks
from opacus_shuffle.engine.sampling.tickets import Part, Pass, parts_of

Kind = Literal["poisson", "fixed_size", "random_allocation", "own"]
INDEPENDENT: tuple[Kind, ...] = ("poisson", "random_allocation")
"""Kinds of which each record draws for itself, so that sizes of batches are random, and secret."""

ALONE = Ranks()

_SETTINGS = ("num_samples", "sample_rate", "batch_size", "drop_last", "ranks", "steps")


class TicketedSampler(Sampler[Any]):
    """A mixin for batch samplers that notes each batch that it draws.

    Attributes:
        drawn: Of the latest iterator, the parts that were drawn and not yet yielded; workers
            prefetch, in order.
    """

    drawn: deque[Part]
    _planned: tuple[Any, ...] | None = None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._planned = self._settings()

    def __iter__(self) -> Iterator[Any]:
        self.drawn = deque()  # now, not at the first batch: the loader asks for it
        return self._noting(self.drawn)

    def _noting(self, drawn: deque[Part]) -> Iterator[Any]:
        epoch = Pass()
        for records in self.as_planned():
            drawn.extend(parts_of(len(records), epoch=epoch))
            yield records

    def as_planned(self) -> Iterator[Any]:
        """Yields the batches of an epoch; refuses if the sampler was changed.

        Raises:
            ValueError: If the sampler was changed.
        """
        for records in self.draw():
            if self._planned not in (None, self._settings()):
                changes = zip(_SETTINGS, self._planned or (), self._settings(), strict=True)
                changed = [
                    f"{name} from {old} to {new}" for name, old, new in changes if old != new
                ]
                raise ValueError(
                    f"the sampler of the data loader was changed ({', '.join(changed)}), or its "
                    "data, so that its batches are not those that are accounted: pass another "
                    "loader to make_private"
                )
            yield records

    def _settings(self) -> tuple[Any, ...]:
        """Returns the numbers that decide how batches are drawn."""
        return tuple(getattr(self, name, None) for name in _SETTINGS)

    def draw(self) -> Iterable[Any]:
        """Draws the batches of an epoch."""
        return super().__iter__()


class PoissonSampler(TicketedSampler, UniformWithReplacementSampler):
    """Opacus's Poisson sampler."""

    generator: torch.Generator | None

    def renew(self) -> None:
        """Draws by a fresh secret seed in a forked process.

        The stream that drew the seed is kept, so that it is renewed in a fork of that process.
        """
        if self.generator is None:
            self.generator = self.__dict__.setdefault("stream", SecretGenerator()).of_pytorch


class ExactPoissonSampler(PoissonSampler):
    """Draws Poisson samples at the accounted rate to 2⁻⁵³, where Opacus compares 24 bits.

    Args:
        ranks: The processes that draw, each for its own share of the records.
        **keywords: As Opacus's.
    """

    def __init__(self, *, ranks: Ranks = ALONE, **keywords: Any) -> None:
        self.ranks = ranks
        super().__init__(**keywords)

    def draw(self) -> Iterator[list[int]]:
        """Draws the batches of an epoch."""
        here = self.ranks.share(self.num_samples)
        for _ in range(self.steps):
            places = bernoulli_indices(len(here), self.sample_rate, self.generator)
            yield [here[place] for place in places]


class EpochSampler(TicketedSampler, BatchSampler):
    """Draws an epoch's batches; derived classes say how, by :meth:`draw`.

    It is a ``BatchSampler``, so that Opacus's ``BatchMemoryManager`` knows its length.

    Args:
        num_samples: n, the size of the data set.
        batch_size: B ≤ n, records per batch, or how many are expected.
        steps: Batches per epoch.
        generator: Source of the draws; by default one seeded by the operating system.
        ranks: The processes that train together.

    Attributes:
        sampling: What accountants ask for.

    Raises:
        ValueError: If a number is out of range.
    """

    sampling: Kind

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        steps: int,
        generator: torch.Generator | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.num_samples = integer("num_samples", num_samples)
        if integer("batch_size", batch_size) > self.num_samples:
            raise ValueError(
                f"batch_size must not exceed the data set's {num_samples} records, got {batch_size}"
            )
        self.ranks, self.steps = ranks, integer("steps", steps)
        records = SequentialSampler(range(self.num_samples))
        super().__init__(records, int(batch_size), drop_last=True)
        self.generator = SecretGenerator() if generator is None else generator

    def __len__(self) -> int:
        return self.steps


class FixedSizeSampler(EpochSampler):
    """Draws batches of exactly B distinct records, each a fresh uniform subset.

    That is the sampling of ``subsampled_shuffle``. All ranks draw alike, each for its own share of
    every batch.
    """

    sampling = "fixed_size"

    def draw(self) -> Iterator[list[int]]:
        """Draws the batches of an epoch."""
        for _ in range(self.steps):
            records = subset(self.num_samples, self.batch_size, self.generator)
            yield records[self.ranks.rank :: self.ranks.size]


class RandomAllocationSampler(EpochSampler):
    """Lets each record fall into one of an epoch's batches, anew and in secret for every epoch.

    All records are in an epoch exactly once; how many a batch has is binomial, and may be none.
    Each rank draws for its own share of the records.
    """

    sampling = "random_allocation"

    def draw(self) -> Iterator[list[int]]:
        """Draws the batches of an epoch.

        Raises:
            ValueError: If the process has forked since.
        """
        here, process = self.ranks.share(self.num_samples), os.getpid()
        for places in allocate(len(here), self.steps, self.generator):
            if os.getpid() != process:
                raise ValueError(
                    "this epoch's batches were drawn before the process forked, and its parent "
                    "may train on the same: begin another pass over the data loader"
                )
            yield [here[place] for place in places]


class OwnBatches(TicketedSampler, BatchSampler):
    """Yields a user's own batches, as long as their sizes stay the same."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)

    def _settings(self) -> tuple[Any, ...]:
        own: Any = self.batches
        return len(own.sampler), None, own.batch_size, own.drop_last, None, None

    def draw(self) -> Iterable[list[int]]:
        """Yields the user's own batches."""
        return self.batches


class SplitBatches(TicketedSampler, BatchSplittingSampler):
    """Splits batches into physical ones for ``BatchMemoryManager``, as Opacus does.

    They carry parts of tickets, so nothing is signalled to the optimizer: signals of batches that
    were prefetched and never yielded would be obeyed by later ones.
    """

    def _noting(self, drawn: deque[Part]) -> Iterator[list[int]]:
        inner: TicketedSampler = self.sampler
        epoch = Pass()
        for records in inner.as_planned():
            count = max(1, math.ceil(len(records) / self.max_batch_size))
            pieces = np.array_split(np.asarray(records, dtype=np.int64), count)
            parts = parts_of(*map(len, pieces), epoch=epoch)
            for part, piece in zip(parts, pieces, strict=True):
                drawn.append(part)
                yield piece.tolist()


_SAMPLERS: dict[Kind, Any] = {
    "poisson": POISSON_SAMPLERS,
    "random_allocation": RandomAllocationSampler,
}
"""Which batch samplers of a loader may be replaced, for each way of drawing batches."""


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """How batches are drawn, in numbers."""

    kind: Kind
    num_users: int
    steps_per_epoch: int
    batch_size: int
    sample_rate: float


def plan_sampling(
    accountant: str,
    data_loader: DataLoader,
    kind: Kind,
    *,
    expected: bool = False,
    distributed: bool = False,
) -> SamplingPlan:
    """Plans the batches of an epoch from this loader's data.

    Args:
        accountant: Its name, for messages.
        data_loader: A map-style loader with a batch size, in sequential or shuffled order.
        kind: How batches are drawn. With ``"own"`` the loader's batches must all have one size.
        expected: Opacus's own accountants take the expected size of a batch, whatever the sampler.
        distributed: A ``DistributedSampler`` may be there, too; it is replaced, as every one is.

    Raises:
        ValueError: If the accountant does not cover these batches.
    """
    data = data_loader.dataset
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise ValueError(
            "data_loader must have a map-style data set with a length, got the stream "
            f"{type(data).__name__}, from which no random sample can be drawn: load its records "
            "into a list, a TensorDataset or another torch.utils.data.Dataset"
        )
    users, steps = len(data), len(data_loader)
    if users < 1 or steps < 1:
        raise ValueError(
            f"data_loader yields no batch: {users} records, batch_size={data_loader.batch_size}"
        )
    if not (expected and kind == "own"):
        _check_sampler(accountant, kind, data_loader, distributed=expected or distributed)
    if kind in INDEPENDENT or expected:
        return SamplingPlan(kind, users, steps, max(1, round(users / steps)), 1 / steps)
    sampler: Any = data_loader.batch_sampler  # which knows its size, or was refused above
    batch = min(sampler.batch_size, users)
    if kind == "own" and users % batch and not data_loader.drop_last:
        raise ValueError(
            f"{accountant} needs batches of one size, but {users} records in batches of {batch} "
            "end in a smaller one: pass drop_last=True, or leave out poisson_sampling=False"
        )
    return SamplingPlan(kind, users, steps, batch, batch / users)


def _check_sampler(
    accountant: str, kind: Kind, data_loader: DataLoader, *, distributed: bool
) -> None:
    """Refuses samplers that would be replaced without a word, such as a weighted one."""
    sampler: Any = data_loader.sampler
    if data_loader.batch_size is None:  # a batch sampler of its own
        sampler = data_loader.batch_sampler
        fits = isinstance(sampler, _SAMPLERS.get(kind, FixedSizeSampler))
    elif isinstance(sampler, RandomSampler):
        fits = not sampler.replacement and sampler.num_samples == len(data_loader.dataset)  # type: ignore[arg-type]
    else:
        shares = distributed and isinstance(sampler, DistributedSampler)
        fits = shares or isinstance(sampler, SequentialSampler)
    if not fits:
        raise ValueError(
            f"{accountant} cannot account for batches drawn by a {type(sampler).__name__}: pass a "
            "DataLoader with a batch_size and shuffle=True or False (select records with "
            "torch.utils.data.Subset)"
        )
