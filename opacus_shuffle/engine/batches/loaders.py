"""Data loaders that issue a ticket with every batch that they yield.

The ticket is issued when the batch is yielded, because workers may have drawn it long before.

>>> import torch
>>> from torch.utils.data import TensorDataset
>>> from opacus_shuffle.engine.batches.samplers import FixedSizeSampler
>>> plain = DataLoader(TensorDataset(torch.zeros(10, 1)), batch_size=4)
>>> sampler = FixedSizeSampler(num_samples=10, batch_size=4, steps=3)
>>> loader = with_batch_sampler(plain, sampler, TicketBook())
>>> [loader.tickets.fresh().size for _ in loader]
[4, 4, 4]
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch.utils.data import DataLoader, RandomSampler

from opacus_shuffle.core.opacus_compat import build_physical_loaders_with
from opacus_shuffle.core.randomness import for_pytorch
from opacus_shuffle.engine.batches.samplers import OwnBatches, SplitBatches, TicketedSampler
from opacus_shuffle.engine.batches.tickets import Ticket, TicketBook
from opacus_shuffle.engine.guards.raw_gradients import names_of


class TicketedLoader(DataLoader):
    """A loader that issues the tickets of the batches that its sampler draws.

    Attributes:
        tickets: Where they are issued. Deep copies and pickles get another book, which no
            optimizer knows.
    """

    tickets: TicketBook | None = None

    def __iter__(self) -> Any:
        if self.tickets is None:
            return super().__iter__()
        # PyTorch draws the workers' seed on the default device, which need not be the device of the
        # loader's generator.
        with torch.device("cpu"):
            batches: Any = super().__iter__()  # has the sampler begin to note what it draws
        return _with_tickets(self, batches, getattr(self.batch_sampler, "drawn", None))


class TicketedDPDataLoader(TicketedLoader, DPDataLoader):
    """Opacus's Poisson loader, with tickets."""


def _with_tickets(
    loader: TicketedLoader, batches: Iterator[Any], drawn: deque[Ticket] | None
) -> Iterator[Any]:
    """Yields a loader's batches, each with its ticket, in the order in which they were drawn.

    A pass ends with its first error, because with workers a batch may have been lost by it.
    """
    tickets: Any = loader.tickets
    while True:
        if changed := tickets.changed_without_step():
            raise ValueError(
                f"{names_of(changed)} changed on the last batch without optimizer.step(): updates "
                "by hand, such as p -= lr * p.grad, are neither clipped, noised nor accounted; "
                "call step() of the optimizer that make_private returned, and change weights "
                "otherwise only between a step and the next batch"
            )
        sampler: Any = loader.batch_sampler
        if loader.persistent_workers and getattr(sampler, "drawn", None) is not drawn:
            tickets.issue(None)
            raise ValueError(
                "this pass over the data loader ended when a later one began, as "
                "persistent_workers=True gives both the same workers: end one pass before the "
                "next, or leave out persistent_workers=True"
            )
        try:
            content = next(batches)
        except StopIteration:
            tickets.end_pass()
            return
        except BaseException:
            tickets.issue(None)
            raise
        ticket = drawn.popleft() if drawn else None
        tickets.issue(ticket, content)
        try:
            yield content
        except GeneratorExit:  # the loop was left, by a break or by next(iter(loader))
            if ticket is not None:
                ticket.epoch.end = "left"
            raise


def with_batch_sampler(
    data_loader: DataLoader,
    sampler: TicketedSampler,
    tickets: TicketBook,
    loader_class: type[TicketedLoader] = TicketedLoader,
) -> DataLoader:
    """Returns a copy of a loader with another batch sampler and with tickets."""
    loader: Any = copy.copy(data_loader)
    # The sampler draws the order. The loader's generator draws only the workers' seeds, which need
    # not be secret.
    vars(loader).update(
        _iterator=None, in_order=True, tickets=tickets, generator=for_pytorch(loader.generator)
    )
    _set_batch_sampler(loader, sampler)
    loader.__class__, tickets.loader = loader_class, weakref.ref(loader)
    return loader  # type: ignore[no-any-return]


def ticketed_copy(data_loader: DataLoader, tickets: TicketBook) -> DataLoader:
    """Returns a copy of the user's loader, with the same batches and with tickets.

    Raises:
        ValueError: If it yields batches in another way than a plain ``DataLoader``.
    """
    if type(data_loader) not in (DataLoader, TicketedLoader):
        raise ValueError(
            "poisson_sampling=False needs a plain torch DataLoader, got a "
            f"{type(data_loader).__name__}: what another class yields is unknown"
        )
    return with_batch_sampler(data_loader, OwnBatches(data_loader.batch_sampler), tickets)  # type: ignore[arg-type]


def seeded_copy(data_loader: DataLoader, generator: torch.Generator) -> DataLoader:
    """Returns a copy of a loader that draws order and workers' seeds from this generator."""
    loader: Any = copy.copy(data_loader)
    vars(loader).update(_iterator=None, generator=for_pytorch(loader.generator or generator))
    order = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(order, RandomSampler) and order.generator is None:
        order, batches = copy.copy(order), copy.copy(loader.batch_sampler)
        order.generator, batches.sampler = for_pytorch(generator), order
        _set_batch_sampler(loader, batches)
    return loader  # type: ignore[no-any-return]


def _set_batch_sampler(loader: DataLoader, sampler: Any) -> None:
    """Sets the batch sampler of a loader; ``DataLoader`` itself forbids that after its creation."""
    object.__setattr__(loader, "batch_sampler", sampler)


def _physical_loader(
    dataset: Any, *, batch_sampler: BatchSplittingSampler, **keywords: Any
) -> DataLoader:
    """Builds the loader of physical batches that ``BatchMemoryManager`` iterates over."""
    tickets: TicketBook | None = getattr(batch_sampler.optimizer, "tickets", None)
    if tickets is None or not isinstance(batch_sampler.sampler, TicketedSampler):
        return DataLoader(dataset, batch_sampler=batch_sampler, **keywords)
    whole = tickets.loader()
    if (
        whole is None
        or batch_sampler.sampler is not whole.batch_sampler
        or dataset is not whole.dataset
    ):
        raise ValueError(
            "data_loader is not the one that make_private returned with this optimizer, or is "
            "split already, so that its batches are not those that are accounted: pass loader and "
            "optimizer of the same call to BatchMemoryManager"
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
