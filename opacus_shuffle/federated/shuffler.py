"""``Shuffler``: receives the reports of a round, and releases the whole round mixed, or nothing.

It is the trusted party of the shuffle model: it alone sees who sent which report. It must not work
with the server, and must forget whose report was whose. Clients submit their reports. The server
opens and closes rounds, and gets the output of the format's ``mix``. In a simulation the shuffler
runs in the server's process; :mod:`opacus_shuffle.federated.shuffler_service` runs it in a process
of its own, behind HTTP.

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
"""Events of rounds, one JSON object per line; never who sent what or when."""


class RefusedReportError(ValueError):
    """A report is refused: malformed, of another round, or the sender's second one.

    Attributes:
        reason: A short reason, by which a service counts refusals.
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class UnknownRoundError(ValueError):
    """The shuffler has no reports of the requested round."""


class ReleasedRound(NamedTuple):
    """The output of one round for the server.

    Attributes:
        round: The number of the round.
        num_reports: The number of clients that reported; 0 if the round was dropped.
        mixed: The mixed reports.
    """

    round: int
    num_reports: int
    mixed: bytes

    @property
    def dropped(self) -> bool:
        """Whether the round was dropped because too few or too many clients reported."""
        return self.num_reports == 0


@runtime_checkable
class ShufflerInterface(Protocol):
    """The methods of a shuffler that a server uses, or another shuffler of its shards."""

    simulated: bool
    predictable: tuple[str, ...]

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Opens a round for reports in the format of this fingerprint."""

    def close_round(self, number: int) -> ReleasedRound:
        """Closes a round, and returns its mixed reports."""

    def forget_round(self, number: int) -> None:
        """Destroys the stored output of a round."""


class Shuffler:
    """Receives one report from each sender in a round, and releases the round mixed.

    Args:
        format: The format of the reports.
        generator: Mixes the reports, on the CPU; by default keyed by the operating system.
        shards: Other shufflers, each of which receives the reports of some of the clients. Their
            rounds are opened and closed together with this shuffler's, and their reports are mixed
            with its own.
        is_shard: Whether this shuffler is a shard. A shard forwards all its reports, even fewer
            than ``min_reports``: to another shuffler, never to a server.

    Formal Guarantees:
        The output of :meth:`close_round` depends on the reports as a multiset, not on who sent
        which report or when. When a round is closed, the shuffler forgets who reported. A round
        with fewer reports than the format requires is never released, so an adversary who keeps
        clients away cannot reduce the noise below what is accounted. A closed round is returned
        again, unchanged, until :meth:`forget_round`, so a server that was killed can repeat its
        request. With ``shards`` all of this holds for them together, if each is trusted as a
        shuffler is. A single shard does not enforce ``min_reports``.
    """

    simulated = True
    """Whether it runs in the server's process."""
    takes_shares = False
    """Whether it receives secret shares of reports instead of whole reports."""

    def __init__(
        self,
        format: ReportFormat,
        generator: torch.Generator | None = None,
        *,
        shards: Sequence[ShufflerInterface] = (),
        is_shard: bool = False,
    ) -> None:
        self.format = instance_of("format", format, (ReportFormat,))
        if format.shares > 1 and not self.takes_shares:
            raise ValueError(
                f"format splits each report into {format.shares} shares, each for an Aggregator: a "
                "Shuffler takes whole reports"
            )
        self.shards = [instance_of("each of shards", each, (ShufflerInterface,)) for each in shards]
        if len({getattr(each, "url", id(each)) for each in self.shards}) < len(self.shards):
            raise ValueError(
                "shards must be different shufflers, each once: reports would count twice"
            )
        self.is_shard = is_shard
        self.min_reports = 1 if is_shard else format.min_reports
        check_generator("generator", generator)
        self._generator = SecretGenerator() if generator is None else generator
        self.predictable = () if is_secret(self._generator) else ("the generator of the shuffler",)
        self._lock = threading.Lock()
        self._open: int | None = None
        self._last = -1
        self._digests: dict[str, bytes] = {}  # by sender, of its report
        self._reports: list[Any] = []  # in the form that the format stores
        self._closed: ReleasedRound | None = None

    def open_round(self, number: int, fingerprint: bytes | None = None) -> None:
        """Opens a round for reports, and destroys the reports of a round that is still open.

        Args:
            number: The round.
            fingerprint: The fingerprint of the server's format; None skips the comparison.

        Raises:
            ValueError: If the number is not larger than all earlier ones, or the server uses other
                settings.
        """
        if fingerprint is not None:
            self.format.check_fingerprint("the server", fingerprint)
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        for shard in self.shards:  # Opening the same round twice has no effect.
            shard.open_round(round_, self.format.fingerprint)
        with self._lock:
            if round_ == self._open:
                return  # The server repeats its request after a restart.
            if round_ <= self._last:
                raise ValueError(
                    f"round {round_} is not after round {self._last}: each round is opened once; "
                    "check that the server uses its latest book"
                )
            self._open = self._last = round_
            self._digests, self._reports, self._closed = {}, [], None

    def submit(self, sender: str, report: bytes) -> None:
        """Receives one sender's report for the open round; the same report again has no effect.

        Args:
            sender: The name of the sender; equal strings are one sender.
            report: The output of the sender's ``encode``.

        Raises:
            ValueError: If ``sender`` is not a string.
            RefusedReportError: If the report is malformed or of another round, or its sender has
                sent another report.
        """
        # A subclass of str may override comparison.
        if type(sender) is not str:
            raise ValueError(
                f"sender must be a str, got {reprlib.repr(sender)} ({type(sender).__name__}): pass "
                "the same string in every round"
            )
        try:
            round_, numbers = self.format.open(report)
        except ValueError as error:
            raise RefusedReportError(str(error)) from None
        digest = hashlib.sha256(report).digest()
        with self._lock:
            if round_ != self._open:
                raise RefusedReportError(
                    f"report is for round {round_}, but the open round is {self._open}",
                    "another round",
                )
            earlier = self._digests.get(sender)
            if earlier == digest:
                return
            if earlier is not None:
                raise RefusedReportError(
                    f"this sender already sent a report for round {round_}; the first one counts",
                    "second report",
                )
            if len(self._digests) >= self.format.num_users:
                raise RefusedReportError(
                    f"round {round_} already has all {self.format.num_users} reports",
                    "too many reports",
                )
            self.format.keep(self._reports, numbers)
            self._digests[sender] = digest

    def waiting(self) -> int:
        """Returns the number of reports of the open round."""
        with self._lock:
            return len(self._digests)

    def close_round(self, number: int) -> ReleasedRound:
        """Closes a round and mixes its reports; destroys them if they are too few or too many.

        There are more than ``num_users`` reports if a client is registered with two shards.

        Returns:
            The output for the server; a repeated call returns the same.

        Raises:
            UnknownRoundError: If the round is neither open nor the last one that was closed.
        """
        from_shards = [] if self._is_closed(number) else self._close_shards(number)
        with self._lock:
            if self._closed is not None and self._is_closed(number):
                return self._closed
            self._check_open(number)
            reports = len(self._digests) + sum(each.num_reports for each in from_shards)
            too_many = reports > self.format.num_users
            if too_many:  # An error instead would leave an accounted round open forever.
                log.error(
                    json.dumps(
                        {
                            "event": "dropped: a client is registered with two shards",
                            "round": number,
                            "reports": reports,
                            "num_users": self.format.num_users,
                        }
                    )
                )
            # A copy, because merging may fail halfway and the server may then repeat its request.
            stored = copy.deepcopy(self._reports)
            for each in from_shards:
                self.format.merge(stored, each.mixed, each.num_reports)
            return self._release(number, 0 if too_many else reports, stored)

    def _release(self, number: int, reports: int, stored: list[Any]) -> ReleasedRound:
        """Mixes the stored reports unless they are too few, and destroys them."""
        released = ReleasedRound(number, 0, b"")
        if reports >= self.min_reports:
            released = ReleasedRound(number, reports, self.format.mix(stored, self._generator))
        self._open, self._digests, self._reports, self._closed = None, {}, [], released
        return released

    def _check_open(self, number: int) -> None:
        if self._open is None or self._open != number:
            raise UnknownRoundError(f"round {number} is not open; the open round is {self._open}")

    def _is_closed(self, number: int) -> bool:
        """Whether this round was closed last, and its output is still stored."""
        return self._closed is not None and self._closed.round == number

    def _close_shards(self, number: int) -> list[ReleasedRound]:
        """Closes a round at all shards, and returns the output of those with reports.

        A shard that was restarted has lost its reports, and does not know the round.
        """
        closed = []
        for shard in self.shards:
            with contextlib.suppress(UnknownRoundError):
                closed.append(shard.close_round(number))
        return [each for each in closed if not each.dropped]

    def forget_round(self, number: int) -> None:
        """Destroys the stored output of a round."""
        for shard in self.shards:
            shard.forget_round(number)
        with self._lock:
            if self._is_closed(number):
                self._closed = None
