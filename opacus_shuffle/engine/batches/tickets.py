"""Tickets, one for each batch of the loader; a step without one is refused.

A step takes the ticket of the batch that the loader yielded last, and no later step can take it
again. A batch that is split into physical batches has one ticket, and each physical batch is summed
once, in order. Batches without a ticket (of another loader, or cached) are refused before anything
is released. A batch without a step is void when the next one is drawn. If batch sizes are secret,
the reports say so.

>>> tickets = TicketBook()
>>> tickets.issue(Ticket((3,)))
>>> tickets.check({3})
>>> tickets.take()
>>> tickets.check({3})  # doctest: +ELLIPSIS
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
    "the next one is drawn (for Lightning, accelerate and transformers' Trainer, use "
    "opacus_shuffle.integrations)"
)


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass over a loader.

    Attributes:
        has_gradients: Whether there was a backward pass on any of its batches.
        stepped_on: Whether a step has summed any of its batches.
        end: ``"left"`` if the loop was left early, ``"all"`` after all batches; empty while the
            pass goes on.
        issued: How many of its batches have been yielded.
    """

    issued: int = 0
    has_gradients: bool = False
    stepped_on: bool = False
    end: Literal["", "left", "all"] = ""


@dataclasses.dataclass(eq=False)
class Ticket:
    """The ticket of one drawn batch, which may be split into several physical batches.

    Attributes:
        sizes: How many records each of its physical batches has.
        epoch: The pass over the loader that has drawn it.
        yielded: How many of the physical batches the loader has yielded.
        summed: How many of the physical batches were clipped and summed.
        released: Whether the noised sum has moved the weights.
        has_gradients: Whether there was a backward pass on it.
    """

    sizes: tuple[int, ...]
    epoch: Pass = dataclasses.field(default_factory=Pass)
    yielded: int = 0
    summed: int = 0
    released: bool = False
    has_gradients: bool = False

    @property
    def size(self) -> int:
        """The number of records of the physical batch that was yielded last."""
        return self.sizes[self.yielded - 1]


class TicketBook:
    """The tickets of one ``make_private``, shared by its loader and its optimizer.

    Attributes:
        latest: The ticket of the batch that was yielded last; None if no step may follow.
        issues: How often a ticket was issued, once for each physical batch.
        forward_passes: How often the network has run on it.
        weights: The parameters that the optimizer trains.
        versions: Their versions when the network first saw the latest batch; empty before.
        loader: The loader that issues them, or None if it is gone.
        when_issued: Called at every issue.
        unsplit: Batches must not be split, because other processes wait for every backward pass.

    Args:
        drop_outs: Fewer records than were drawn may report, because the protocol covers that.
        random_record: A batch of no records comes with a random one (``rand_on_empty``).
        warns_of_fewer: Missing records cause a warning and no error. Opacus's own accountants
            allow them.
    """

    unsplit: bool = False

    def __init__(
        self,
        *,
        drop_outs: bool = False,
        random_record: bool = False,
        warns_of_fewer: bool = False,
    ) -> None:
        self.drop_outs, self.random_record = drop_outs, random_record
        self.warns_of_fewer = warns_of_fewer
        self.latest: Ticket | None = None
        self.issues = self.forward_passes = 0
        self.weights: Sequence[torch.Tensor] = ()
        self.versions: list[int] = []
        self.loader: Callable[[], DataLoader | None] = lambda: None
        self.when_issued: Callable[[], None] = lambda: None
        self._summed: Ticket | None = None  # of the batch that is summed and not released
        self._drawn: Counter[Pass] = Counter()  # how many batches, since the latest release
        self._yielded: dict[int, tuple[Any, int]] = {}  # tensors' memory, with the issue
        renew_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def renew(self) -> None:
        """Forgets the batch in a process that was just forked, as its parent may step on it."""
        if self.latest is not None:
            self.latest.released = True  # its other physical batches are the parent's, too
        self._summed, self._drawn = None, Counter()
        self.issue(None)

    def issue(self, ticket: Ticket | None, content: Any = None) -> None:
        """Issues the ticket of a physical batch that is being yielded, with this content."""
        if ticket is not self.latest:
            self.versions.clear()
        if ticket is not None:
            if not ticket.yielded:
                self._drawn.update([ticket.epoch])
                ticket.epoch.issued += 1
            ticket.yielded += 1
        self.forward_passes, self.latest = 0, ticket
        self.issues += 1
        # Tensors are identified by their memory, which a view of a batch shares, and a copy not.
        self._yielded = {
            key: entry for key, entry in self._yielded.items() if not entry[0].expired()
        }
        for storage in _storages(content):
            self._yielded[storage._cdata] = StorageWeakRef(storage), self.issues  # type: ignore[no-untyped-call]
        self.when_issued()

    def note_versions(self) -> None:
        """Notes the versions of the weights that the first forward pass on a batch uses.

        Clipping bounds what one record adds to the sum at fixed weights. If a gradient moves them
        in the middle of a batch, as in sharpness-aware minimisation, one record influences the
        gradients of all others: in an experiment one record moved the sum by three clipping norms.
        """
        if not self.versions:
            self.versions = [weight._version for weight in self.weights]

    def changed_weights(self) -> list[torch.Tensor]:
        """Returns the parameters that were written to since; writes to ``.data`` are not seen."""
        seen = zip(self.weights, self.versions, strict=False)
        return [weight for weight, version in seen if weight._version != version]

    def changed_without_step(self) -> list[torch.Tensor]:
        """Returns the parameters that changed after a backward pass without a step."""
        ticket = self.latest
        if ticket is None or ticket.released or ticket.summed or not ticket.has_gradients:
            return []
        return self.changed_weights()

    def is_stale(self, inputs: Any) -> bool:
        """Returns whether any of these tensors belongs to an earlier batch."""
        entries = [self._yielded.get(storage._cdata) for storage in _storages(inputs)]
        return any(
            entry is not None and entry[1] != self.issues and not entry[0].expired()
            for entry in entries
        )

    def fresh(self) -> Ticket:
        """Returns the ticket of the physical batch that the next step may take.

        Raises:
            ValueError: If there is none.
        """
        ticket = self.latest
        if ticket is None:
            raise ValueError(
                "optimizer.step() has no fresh batch: none was drawn from the data loader of "
                "make_private, or since then a checkpoint was loaded or the process forked; "
                + REMEDY
            )
        if ticket.released or ticket.yielded <= ticket.summed:
            raise ValueError(
                "optimizer.step() has no fresh batch: the last batch of the data loader has been "
                "stepped on already; " + REMEDY
            )
        if ticket.yielded > ticket.summed + 1:
            raise ValueError(
                "not all physical batches before this one were summed, so the whole batch is not "
                "released: call optimizer.step() for each, and if one fails, leave the loop; the "
                "next batch trains as usual"
            )
        return ticket

    def abandoned(self) -> bool:
        """Returns whether the sum is of a batch that was left before its end."""
        return self._summed is not None and self._summed is not self.fresh()

    def check(self, counts: Set[int]) -> None:
        """Refuses a step that does not take all records of the physical batch.

        Args:
            counts: Numbers of records that parameters have gradients of; empty if they cannot be
                counted.

        Raises:
            ValueError: If the batch is not fresh, or the numbers differ.
        """
        ticket = self.fresh()
        if self.unsplit and len(ticket.sizes) > 1:
            raise ValueError(
                "this batch is split into several physical batches, and DistributedDataParallel "
                "waits in every backward pass for ranks whose batches may have fewer: wrap the "
                "network in Opacus's DifferentiallyPrivateDistributedDataParallel, or leave out "
                "BatchMemoryManager"
            )
        random_one = self.random_record and ticket.size == 0 and counts == {1}
        if not counts or counts == {ticket.size} or random_one:
            return
        fewer = len(counts) == 1 and max(counts) < ticket.size
        # Opacus adds the rows of several passes, after which fewer rows are not fewer records.
        if fewer and self.drop_outs and self.forward_passes == 1:
            return
        if not (fewer and self.warns_of_fewer):
            raise ValueError(
                "optimizer.step() got gradients of a different number of records than this batch: "
                "each of its records must have one gradient, clipped as a whole; pass the batch as "
                "the loader that make_private returned yields it, and let no layer turn one record "
                "into several (or several into one) along the batch axis"
            )
        warnings.warn(
            "optimizer.step() got gradients of fewer records than this batch has: unless some were "
            "left out, the rows are not records (is batch_first right?), and no ε covers what is "
            "released",
            stacklevel=2,
        )

    def take(self) -> None:
        """Notes that a step has summed the latest physical batch."""
        ticket = self.fresh()
        ticket.summed += 1
        self._summed, ticket.epoch.stepped_on = ticket, True

    def end_pass(self) -> None:
        """Notes that a pass has gone through all of its batches.

        Warns:
            PrivacyAssumptionWarning: It had backward passes, and no step.
        """
        epoch = Pass() if self.latest is None else self.latest.epoch
        epoch.end = "all"
        if epoch.has_gradients and not epoch.stepped_on:
            warnings.warn(
                "a pass over the data loader had backward passes, and no optimizer.step(): no "
                "epsilon covers weights that are updated by hand, or gradients used otherwise",
                PrivacyAssumptionWarning,
                stacklevel=3,
            )

    def passes_with_skips(self, *, at_step: bool = True) -> list[Pass]:
        """Returns the passes with batches that were skipped since the latest release.

        A whole pass without any step, such as an evaluation, does not count.

        Args:
            at_step: Whether the latest batch is about to be released. If not, it counts as skipped,
                too, if its pass has ended.
        """
        now = None if self.latest is None else self.latest.epoch
        return [
            epoch
            for epoch, drawn in self._drawn.items()
            if drawn > (epoch is now and (at_step or not epoch.end))
            and (epoch.stepped_on or epoch.end != "all")
        ]

    def is_complete(self) -> bool:
        """Returns whether all physical batches of the latest batch are in the sum."""
        return self._summed is not None and self._summed.summed == len(self._summed.sizes)

    def release(self) -> None:
        """Notes that the batch was released, so that no step may take it again."""
        if self._summed is not None:
            self._summed.released, self._summed = True, None
            self._drawn.clear()

    def void(self) -> None:
        """Notes that the sum was discarded; a batch that was not split may be tried again."""
        if self._summed is not None:
            self._summed.summed = 0
        self._summed = None


def _storages(batch: Any) -> Iterator[torch.UntypedStorage]:
    """Yields the memory of all tensors of a batch."""
    for tensor in results(batch):
        try:
            yield tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            continue  # sparse tensors, and those inside of functorch, have none
