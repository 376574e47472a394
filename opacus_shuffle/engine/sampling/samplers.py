"""The samplers of an engine: they say when an epoch starts, for whoever abandoned the last one left half a batch behind.

>>> sampler = FixedSizeSampler(num_samples=10, batch_size=4, steps=3, generator=torch.Generator().manual_seed(0))
>>> [len(set(batch)) for batch in sampler]
[4, 4, 4]
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from opacus_shuffle.core.randomness import secret_generator
from opacus_shuffle.core.validation import integer


class EpochStart:
    """Mixin for samplers; holds its listener weakly, so that copies of a loader do not copy an optimizer."""

    _listener: Callable[[], Callable[[], None] | None] | None = None

    def call_at_epoch_start(self, method: Callable[[], None]) -> None:
        """Let ``method``, a bound one, be called whenever the sampler starts anew."""
        self._listener = weakref.WeakMethod(method)

    def epoch_starts(self) -> None:
        """Tell the listener, if it still lives."""
        listener = self._listener() if self._listener is not None else None
        if listener is not None:
            listener()


class PoissonSampler(EpochStart, UniformWithReplacementSampler):
    """Opacus's Poisson sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch_starts()
        yield from super().__iter__()


class FixedSizeSampler(EpochStart, BatchSampler):
    """Batches of exactly B distinct records, each a fresh uniform draw: the sampling of ``subsampled_shuffle``.

    A ``BatchSampler``, so that Opacus's ``BatchMemoryManager`` knows its length.

    Args:
        num_samples: n, the size of the data set.
        batch_size: B ≤ n, records per batch.
        steps: Batches per epoch.
        generator: Source of the draws; by default one seeded by the operating system.

    Raises:
        ValueError: If a number is out of range.
    """

    sampling = "fixed_size"
    """What accountants ask for."""

    def __init__(self, *, num_samples: int, batch_size: int, steps: int, generator: torch.Generator | None = None) -> None:
        self.num_samples = integer("num_samples", num_samples)
        if integer("batch_size", batch_size) > self.num_samples:
            raise ValueError(f"batch_size must not exceed the data set's {num_samples} records, got {batch_size}")
        super().__init__(SequentialSampler(range(self.num_samples)), int(batch_size), drop_last=True)
        self.steps = integer("steps", steps)
        self.generator = secret_generator("cpu") if generator is None else generator

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch_starts()
        for _ in range(self.steps):
            yield torch.randperm(self.num_samples, generator=self.generator)[: self.batch_size].tolist()


def with_batch_sampler(data_loader: DataLoader, batch_sampler: BatchSampler) -> DataLoader:
    """The same loader over the same data with another batch sampler."""
    return DataLoader(
        data_loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=data_loader.num_workers,
        collate_fn=data_loader.collate_fn,
        pin_memory=data_loader.pin_memory,
        timeout=data_loader.timeout,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        generator=data_loader.generator,
        prefetch_factor=data_loader.prefetch_factor,
        persistent_workers=data_loader.persistent_workers,
    )
