"""Tickets, one for each batch of the loader: a step without one is refused.

A step takes the ticket of the batch that was yielded last, and leaves it spent; a batch that is
split into physical ones has one ticket with several parts, each of which is taken once. What has no
ticket (a batch of another loader, a cached one, the same one again) is refused before anything of
it is released. A batch that nobody stepped on is void when the next one comes; where its size is a
secret, reports say so.

>>> book = TicketBook()
>>> [part] = parts_of(3)
>>> book.issue(part)
>>> book.take({3})
>>> book.take({3})  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
ValueError: optimizer.step() has no fresh batch: the last batch ... has been stepped on already; ...
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.core.randomness import renew_after_fork
from opacus_shuffle.networks.running import results

REMEDY = (
    "iterate over the data loader that make_private returned, and step once on each batch, before "
    "the next one is drawn"
)

Origin = Literal["records", "a leaf", "a network"]
"""What a forward pass was of: records, a tensor that asks for its gradient, a network's output."""


def origin_of(inputs: Any) -> Origin:
    """Tells whether the inputs of a forward pass are records, a leaf or a network's output."""
    asked = [tensor for tensor in results(inputs) if tensor.requires_grad]
    if not asked:
        return "records"
    return "a leaf" if all(tensor.is_leaf for tensor in asked) else "a network"


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass over a loader.

    Attributes:
        has_gradients: Whether there was a backward pass on any of its batches.
        stepped_on: Whether a step has summed any of its batches.
        end: ``"left"`` if the loop was left, ``"all"`` after all batches; empty while the pass
            goes on.
        issued: How many of its batches have been yielded.
    """

    issued: int = 0
    has_gradients: bool = False
    stepped_on: bool = False
    end: Literal["", "left", "all"] = ""


@dataclasses.dataclass(eq=False)
class Ticket:
    """The ticket of one drawn batch.

    Attributes:
        sizes: How many records each of its physical batches has.
        summed: Which of these were clipped and summed.
        epoch: The pass over the loader that has drawn it.
        released: Whether the noised sum has moved the weights.
        has_gradients: Whether there was a backward pass on it.
    """

    sizes: tuple[int, ...]
    epoch: Pass = dataclasses.field(default_factory=Pass)
    summed: set[int] = dataclasses.field(default_factory=set)
    released: bool = False
    has_gradients: bool = False


@dataclasses.dataclass(eq=False)
class Part:
    """One physical batch of a drawn one.

    Attributes:
        ticket: The batch that it is a part of.
        index: Which one, from 0.
        waiting: How many of its records no step has taken yet.
    """

    ticket: Ticket
    index: int
    waiting: int

    @property
    def is_last(self) -> bool:
        """Whether the batch ends with this part."""
        return self.index == len(self.ticket.sizes) - 1


def parts_of(*sizes: int, epoch: Pass | None = None) -> list[Part]:
    """Makes the ticket of a batch of an epoch, as physical batches of these sizes."""
    ticket = Ticket(sizes, epoch or Pass())
    return [Part(ticket, index, records) for index, records in enumerate(sizes)]


class TicketBook:
    """The tickets of one ``make_private``, which its loader and its optimizer share.

    Attributes:
        latest: The part that was yielded last; None where no step may follow.
        weights: The parameters that the optimizer trains.
        versions: Their versions when the network first saw the latest batch; empty before.
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
        self.weights: Sequence[torch.Tensor] = ()
        self.versions: list[int] = []
        self.loader: Callable[[], DataLoader | None] = lambda: None
        self.when_issued: Callable[[], None] = lambda: None
        self._earlier_passes = 0  # on other parts of the latest batch
        self._summed: Ticket | None = None  # what is summed, and not released
        self._drawn: Counter[Pass] = Counter()  # how many batches, since the latest release
        self._yielded: dict[int, tuple[Any, Part | None]] = {}
        renew_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def renew(self) -> None:
        """Forgets the batch in a process that was just forked, as its parent may step on it."""
        if self.latest is not None:
            self.latest.ticket.released = True  # its other physical batches are the parent's, too
        self._summed, self._drawn = None, Counter()
        self.issue(None)

    def issue(self, part: Part | None, batch: Any = None) -> None:
        """Gives out the ticket of a batch that is being yielded."""
        if part is None or self.latest is None or part.ticket is not self.latest.ticket:
            if part is not None:
                self._drawn.update([part.ticket.epoch])
                part.ticket.epoch.issued += 1
            self.versions.clear()
            self.passes.clear()
        self._earlier_passes, self.latest = len(self.passes), part
        # By their memory, which a view of a batch shares, and a copy does not.
        self._yielded = {
            key: known for key, known in self._yielded.items() if not known[0].expired()
        }
        for storage in _storages(batch):
            self._yielded[storage._cdata] = StorageWeakRef(storage), part  # type: ignore[no-untyped-call]
        self.when_issued()

    def see(self) -> None:
        """Notes the versions of the weights that the first forward pass on a batch sees.

        Clipping bounds what one record adds to the sum at fixed weights. If a gradient moves them
        in the middle of a batch, as in sharpness-aware minimisation, one record influences the
        gradients of all others: one was seen to move the sum by three clipping norms.
        """
        if not self.versions:
            self.versions = [weight._version for weight in self.weights]

    def changed_weights(self) -> list[torch.Tensor]:
        """Returns the parameters that were written to since; writes to ``.data`` are not seen."""
        seen = zip(self.weights, self.versions, strict=False)
        return [weight for weight, version in seen if weight._version != version]

    def changed_without_step(self) -> list[torch.Tensor]:
        """Returns the parameters that changed after a backward pass without a step."""
        ticket = None if self.latest is None else self.latest.ticket
        if ticket is None or ticket.released or ticket.summed or not ticket.has_gradients:
            return []
        return self.changed_weights()

    def is_stale(self, inputs: Any) -> bool:
        """Tells whether any of these tensors belongs to an earlier batch."""
        known = [self._yielded.get(storage._cdata) for storage in _storages(inputs)]
        return any(
            entry is not None and entry[1] is not self.latest and not entry[0].expired()
            for entry in known
        )

    def fresh(self) -> Part:
        """Returns the physical batch that the next step may take.

        Raises:
            ValueError: If there is none.
        """
        part = self.latest
        if part is None:
            raise ValueError(
                "optimizer.step() has no fresh batch: none was drawn from the data loader of "
                "make_private, or since then a checkpoint was loaded or the process forked; "
                + REMEDY
            )
        if part.ticket.released or part.index in part.ticket.summed:
            raise ValueError(
                "optimizer.step() has no fresh batch: the last batch of the data loader has been "
                "stepped on already; " + REMEDY
            )
        return part

    def abandoned(self) -> bool:
        """Tells whether the sum holds a batch that was left before its end."""
        return self._summed is not None and self._summed is not self.fresh().ticket

    def check(self, counts: Set[int], *, more: bool = False) -> None:
        """Refuses a step that does not take all records of the physical batch.

        Args:
            counts: Numbers of records that parameters have gradients of; empty where they cannot be
                counted.
            more: The rest of the part comes with a later step.

        Raises:
            ValueError: If the part is not fresh, or the numbers differ.
        """
        part = self.fresh()
        expected = part.waiting
        if self.unsplit and len(part.ticket.sizes) > 1:
            raise ValueError(
                "this batch comes in several parts, and DistributedDataParallel waits in every "
                "backward pass for ranks whose batches may come in fewer: wrap the network in "
                "Opacus's DifferentiallyPrivateDistributedDataParallel, or leave out "
                "BatchMemoryManager"
            )
        if more and part.is_last and (not counts or max(counts) >= expected):
            raise ValueError(
                "signal_skip_step would add this whole batch to the next one, where a record may "
                "be in both: step once on each batch, and split large ones with BatchMemoryManager"
            )
        random_one = self.random_record and expected == 0 and counts == {1}
        if not counts or counts == {expected} or random_one:
            return
        fewer = len(counts) == 1 and max(counts) < expected
        # Opacus adds the rows of several passes, where fewer rows are not fewer records.
        one_pass = len(self.passes) - self._earlier_passes == 1
        if fewer and not more and not (self.drop_outs and one_pass) and self.warns_of_fewer:
            warnings.warn(
                "optimizer.step() got gradients of fewer records than this batch has: unless some "
                "were left out, the rows are no records (is batch_first right?), and no ε covers "
                "what is released",
                stacklevel=2,
            )
        elif not (fewer and (more or (self.drop_outs and one_pass))):
            raise ValueError(
                "optimizer.step() got gradients of a different number of records than this batch: "
                "each of its records must have one gradient, clipped as a whole; pass the batch as "
                "the loader that make_private returned yields it, and let no layer turn one record "
                "into several (or several into one) along the batch axis"
            )

    def take(self, counts: Set[int], *, more: bool = False) -> None:
        """Checks as :meth:`check`, and notes that a step has summed the physical batch."""
        self.check(counts, more=more)
        part = self.fresh()
        self._summed, part.ticket.epoch.stepped_on = part.ticket, True
        part.waiting -= max(counts, default=part.waiting) if more else part.waiting
        if part.waiting == 0:
            part.ticket.summed.add(part.index)

    def end_pass(self) -> None:
        """Notes that a pass has gone through all of its batches.

        Warns:
            PrivacyAssumptionWarning: It had backward passes, and no step.
        """
        epoch = Pass() if self.latest is None else self.latest.ticket.epoch
        epoch.end = "all"
        if epoch.has_gradients and not epoch.stepped_on:
            warnings.warn(
                "a pass over the data loader had backward passes, and no optimizer.step(): no "
                "epsilon covers weights that are updated by hand, or gradients used otherwise",
                PrivacyAssumptionWarning,
                stacklevel=3,
            )

    def left_out(self, *, at_step: bool = True) -> list[Pass]:
        """Returns the passes with batches that were skipped since the latest release.

        A whole pass without any step, such as an evaluation, does not count.

        Args:
            at_step: Whether the latest batch is about to be released. If not, it counts as skipped,
                too, if its pass has ended.
        """
        now = None if self.latest is None else self.latest.ticket.epoch
        return [
            epoch
            for epoch, drawn in self._drawn.items()
            if drawn > (epoch is now and (at_step or not epoch.end))
            and (epoch.stepped_on or epoch.end != "all")
        ]

    def ends(self) -> bool:
        """Tells whether the batch has ended with the physical batch that was summed last."""
        return self.latest is not None and self.latest.waiting == 0 and self.latest.is_last

    def check_release(self) -> None:
        """Refuses to release a sum that is not one whole batch.

        Raises:
            ValueError: If nothing was summed, or a part was not.
        """
        if self._summed is None:
            raise ValueError(
                "there is no batch to release: call loss.backward() and optimizer.step() for each; "
                + REMEDY
            )
        if len(self._summed.summed) != len(self._summed.sizes):
            raise ValueError(
                "not all physical batches of this batch were summed, so its step "
                "is not released: call optimizer.step() for each, and where one fails, leave the "
                "loop; the next batch trains as usual"
            )

    def release(self) -> None:
        """Notes that the batch was released, so that no step may take it again."""
        if self._summed is not None:
            self._summed.released, self._summed = True, None
            self._drawn.clear()

    def void(self) -> None:
        """Notes that the sum was thrown away; its last physical batch may be tried again."""
        if self._summed is not None:
            self._summed.summed.clear()
        self._summed, part = None, self.latest
        if part is not None and not part.ticket.released:
            part.ticket.summed.discard(part.index)
            part.waiting = part.ticket.sizes[part.index]


def _storages(batch: Any) -> Iterator[torch.UntypedStorage]:
    """Yields the memory of all tensors of a batch."""
    for tensor in results(batch):
        try:
            yield tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            continue  # sparse tensors, and those inside of functorch, have none
