"""The samplers that draw which records are in each batch, and the plan of how many there are.

Each batch that they draw has a ticket, which the loader issues when it yields the batch. The number
of batches is computed in exact integers. Stock Opacus divides floats: ``int(1 / (1 / L))`` is L − 1
for L = 93, and ``int(n * (1 / L))`` is 0 for n = 49, B = 1. Here the number of steps is the length
of the loader, and the batch size for averages is ``round(n / L)``.

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
from opacus_shuffle.core.randomness import SecretGenerator, renew_after_fork
from opacus_shuffle.engine.batches.ranks import ALONE, Ranks
from opacus_shuffle.engine.batches.tickets import Pass, Ticket

Kind = Literal["poisson", "fixed_size", "random_allocation", "own"]
INDEPENDENT: tuple[Kind, ...] = ("poisson", "random_allocation")
"""Kinds of sampling with an independent draw for each record: batch sizes are random and secret."""


class TicketedSampler(Sampler[Any]):
    """A mixin for batch samplers that notes each batch that it draws.

    Attributes:
        drawn: The tickets of the latest iterator's batches that were drawn and not yet yielded.
            There may be several, because workers prefetch.
    """

    drawn: deque[Ticket]

    def __iter__(self) -> Iterator[Any]:
        self.drawn = deque()  # now and not at the first batch, because the loader reads it
        return self._noting(self.drawn)

    def _noting(self, drawn: deque[Ticket]) -> Iterator[Any]:
        epoch = Pass()
        for records in self.draw():
            drawn.append(Ticket((len(records),), epoch))
            yield records

    def draw(self) -> Iterable[Any]:
        """Draws the batches of an epoch."""
        return super().__iter__()


class PoissonSampler(TicketedSampler, UniformWithReplacementSampler):
    """Opacus's Poisson sampler.

    Args:
        ranks: The processes that train together.
        **keywords: As in Opacus.
    """

    generator: torch.Generator | None

    def __init__(self, *, ranks: Ranks = ALONE, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.ranks = ranks
        renew_after_fork(self)

    def renew(self) -> None:
        """Draws by a fresh secret seed in a forked process.

        The stream that drew the seed is kept and renewed in a fork of that process.
        """
        if self.generator is None:
            self.generator = self.__dict__.setdefault("stream", SecretGenerator()).of_pytorch


class ExactPoissonSampler(PoissonSampler):
    """Draws Poisson samples at the accounted rate to 2⁻⁵³, where Opacus compares 24 bits.

    Each of the ranks draws from its own share of the records.
    """

    def draw(self) -> Iterator[list[int]]:
        """Draws the batches of an epoch."""
        here = self.ranks.share(self.num_samples)
        for _ in range(self.steps):
            places = bernoulli_indices(len(here), self.sample_rate, self.generator)
            yield [here[place] for place in places]


class EpochSampler(TicketedSampler, BatchSampler):
    """Draws an epoch's batches; derived classes implement :meth:`draw`.

    Opacus's ``BatchMemoryManager`` knows the length of a ``BatchSampler`` only.

    Args:
        num_samples: n, the size of the data set.
        batch_size: B ≤ n, records per batch, or how many are expected.
        steps: Batches per epoch.
        generator: Source of the draws; by default one seeded by the operating system.
        ranks: The processes that train together.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        steps: int,
        generator: torch.Generator | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(SequentialSampler(range(num_samples)), batch_size, drop_last=True)
        self.num_samples, self.steps, self.ranks = num_samples, steps, ranks
        self.generator = SecretGenerator() if generator is None else generator

    def __len__(self) -> int:
        return self.steps


class FixedSizeSampler(EpochSampler):
    """Draws batches of exactly B distinct records, each a fresh uniform subset.

    The accountant ``subsampled_shuffle`` needs it. All ranks draw the same batch, of which each
    takes its own share.
    """

    def draw(self) -> Iterator[list[int]]:
        """Draws the batches of an epoch."""
        for _ in range(self.steps):
            records = subset(self.num_samples, self.batch_size, self.generator)
            yield records[self.ranks.rank :: self.ranks.size]


class RandomAllocationSampler(EpochSampler):
    """Assigns each record to one batch of the epoch, by a secret draw that is new in every epoch.

    Each record is in an epoch exactly once. Batch sizes are binomial and may be zero. Each rank
    draws for its own share of the records.
    """

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
    """Yields the batches of the user's loader, while data and batch size stay the same."""

    def __init__(self, batches: BatchSampler) -> None:
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)
        self.batches, self.planned = batches, self.sizes(batches)

    def sizes(self, batches: Any) -> tuple[int, int, bool]:
        """Returns the number of records, the batch size, and whether the last one is dropped."""
        return len(batches.sampler), batches.batch_size, batches.drop_last

    def draw(self) -> Iterator[list[int]]:
        """Yields the user's batches.

        Raises:
            ValueError: If data or batch size have changed.
        """
        for records in self.batches:
            if (sizes := self.sizes(self.batches)) != self.planned:
                raise ValueError(
                    "the data or the batch sampler of data_loader was changed after make_private: "
                    f"(records, batch_size, drop_last) were {self.planned} and are {sizes}, so "
                    "that its batches are not those that are accounted; pass the new loader to "
                    "make_private"
                )
            yield records


class SplitBatches(TicketedSampler, BatchSplittingSampler):
    """Splits batches into physical ones for ``BatchMemoryManager``, as Opacus does.

    The ticket tells the optimizer when a batch is complete. Opacus's signals would be wrong for
    batches that were prefetched and never yielded.
    """

    def _noting(self, drawn: deque[Ticket]) -> Iterator[list[int]]:
        inner: TicketedSampler = self.sampler
        epoch = Pass()
        for records in inner.draw():
            count = max(1, math.ceil(len(records) / self.max_batch_size))
            pieces = np.array_split(np.asarray(records, dtype=np.int64), count)
            ticket = Ticket(tuple(map(len, pieces)), epoch)
            for piece in pieces:
                drawn.append(ticket)
                yield piece.tolist()


_SAMPLERS: dict[Kind, Any] = {
    "poisson": POISSON_SAMPLERS,
    "random_allocation": RandomAllocationSampler,
}
"""The batch samplers of a loader that may be replaced, for each way of drawing batches."""


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
    """Plans the batches of an epoch from the data of a loader.

    Args:
        accountant: Its name, for messages.
        data_loader: A map-style loader with a batch size, in sequential or shuffled order.
        kind: How batches are drawn. With ``"own"`` all batches of the loader must have one size.
        expected: Whether the expected size of a batch is enough for any sampler, as with Opacus's
            accountants.
        distributed: Whether the loader may have a ``DistributedSampler``, which is replaced.

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
    """Refuses samplers that must not be replaced silently, such as a weighted one."""
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
