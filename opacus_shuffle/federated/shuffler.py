"""``Shuffler``: it alone sees who sent what, and releases a whole round, mixed, or nothing.

It is the party that the shuffle model trusts: not to work with the server, and to forget what it
has mixed. Clients give it their reports; the server opens a round, closes it, and gets what the
format's ``mix`` makes of it. In a simulation it lives in the same process;
:mod:`opacus_shuffle.federated.shuffler_service` puts it into one of its own, behind a network
interface.

>>> from opacus_shuffle.federated.report_formats import GaussianReports
>>> reports = GaussianReports(dimension=2, max_norm=1.0, noise_multiplier=1.0, num_users=3)
>>> shuffler = Shuffler(reports)
>>> shuffler.open_round(1)
>>> for sender in ("Ada", "Blaise", "Carl"):
...     shuffler.submit(sender, reports.encode(1, torch.zeros(2)))
>>> released = shuffler.close_round(1)
>>> released.num_reports, len(released.mixed) == 3 * reports.bytes_per_report
(3, True)
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import reprlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from opacus_shuffle.core.randomness import SecretGenerator, check_generator, is_secret
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.federated.report_formats import LARGEST_ROUND, ReportFormat

log = logging.getLogger("opacus_shuffle.shuffler")
"""What happened to rounds, a line of JSON each: never who sent what, nor when."""


class RefusedReportError(ValueError):
    """The report is refused: malformed, late, early, or a sender's second one.

    Attributes:
        reason: A word for that, by which a service counts them.
    """

    def __init__(self, said: str, reason: str = "malformed") -> None:
        super().__init__(said)
        self.reason = reason


class UnknownRoundError(ValueError):
    """The shuffler has no reports of this round."""


class Released(NamedTuple):
    """What the server gets of one round.

    Attributes:
        round: Which one.
        num_reports: How many clients reported, or 0 if they were too few to release, or more than
            there are.
        mixed: What mixing made of their reports.
    """

    round: int
    num_reports: int
    mixed: bytes

    @property
    def dropped(self) -> bool:
        """Whether the round was dropped because too few or too many had reported."""
        return self.num_reports == 0


@runtime_checkable
class RoundsOfAShuffler(Protocol):
    """The part of a shuffler's interface that a server uses, or a shuffler of its parts."""

    simulated: bool
    predictable: tuple[str, ...]

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Opens a round for reports in the format of this fingerprint."""

    def close_round(self, number: int) -> Released:
        """Closes a round, and returns its mixed reports."""

    def forget_round(self, number: int) -> None:
        """Destroys what was handed over of a round."""


class Shuffler:
    """Takes one report from each sender in a round, and releases the round mixed.

    Args:
        format: What reports look like.
        generator: What mixes them, on the CPU; by default the operating system's own.
        parts: Other shufflers, to whom the rest of the clients report. Their rounds are opened and
            closed with this one's, and what they hold is mixed with what this one holds.
        is_part: Whether this is one of those. Then it hands over whatever it has, be it from few
            clients: to another shuffler, never to a server.

    Formal Guarantees:
        What :meth:`close_round` returns depends on reports as a multiset, not on who sent which, or
        when. Who reported is forgotten when a round is closed. A round of fewer reports than the
        format asks for is never released: nobody who keeps clients away makes the noise of the
        others less than what is accounted. A closed round is handed over again, unchanged, until
        :meth:`forget_round`, so that a server that was killed can ask once more. With ``parts`` all
        this is true of them together, if each of them is trusted as a shuffler is. A part by itself
        guards no smallest number.
    """

    simulated = True
    """It is in the server's own process."""
    takes_shares = False
    """What it gets of a report is the whole."""

    def __init__(
        self,
        format: ReportFormat,
        generator: torch.Generator | None = None,
        *,
        parts: Sequence[RoundsOfAShuffler] = (),
        is_part: bool = False,
    ) -> None:
        self.format = instance_of("format", format, (ReportFormat,))
        if format.shares > 1 and not self.takes_shares:
            raise ValueError(
                f"format splits each report into {format.shares} shares, each for an Aggregator of "
                "its own, which has no parts and is none: a Shuffler takes whole reports"
            )
        self.parts = [instance_of("each of parts", part, (RoundsOfAShuffler,)) for part in parts]
        if len({getattr(part, "url", id(part)) for part in self.parts}) < len(self.parts):
            raise ValueError(
                "parts must be other shufflers, each once: its reports would count twice"
            )
        self.is_part = is_part
        self.min_reports = 1 if is_part else format.min_reports
        check_generator("generator", generator)
        self._generator = SecretGenerator() if generator is None else generator
        self.predictable = () if is_secret(self._generator) else ("the generator of the shuffler",)
        self._lock = threading.Lock()
        self._open: int | None = None
        self._last = -1
        self._digests: dict[str, bytes] = {}  # of each sender's report
        self._held: list[Any] = []  # what the format keeps of them
        self._closed: Released | None = None

    def open_round(self, number: int, fingerprint: bytes | None = None) -> None:
        """Opens a round for reports; reports of a round that was left open are destroyed.

        Args:
            number: The round.
            fingerprint: Of the server's format; None where it is the shuffler's own.

        Raises:
            ValueError: If the round is not after all those before it, or the server goes by other
                settings.
        """
        if fingerprint is not None:
            self.format.check_fingerprint("the server", fingerprint)
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        for part in self.parts:  # the same again changes nothing
            part.open_round(round_, self.format.fingerprint)
        with self._lock:
            if round_ == self._open:
                return  # the server asks again, after it was killed
            if round_ <= self._last:
                raise ValueError(
                    f"round {round_} is not after round {self._last}, and none is taken twice: is "
                    "the server's book the newest?"
                )
            self._open = self._last = round_
            self._digests, self._held, self._closed = {}, [], None

    def submit(self, sender: str, report: bytes) -> None:
        """Takes one sender's report of the open round; the same report again changes nothing.

        Args:
            sender: Who sent it, as text: equal texts are one sender.
            report: What the sender's ``encode`` returned.

        Raises:
            ValueError: If ``sender`` is anything else.
            RefusedReportError: If it is malformed or of another round, or its sender has sent
                another one.
        """
        # A derived class of str may compare in another way.
        if type(sender) is not str:
            raise ValueError(
                f"sender must be a str, got {reprlib.repr(sender)} ({type(sender).__name__}): pass "
                "a name or number as text, the same text each time"
            )
        try:
            round_, numbers = self.format.open(report)
        except ValueError as error:
            raise RefusedReportError(str(error)) from None
        digest = hashlib.sha256(report).digest()
        with self._lock:
            if round_ != self._open:
                raise RefusedReportError(
                    f"report is of round {round_}, the open one is {self._open}: it is not taken",
                    "of another round",
                )
            known = self._digests.get(sender)
            if known == digest:
                return
            if known is not None:
                raise RefusedReportError(
                    f"a report of round {round_} came from this sender already: that stays",
                    "a second one",
                )
            if len(self._digests) >= self.format.num_users:
                raise RefusedReportError(
                    f"round {round_} has all of its {self.format.num_users} reports",
                    "one too many",
                )
            self.format.keep(self._held, numbers)
            self._digests[sender] = digest

    def waiting(self) -> int:
        """Returns how many reports the open round has."""
        with self._lock:
            return len(self._digests)

    def close_round(self, number: int) -> Released:
        """Closes a round and mixes its reports; too few or too many reports are destroyed.

        More than ``num_users`` come where parts have a client twice.

        Returns:
            What the server may see. The same again if it asks again.

        Raises:
            UnknownRoundError: If this round is neither open nor the one that was closed last.
        """
        from_parts = [] if self._is_closed(number) else self._close_parts(number)
        with self._lock:
            if self._closed is not None and self._is_closed(number):
                return self._closed
            self._check_open(number)
            reports = len(self._digests) + sum(part.num_reports for part in from_parts)
            too_many = reports > self.format.num_users
            if too_many:  # else a round that is accounted could never end
                log.error(
                    json.dumps(
                        {
                            "event": "dropped: clients must be with one shuffler each",
                            "round": number,
                            "reports": reports,
                            "num_users": self.format.num_users,
                        }
                    )
                )
            # A copy, as this may fail halfway, and the server asks again.
            held = copy.deepcopy(self._held)
            for part in from_parts:
                self.format.merge(held, part.mixed, part.num_reports)
            return self._release(number, 0 if too_many else reports, held)

    def _release(self, number: int, reports: int, held: list[Any]) -> Released:
        """Mixes what is held, unless it is of too few reports, and destroys all else."""
        released = Released(number, 0, b"")
        if reports >= self.min_reports:
            released = Released(number, reports, self.format.mix(held, self._generator))
        self._open, self._digests, self._held, self._closed = None, {}, [], released
        return released

    def _check_open(self, number: int) -> None:
        if self._open is None or self._open != number:
            raise UnknownRoundError(f"round {number} is not open: the open one is {self._open}")

    def _is_closed(self, number: int) -> bool:
        """Tells whether a round is the one that was closed last, and is still there."""
        return self._closed is not None and self._closed.round == number

    def _close_parts(self, number: int) -> list[Released]:
        """Closes a round of all parts that have it and reports of it.

        One that was started anew has lost its reports.
        """
        closed = []
        for part in self.parts:
            with contextlib.suppress(UnknownRoundError):
                closed.append(part.close_round(number))
        return [part for part in closed if not part.dropped]

    def forget_round(self, number: int) -> None:
        """Destroys what was handed over of a round."""
        for part in self.parts:
            part.forget_round(number)
        with self._lock:
            if self._is_closed(number):
                self._closed = None
