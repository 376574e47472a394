"""Data loaders that issue a ticket with every batch, when they yield it: workers may have drawn it long before.

>>> import torch
>>> from torch.utils.data import TensorDataset
>>> from opacus_shuffle.engine.sampling.samplers import FixedSizeSampler
>>> loader = DataLoader(TensorDataset(torch.zeros(10, 1)), batch_size=4)
>>> loader = with_batch_sampler(loader, FixedSizeSampler(num_samples=10, batch_size=4, steps=3), TicketBook())
>>> [loader.tickets.fresh().records for _ in loader]
[4, 4, 4]
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch.utils.data import DataLoader, RandomSampler

from opacus_shuffle.core.opacus_compat import build_physical_loaders_with
from opacus_shuffle.engine.sampling.samplers import OwnBatches, SplitBatches, TicketedSampler
from opacus_shuffle.engine.sampling.tickets import Part, TicketBook


class TicketedLoader(DataLoader):
    """A loader whose batch sampler leaves tickets.

    Attributes:
        tickets: Where they are issued. Copies have a book of their own, which no optimizer knows.
    """

    tickets: TicketBook | None = None

    def __copy__(self) -> TicketedLoader:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TicketedLoader:
        copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be pickled.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "the data loader that make_private returned holds the data set, and the right to step "
            "on its batches, which no "
            "other process has: pickle neither it nor what holds it; call make_private there"
        )

    def __iter__(self) -> Any:
        if self.tickets is None:
            return super().__iter__()
        if not getattr(self, "in_order", True):
            raise ValueError(
                "in_order must be True, for batches are accounted in the order in which they were "
                "drawn; got False"
            )
        batches: Any = super().__iter__()
        return _Yielded(self, batches, self.tickets)


class TicketedDPDataLoader(TicketedLoader, DPDataLoader):
    """Opacus's Poisson loader, with tickets."""


class _Yielded:
    """The batches of one pass over a loader.

    Args:
        loader: What they are of. Its sampler has just begun to note what it draws; if it does not,
            no ticket is issued.
        batches: What it yields, in the order in which it was drawn.
        tickets: Where tickets are issued.
    """

    def __init__(self, loader: DataLoader, batches: Iterator[Any], tickets: TicketBook) -> None:
        self._loader, self._batches, self._tickets = loader, batches, tickets
        self._drawn = self._began = self._noted()

    def _noted(self) -> deque[Part] | None:
        return getattr(self._loader.batch_sampler, "drawn", None)

    def __iter__(self) -> _Yielded:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        if self._loader.persistent_workers and self._noted() is not self._began:
            self._tickets.issue(None)
            raise ValueError(
                "this pass over the data loader ended when a later one began, as "
                "persistent_workers=True gives both the same "
                "workers: end one pass before the next, or leave out persistent_workers=True"
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            self._tickets.issue(None)
            if self._loader.num_workers:
                self._drawn = None  # one batch has been lost, or none: nobody knows
            elif self._drawn:
                self._drawn.popleft()
            raise
        self._tickets.issue(self._drawn.popleft() if self._drawn else None, batch)
        return batch


def with_batch_sampler(
    data_loader: DataLoader,
    sampler: TicketedSampler,
    tickets: TicketBook,
    kind: type[TicketedLoader] = TicketedLoader,
) -> DataLoader:
    """A copy of the loader, with another batch sampler and tickets, and with workers of its own."""
    loader: Any = copy.copy(data_loader)
    vars(loader).update(_iterator=None, in_order=True, tickets=tickets)
    set_batch_sampler(loader, sampler)
    loader.__class__, tickets.loader = kind, weakref.ref(loader)
    return loader  # type: ignore[no-any-return]


def ticketed_copy(data_loader: DataLoader, tickets: TicketBook) -> DataLoader:
    """A copy of the user's own loader, with tickets.

    Raises:
        ValueError: If it yields batches in another way than a plain ``DataLoader``.
    """
    if type(data_loader) not in (DataLoader, TicketedLoader):
        raise ValueError(
            "poisson_sampling=False needs a plain torch DataLoader, got a "
            f"{type(data_loader).__name__}: what another class "
            "yields is unknown"
        )
    return with_batch_sampler(data_loader, OwnBatches(data_loader.batch_sampler), tickets)  # type: ignore[arg-type]


def seeded_copy(data_loader: DataLoader, generator: torch.Generator) -> DataLoader:
    """A copy of the user's own loader whose workers, and whose order, are drawn from this generator, or from the user's own."""
    loader: Any = copy.copy(data_loader)
    vars(loader).update(_iterator=None, generator=loader.generator or generator)
    batches = data_loader.batch_sampler
    order = getattr(batches, "sampler", None)
    if isinstance(order, RandomSampler) and order.generator is None:
        order, batches = copy.copy(order), copy.copy(batches)
        order.generator, batches.sampler = generator, order  # type: ignore[union-attr]
        set_batch_sampler(loader, batches)  # type: ignore[arg-type]
    return loader  # type: ignore[no-any-return]


def set_batch_sampler(loader: DataLoader, sampler: TicketedSampler) -> None:
    """Replaces what ``DataLoader`` forbids to set, but asks for anew in every epoch."""
    object.__setattr__(loader, "batch_sampler", sampler)


def _physical_loader(
    dataset: Any, *, batch_sampler: BatchSplittingSampler, **keywords: Any
) -> DataLoader:
    """What ``BatchMemoryManager`` builds: Opacus's own loader, or one with the parts of our tickets."""
    tickets: TicketBook | None = getattr(batch_sampler.optimizer, "tickets", None)
    if tickets is None or not isinstance(batch_sampler.sampler, TicketedSampler):
        return DataLoader(dataset, batch_sampler=batch_sampler, **keywords)
    own = tickets.loader()
    if isinstance(batch_sampler.sampler, SplitBatches):
        raise ValueError(
            "data_loader is split already: pass the loader that make_private returned to "
            "BatchMemoryManager"
        )
    if own is None or batch_sampler.sampler is not own.batch_sampler or dataset is not own.dataset:
        raise ValueError(
            "data_loader is not the one that make_private returned with this optimizer, whose "
            "batches are those that are "
            "accounted: pass both of the same call to BatchMemoryManager"
        )
    split = SplitBatches(
        sampler=batch_sampler.sampler,
        max_batch_size=batch_sampler.max_batch_size,
        optimizer=batch_sampler.optimizer,
    )
    loader = TicketedLoader(dataset, batch_sampler=split, **keywords)
    loader.tickets = tickets
    return loader


build_physical_loaders_with(_physical_loader)
