"""Tickets: one for each batch that the loader of ``make_private`` yields, so that no step is released that is not accounted.

A step takes the ticket of the batch that was yielded last, and leaves it spent; a batch that is
split into physical ones has one ticket with several parts, each of which is taken once. What has no
ticket (a batch of another loader, a cached one, the same one again) is refused before anything of
it is released. A batch that nobody stepped on is void when the next one comes.

>>> book = TicketBook()
>>> book.issue(Part(Ticket(3)))
>>> book.take({3})
>>> book.take({3})  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
ValueError: optimizer.step() has no fresh batch: the last batch of the data loader has been stepped on already; ...
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from opacus_shuffle.core.randomness import renew_after_fork
from opacus_shuffle.engine.sampling.same_weights import SameWeights

REMEDY = "iterate over the data loader that make_private returned, and step once on each batch, before the next one is drawn"

Origin = Literal["records", "a leaf", "a network"]
"""What a forward pass was of: records, a tensor whose gradient is asked for, or what another network has made."""


@dataclasses.dataclass(eq=False)
class Ticket:
    """One drawn batch: how many records it has, in how many physical batches it comes, and which of these were summed."""

    records: int
    parts: int = 1
    summed: set[int] = dataclasses.field(default_factory=set)
    released: bool = False


@dataclasses.dataclass(eq=False)
class Part:
    """One physical batch of a ticket.

    Attributes:
        ticket: The batch that it is a part of.
        index: Which one, from 0.
        records: How many records it has; by default all of the ticket's.
        waiting: How many of them no step has taken yet.
    """

    ticket: Ticket
    index: int = 0
    records: int = -1
    waiting: int = -1

    def __post_init__(self) -> None:
        if self.records < 0:
            self.records = self.ticket.records
        self.waiting = self.records

    @property
    def is_last(self) -> bool:
        """Whether the batch ends with this part."""
        return self.index == self.ticket.parts - 1


class TicketBook:
    """What one ``make_private`` knows of its batches: shared by its loader and its optimizer, and never copied with them.

    Attributes:
        weights: What forward passes on the latest batch saw of the weights.
        passes: What each forward pass on it was of.
        loader: The loader that issues them, or None if it is gone.
        when_issued: Called at every issue.
        unsplit: No batch may come in parts, as other processes wait for every backward pass.
        warns_of_fewer: Fewer records than were drawn are warned of, not refused, as Opacus's own
            accountants are used to it.

    Args:
        drop_outs: Fewer records than were drawn may report, because the protocol covers that.
        random_record: A batch of no records comes with a random one (``rand_on_empty``).
    """

    warns_of_fewer: bool = False
    unsplit: bool = False

    def __init__(self, *, drop_outs: bool = False, random_record: bool = False) -> None:
        self.drop_outs, self.random_record = drop_outs, random_record
        self.latest: Part | None = None
        self.passes: list[Origin] = []
        self._earlier_passes = 0  # on other parts of the latest batch
        self.tensors, self.weights = YieldedTensors(), SameWeights()
        self.loader: Callable[[], DataLoader | None] = lambda: None
        self.when_issued: Callable[[], None] | None = None
        self._sum: Ticket | None = None  # what is summed, and not released
        renew_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def renew(self) -> None:
        """In a process that was just forked: the batch is its parent's, who may step on it, too."""
        self.issue(None)

    def issue(self, part: Part | None, batch: Any = None) -> None:
        """Gives out the ticket of a batch that is being yielded; None is a batch that no step may take."""
        if part is None or self.latest is None or part.ticket is not self.latest.ticket:
            self.weights.forget()
            self.passes.clear()
        self._earlier_passes = len(self.passes)
        self.latest = part
        self.tensors.remember(batch, part)
        if self.when_issued is not None:
            self.when_issued()

    def fresh(self) -> Part:
        """The part that the next step may take.

        Raises:
            ValueError: If there is none.
        """
        part = self.latest
        if part is None:
            raise ValueError(
                "optimizer.step() has no fresh batch: none was drawn from the data loader of "
                "make_private, or since then a "
                f"checkpoint was loaded or the process forked; {REMEDY}"
            )
        if part.ticket.released or part.index in part.ticket.summed:
            raise ValueError(
                "optimizer.step() has no fresh batch: the last batch of the data loader has been "
                "stepped on already; " + REMEDY
            )
        return part

    def abandoned(self) -> bool:
        """Whether what is summed belongs to another batch than the next step: it was left before its end."""
        return self._sum is not None and self._sum is not self.fresh().ticket

    def check(self, rows: Set[int], *, more: bool = False) -> None:
        """Refuses a step that does not take what its part holds.

        Args:
            rows: Numbers of records that parameters have gradients of; empty where they cannot be
                counted.
            more: The rest of the part comes with a later step.

        Raises:
            ValueError: If the part is not fresh, or the numbers differ.
        """
        part = self.fresh()
        if self.unsplit and part.ticket.parts > 1:
            raise ValueError(
                f"this batch comes in {part.ticket.parts} parts, and DistributedDataParallel waits "
                "in every backward pass for "
                "ranks whose batches may come in fewer: wrap the network in Opacus's "
                "DifferentiallyPrivateDistributedDataParallel, or leave out BatchMemoryManager"
            )
        expected = part.waiting
        if more and part.is_last and (not rows or max(rows) >= expected):
            raise ValueError(
                "signal_skip_step would add this whole batch to the next one, where a record may "
                "be in both: step once on each "
                "batch, and split large ones with BatchMemoryManager"
            )
        if not rows or rows == {expected} or (self.random_record and expected == 0 and rows == {1}):
            return
        # Opacus adds the rows of several passes, where fewer rows are not fewer records.
        one_pass = len(self.passes) - self._earlier_passes <= 1
        if len(rows) == 1 and max(rows) < expected and (more or (self.drop_outs and one_pass)):
            return
        counts = " and ".join(map(str, sorted(rows)))
        if len(rows) == 1 and max(rows) < expected and self.warns_of_fewer:
            warnings.warn(
                f"optimizer.step() got gradients of {counts} records, this batch has {expected}: "
                "unless others were left out, "
                "these are no records (is batch_first right?), and no ε is meant for what is "
                "released",
                stacklevel=2,
            )
            return
        raise ValueError(
            f"optimizer.step() got gradients of {counts} records, this batch has {expected}: each "
            "of its records must have one "
            "gradient, clipped as a whole; pass the batch as the loader yields it, and let no "
            "layer turn one record into "
            "several (or several into one) along the batch axis"
        )

    def take(self, rows: Set[int], *, more: bool = False) -> None:
        """Notes that a step has summed its part; see :meth:`check`, which it repeats."""
        self.check(rows, more=more)
        part = self.fresh()
        self._sum = part.ticket
        part.waiting -= max(rows, default=part.waiting) if more else part.waiting
        if part.waiting == 0:
            part.ticket.summed.add(part.index)

    def ends(self) -> bool:
        """Whether the part that was taken is the last one of its batch."""
        part = self.latest
        return part is not None and part.waiting == 0 and part.is_last

    def check_release(self) -> None:
        """Refuses to release what is no whole batch.

        Raises:
            ValueError: If nothing was summed, or a part was not.
        """
        ticket = self._sum
        if ticket is None:
            raise ValueError(
                "there is no batch to release: call loss.backward() and optimizer.step() for each; "
                + REMEDY
            )
        if len(ticket.summed) != ticket.parts:
            raise ValueError(
                f"{len(ticket.summed)} of the {ticket.parts} physical batches of this batch were "
                "summed, so its step is not "
                "released: call optimizer.step() for each, and where one fails, leave the loop; "
                "the next batch trains as usual"
            )

    def release(self) -> None:
        """Notes that the batch is released: no step may take anything of it any more."""
        if self._sum is not None:
            self._sum.released, self._sum = True, None

    def void(self) -> None:
        """Notes that what was summed has been thrown away; a batch of a single part may be tried again."""
        if self._sum is not None and not self._sum.released:
            self._sum.summed.clear()
        self._sum = None
        if self.latest is not None and not self.latest.ticket.released:
            self.latest.ticket.summed.discard(self.latest.index)
            self.latest.waiting = self.latest.records


class YieldedTensors:
    """The memory of the tensors of batches, by weak references, and their tickets; copies elsewhere are not known.

    >>> yielded, first, second = YieldedTensors(), torch.zeros(3), torch.zeros(3)
    >>> yielded.remember([first], "first")
    >>> yielded.remember([second], "second")
    >>> yielded.is_stale(first[:2], "second"), yielded.is_stale(second, "second")
    (True, False)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._kept = 0

    def remember(self, batch: Any, ticket: Any) -> None:
        """Note a batch's tensors; what is gone is forgotten now and then."""
        if len(self._known) > 2 * self._kept + 16:
            self._known = {
                key: memory for key, memory in self._known.items() if not memory[0].expired()
            }
            self._kept = len(self._known)
        for storage in _storages(batch):
            self._known[storage._cdata] = StorageWeakRef(storage), ticket  # type: ignore[no-untyped-call]

    def is_stale(self, inputs: Any, latest: Any) -> bool:
        """Whether any of these tensors came with another ticket than the latest."""
        known = [self._known.get(storage._cdata) for storage in _storages(inputs)]
        return any(
            each is not None and each[1] is not latest and not each[0].expired() for each in known
        )


def _storages(batch: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        try:
            yield batch.untyped_storage()
        except (
            RuntimeError,
            NotImplementedError,
        ):  # sparse ones, and those inside of functorch, have none
            return
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _storages(each)
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _storages(each)
