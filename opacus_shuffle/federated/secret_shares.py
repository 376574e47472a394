"""Sums without a shuffler: each of two or more aggregators gets a secret share of every report.

A client splits its counts into shares that add up to them modulo a power of two. All shares but one
are uniform numbers, whatever the counts are. An :class:`Aggregator` adds up one share of every
client, and an :class:`Aggregation` adds up the sums of the aggregators. The result is the sum of
the counts, and the server learns nothing else.

>>> reports = SharedSumReports(
...     dimension=3, max_norm=1.0, noise_multiplier=2.0, num_users=20, delta=1e-6
... )
>>> aggregation = Aggregation(reports, [Aggregator(reports), Aggregator(reports)])
>>> aggregation.open_round(1, reports.fingerprint)
>>> for client in range(20):
...     aggregation.submit(reports.encode(1, torch.ones(3)), sender=str(client))
>>> released = aggregation.close_round(1)
>>> released.num_reports, reports.estimate(released.mixed, 20).shape
(20, torch.Size([3]))
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import SecretGenerator, stream_of
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.federated.remote_shuffler import RemoteShuffler
from opacus_shuffle.federated.report_formats import LARGEST_ROUND, ShuffledSumReports
from opacus_shuffle.federated.reporter import ClientBook
from opacus_shuffle.federated.shuffler import ReleasedRound, Shuffler

TAG_BYTES = 16
"""The size of the random tag that the shares of one report have in common."""


class SharedSumReports(ShuffledSumReports):
    """Reports counts of bits in secret shares, for aggregators that do not collude.

    :meth:`encode` returns all shares of a report, one after another, and
    :meth:`Aggregation.submit` sends each aggregator its share. All shares together reveal the
    report.

    Args:
        shares: k, the number of aggregators, each of which gets a share of every report.
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: The noise of the **sum**, over C.
        num_users: n, all clients.
        sample_rate: γ, the probability that a client's vector is in its report.
        sampling: ``"poisson"`` or ``"random_allocation"``.
        delta: δ of the whole run. Binomial tails use a millionth of it.
        rounds: The rounds of the run, which share these tails.
        honest_fraction: The share of clients that certainly follow the protocol.
        min_reports: The smallest number of reports in a sum; by default all clients'.

    Formal Guarantees:
        The shares of k − 1 aggregators are uniform and independent of all data. The view of the
        server, k − 1 aggregators and all dishonest clients together can be simulated from the sum
        of the counts of at least ``min_reports`` clients, whatever they do. So ε is that of
        :class:`ShuffledSumReports` (Theorem 8.8). A dishonest client may add anything to the sum
        modulo M.
    """

    kind: ClassVar[str] = "shared_sum_reports"

    def __init__(
        self,
        *,
        shares: int = 2,
        dimension: int,
        max_norm: float,
        noise_multiplier: float,
        num_users: int,
        sample_rate: float = 1.0,
        sampling: str = "poisson",
        delta: float,
        rounds: int = 1,
        honest_fraction: float = 1.0,
        min_reports: int | None = None,
    ) -> None:
        self.shares = integer("shares", shares, minimum=2)
        super().__init__(
            dimension=dimension,
            max_norm=max_norm,
            noise_multiplier=noise_multiplier,
            num_users=num_users,
            sample_rate=sample_rate,
            sampling=sampling,
            delta=delta,
            rounds=rounds,
            honest_fraction=honest_fraction,
            min_reports=min_reports,
        )
        self.max_summands = self.num_users

    @property
    def modulus(self) -> int:
        """M, a power of two above every possible sum of counts, so a sum never wraps around."""
        return 256**self.count_type.itemsize

    @property
    def bytes_per_report(self) -> int:
        """The size in bytes of a share: its tag, and numbers modulo M."""
        return TAG_BYTES + super().bytes_per_report

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns all shares, each after the tag: uniform ones, and the counts minus their sum."""
        last = np.frombuffer(super().randomize(vector, generator), self.count_type)
        stream, shares = stream_of(generator), list[bytes]()
        tag = _random_bytes(stream, TAG_BYTES)
        for _ in range(self.shares - 1):
            uniform = _random_bytes(stream, last.nbytes)
            last = last - np.frombuffer(uniform, self.count_type)  # unsigned, so modulo M
            shares.append(tag + uniform)
        return b"".join([*shares, tag + last.tobytes()])

    def shares_of(self, report: bytes) -> list[bytes]:
        """Splits a report into the shares of the aggregators, in their order.

        Raises:
            ValueError: If its size is not that of an output of :meth:`encode`.
        """
        size, head = self.bytes_per_report, self.report_size - self.bytes_per_report
        whole = len(instance_of("report", report, (bytes,)))
        if whole != head + self.shares * size:
            raise ValueError(
                f"report must be all {self.shares} shares ({head + self.shares * size} bytes) as "
                f"returned by encode, got {whole} bytes"
            )
        starts = range(head, whole, size)
        return [report[:head] + report[start : start + size] for start in starts]

    def check_numbers(self, numbers: bytes) -> None:
        """Accepts all numbers, as every share is possible for an honest client."""

    def keep(self, stored: list[Any], numbers: bytes) -> None:
        """Stores a share; the server chooses later which shares are in the sum."""
        stored.append(numbers)

    def mix(self, stored: list[Any], generator: torch.Generator) -> bytes:
        """Returns the sum of the shares without their tags, modulo M."""
        return self.sum_of(stored).tobytes()

    def sum_of(self, shares: Iterable[bytes]) -> npt.NDArray[Any]:
        """Returns the sum of numbers modulo M, shape (d,)."""
        total = np.zeros(self.dimension, self.count_type)
        for share in shares:
            total += np.frombuffer(share, self.count_type)
        return total


class Aggregator(Shuffler):
    """Receives one share of each client's report, and releases one sum of them in each round.

    Args:
        format: The format of the reports.
        book: The record of released rounds, a
            :class:`~opacus_shuffle.federated.reporter.FileBook`; by default in memory, for
            simulations.

    Formal Guarantees:
        In each round the aggregator releases the sum of one set of shares, of at least
        ``min_reports`` different clients, and of no other set afterwards, even after a restart (its
        book records the round). Aggregators need not agree on the set: sums of different sets add
        up to uniform numbers, which reveal nothing (Theorem 8.8).
    """

    takes_shares = True
    format: SharedSumReports

    def __init__(self, format: SharedSumReports, *, book: ClientBook | None = None) -> None:
        super().__init__(instance_of("format", format, (SharedSumReports,)))
        self.book = ClientBook() if book is None else instance_of("book", book, (ClientBook,))
        self._chosen = b""

    def _tagged(self) -> dict[bytes, memoryview]:
        """Returns views of the open round's shares by tag. Of equal tags the first share counts."""
        return {
            share[:TAG_BYTES]: memoryview(share)[TAG_BYTES:] for share in reversed(self._reports)
        }

    def tags(self, number: int) -> bytes:
        """Returns the sorted tags of a round's shares.

        After the round is closed they are the tags of its sum, for a server that restarts. A server
        that asks repeatedly can see when each share arrived and may infer its client. This is
        covered: the server may choose which clients are in the sum (Theorem 8.8).

        Raises:
            UnknownRoundError: If the round is neither open nor the last one that was closed.
        """
        with self._lock:
            if self._is_closed(number):
                return self._chosen
            self._check_open(number)
            return b"".join(sorted(self._tagged()))

    def close_round(self, number: int, chosen: bytes = b"") -> ReleasedRound:
        """Closes a round, returns the sum of some shares modulo M, and destroys all shares.

        Args:
            number: The round.
            chosen: The tags of the shares in the sum, one after another. If there are fewer than
                ``min_reports``, the round is dropped.

        Returns:
            The output for the server; a repeated call with the same tags returns the same.

        Raises:
            UnknownRoundError: If the round is neither open nor the last one that was closed.
            ValueError: If a tag is unknown or repeated, or another sum of this round was released.
        """
        with self._lock:
            if self._closed is not None and self._is_closed(number):
                if chosen != self._chosen:
                    raise ValueError(
                        f"round {number} is closed: the difference of two of its sums would reveal "
                        "single reports"
                    )
                return self._closed
            self._check_open(number)
            shares, tags = self._tagged(), tags_in(chosen)
            if len(set(tags)) < len(tags) or not shares.keys() >= set(tags):
                raise ValueError(
                    f"chosen must be tags of shares of round {number}, each once: request its tags"
                )
            if len(tags) >= self.min_reports:  # recorded before it is released
                self.book.note(
                    number, max_rounds=LARGEST_ROUND, fingerprint=self.format.fingerprint
                )
            self._chosen = chosen
            return self._release(number, len(tags), [shares[tag] for tag in tags])


class Aggregation:
    """All aggregators of a run, for clients and for the server's ``Ledger``.

    Args:
        format: The format of the reports.
        aggregators: One for each share, in any order: an :class:`Aggregator` in this process, or a
            :class:`RemoteShuffler` with this party's secret. The secrets must differ: an
            aggregator that learns a party's secret at another one could report there in its name.

    Formal Guarantees:
        A round is the sum of all reports of which every aggregator has a share. It is dropped if
        the result is not a possible sum of so many clients' counts.
    """

    predictable: tuple[str, ...] = ()

    def __init__(
        self, format: SharedSumReports, aggregators: Sequence[Aggregator | RemoteShuffler]
    ) -> None:
        self.format = instance_of("format", format, (SharedSumReports,))
        self.aggregators = [
            instance_of("each of aggregators", each, (Aggregator, RemoteShuffler))
            for each in aggregators
        ]
        self.shares = min(
            len({getattr(each, attribute, id(each)) for each in self.aggregators})
            for attribute in ("url", "_secret")
        )
        if not len(self.aggregators) == self.shares == format.shares:
            raise ValueError(
                f"aggregators must be {format.shares}, one for each share, with different "
                f"addresses and different secrets, got {len(self.aggregators)}: an aggregator that "
                "knows this party's secret at another one could report there in its name"
            )
        self.simulated = any(each.simulated for each in self.aggregators)

    def submit(self, report: bytes, *, sender: str | None = None) -> None:
        """Sends each aggregator its share; the same report again has no effect.

        Args:
            report: The output of the client's ``encode``.
            sender: The client, for aggregators in this process; services use the secrets.

        Raises:
            RefusedReportError: If a share is refused. The report is then not in the sum.
        """
        for each, share in zip(self.aggregators, self.format.shares_of(report), strict=True):
            if isinstance(each, RemoteShuffler):
                each.submit(share)
            else:
                each.submit(sender, share)

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Opens a round at all aggregators."""
        for each in self.aggregators:
            each.open_round(number, fingerprint)

    def close_round(self, number: int) -> ReleasedRound:
        """Closes a round at all aggregators, and adds up their sums.

        Raises:
            UnknownRoundError: If an aggregator was restarted, and so has lost its shares.
            ValueError: If an aggregator returns another sum than the requested one.
        """
        common = set.intersection(*(set(tags_in(each.tags(number))) for each in self.aggregators))
        chosen = b"".join(sorted(common))
        sums = [each.close_round(number, chosen) for each in self.aggregators]
        reports = len(common) if len(common) >= self.format.min_reports else 0
        size = self.format.dimension * self.format.count_type.itemsize if reports else 0
        if any((len(each.mixed), each.num_reports) != (size, reports) for each in sums):
            raise ValueError(
                f"an aggregator returned another sum of round {number} than the requested one: "
                "check that all aggregators have the same version"
            )
        total = self.format.sum_of(each.mixed for each in sums if reports)
        if total.max() > reports * self.format.bits:
            warnings.warn(
                f"round {number} is dropped: its shares do not add up to counts of {reports} "
                "clients, so a client or an aggregator is faulty or dishonest",
                stacklevel=2,
            )
            return ReleasedRound(number, 0, b"")
        return ReleasedRound(number, reports, total.astype("<i8").tobytes() if reports else b"")

    def forget_round(self, number: int) -> None:
        """Destroys the stored sums of a round at all aggregators."""
        for each in self.aggregators:
            each.forget_round(number)


def tags_in(joined: bytes) -> list[bytes]:
    """Splits joined tags."""
    return [joined[start : start + TAG_BYTES] for start in range(0, len(joined), TAG_BYTES)]


def _random_bytes(stream: SecretGenerator, count: int) -> bytes:
    return stream.words(-(-count // 8)).tobytes()[:count]
