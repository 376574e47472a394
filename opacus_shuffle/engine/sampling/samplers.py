"""The samplers of an engine: for every batch that they draw, they leave a ticket with the loader that yields it.

>>> sampler = FixedSizeSampler(num_samples=10, batch_size=4, steps=3, generator=torch.Generator().manual_seed(0))
>>> [len(set(batch)) for batch in sampler]
[4, 4, 4]
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from opacus_shuffle.core.participation import bernoulli_indices, subset
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import integer
from opacus_shuffle.engine.ranks import Ranks
from opacus_shuffle.engine.sampling.tickets import Part, Ticket

_LAW = ("num_samples", "sample_rate", "batch_size", "drop_last", "ranks")
ALONE = Ranks()


class TicketedSampler(Sampler[Any]):
    """Mixin for batch samplers, which draw in :meth:`draw`.

    Attributes:
        drawn: Of the latest iterator, the parts that were drawn and not yet yielded; workers
            prefetch, in order.
    """

    drawn: deque[Part]
    _planned: tuple[Any, ...] | None = None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._planned = self._law()

    def __iter__(self) -> Iterator[Any]:
        self.drawn = deque()  # now, not at the first batch: the loader asks for it
        return self._noting(self.drawn)

    def _noting(self, drawn: deque[Part]) -> Iterator[Any]:
        for records in self.as_planned():
            drawn.append(Part(Ticket(len(records))))
            yield records

    def as_planned(self) -> Iterator[Any]:
        """The batches of an epoch, as long as they are drawn as they are accounted.

        Raises:
            ValueError: If the sampler was changed.
        """
        for records in self.draw():
            if self._planned not in (None, self._law()):
                changes = zip(_LAW, self._planned or (), self._law(), strict=True)
                changed = ", ".join(
                    f"{name} from {old} to {new}" for name, old, new in changes if old != new
                )
                raise ValueError(
                    f"the sampler of the data loader was changed ({changed}), or its data, so that "
                    "its batches are not those "
                    "that are accounted: pass another loader to make_private"
                )
            yield records

    def _law(self) -> tuple[Any, ...]:
        """The numbers by which batches are drawn."""
        return tuple(getattr(self, name, None) for name in _LAW)

    def draw(self) -> Iterable[Any]:
        """The batches of an epoch."""
        return super().__iter__()


class PoissonSampler(TicketedSampler, UniformWithReplacementSampler):
    """Opacus's Poisson sampler."""


class ExactPoissonSampler(PoissonSampler):
    """Poisson samples at the accounted rate, to 2⁻⁵³; Opacus compares 24 bits.

    Args:
        ranks: The processes that draw, each for its own share of the records.
        **keywords: As Opacus's.
    """

    def __init__(self, *, ranks: Ranks = ALONE, **keywords: Any) -> None:
        self.ranks = ranks
        super().__init__(**keywords)

    def draw(self) -> Iterator[list[int]]:
        """The batches of an epoch."""
        here = self.ranks.share(self.num_samples)
        for _ in range(self.steps):
            yield [
                here[place]
                for place in bernoulli_indices(len(here), self.sample_rate, self.generator)
            ]


class DistributedPoissonSampler(TicketedSampler, DistributedUniformWithReplacementSampler):
    """Opacus's Poisson sampler of one rank, but for its batches without a record, which Opacus leaves out.

    Ranks would then add up sums of different batches, and the last ones would wait for ever.
    """

    def draw(self) -> Iterator[list[int]]:
        """The batches of an epoch."""
        order = torch.arange(self.total_size)
        if self.shuffle:
            order = torch.randperm(
                self.total_size,
                generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch),
            )
        here = order[self.rank :: self.num_replicas]
        for _ in range(self.num_batches):
            if isinstance(self.generator, SecretGenerator):
                yield [
                    int(here[place])
                    for place in bernoulli_indices(len(here), self.sample_rate, self.generator)
                ]
            else:  # as Opacus draws
                yield here[
                    torch.rand(len(here), generator=self.generator) < self.sample_rate
                ].tolist()


class FixedSizeSampler(TicketedSampler, BatchSampler):
    """Batches of exactly B distinct records, each a fresh uniform draw: the sampling of ``subsampled_shuffle``.

    A ``BatchSampler``, so that Opacus's ``BatchMemoryManager`` knows its length.

    Args:
        num_samples: n, the size of the data set.
        batch_size: B ≤ n, records per batch.
        steps: Batches per epoch.
        generator: Source of the draws; by default one seeded by the operating system. The same on
            all ranks.
        ranks: The processes that train, each on its own share of every batch.

    Raises:
        ValueError: If a number is out of range.
    """

    sampling = "fixed_size"
    """What accountants ask for."""

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
        self.ranks = ranks
        super().__init__(
            SequentialSampler(range(self.num_samples)), int(batch_size), drop_last=True
        )
        self.steps = integer("steps", steps)
        self.generator = SecretGenerator() if generator is None else generator

    def __len__(self) -> int:
        return self.steps

    def draw(self) -> Iterator[list[int]]:
        """The batches of an epoch."""
        for _ in range(self.steps):
            yield subset(self.num_samples, self.batch_size, self.generator)[
                self.ranks.rank :: self.ranks.size
            ]


class OwnBatches(TicketedSampler, BatchSampler):
    """The batches of a loader of the user's own, as long as that, its data and its batches stay as large."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches
        super().__init__(batches.sampler, batches.batch_size, batches.drop_last)

    def _law(self) -> tuple[Any, ...]:
        own: Any = self.batches
        return len(own.sampler), None, own.batch_size, own.drop_last, None

    def draw(self) -> Iterable[list[int]]:
        """The batches of an epoch."""
        return self.batches


class SplitBatches(TicketedSampler, BatchSplittingSampler):
    """The physical batches of ``BatchMemoryManager``, cut as Opacus cuts them.

    They carry parts of tickets, so nothing is signalled to the optimizer: signals of batches that
    were prefetched and never yielded would be obeyed by later ones.
    """

    def _noting(self, drawn: deque[Part]) -> Iterator[list[int]]:
        inner: TicketedSampler = self.sampler
        for records in inner.as_planned():
            pieces = np.array_split(
                np.asarray(records, dtype=np.int64),
                max(1, math.ceil(len(records) / self.max_batch_size)),
            )
            ticket = Ticket(len(records), len(pieces))
            for index, piece in enumerate(pieces):
                drawn.append(Part(ticket, index, len(piece)))
                yield piece.tolist()
