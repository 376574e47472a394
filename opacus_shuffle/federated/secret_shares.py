"""Sums of bits without a shuffler: each of two or more aggregators gets a share of every report.

A client splits its counts into shares that add up to them modulo a power of two. All but one of a
report's shares are uniform, whatever the counts are. An :class:`Aggregator` adds up one share of
every client, and an :class:`Aggregation` adds up the aggregators' sums: that is the sum of the
counts, and all that the server learns.

>>> reports = SharedBitSums(
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
from opacus_shuffle.federated.far_shuffler import FarShuffler
from opacus_shuffle.federated.report_formats import LARGEST_ROUND, BitSums
from opacus_shuffle.federated.reporter import ClientBook
from opacus_shuffle.federated.shuffler import Released, Shuffler

TAG_BYTES = 16
"""Random bytes that all shares of one report have in common, and no other report's."""


class SharedBitSums(BitSums):
    """Reports counts of bits, as :class:`BitSums`, in shares for aggregators who do not collude.

    What :meth:`encode` returns are all shares of a report, one after another: it is for
    :meth:`Aggregation.submit`, which sends each aggregator its own. Whoever gets all of it has the
    report.

    Args:
        shares: k, aggregators, each of which gets a share of every report.
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: Of the **sum**, over C.
        num_users: n, all clients.
        sample_rate: γ, the chance that a client's vector is in its report.
        sampling: ``"poisson"`` or ``"random_allocation"``.
        delta: δ of the whole run, of which binomial tails take a millionth.
        rounds: Rounds of the run, which share those tails.
        honest_fraction: The share of the clients that is certain to follow the protocol.
        min_reports: So many reports must be in a sum, by default all.

    Formal Guarantees:
        Shares of k − 1 aggregators are uniform and independent of all data. The server, together
        with up to k − 1 aggregators and all dishonest clients, whatever these do, sees what can be
        drawn from the sum of the counts of ``min_reports`` clients or more: the ε of
        :class:`BitSums` (Theorem 8.8). A dishonest client may add anything to the sum modulo M.
    """

    kind: ClassVar[str] = "shared_bit_sums"

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
        self.counts_in_a_number = self.num_users

    @property
    def modulus(self) -> int:
        """M, a power of two that no sum of all clients' counts reaches: it never wraps around."""
        return 256**self.count_type.itemsize

    @property
    def bytes_per_report(self) -> int:
        """How many bytes a share has: its tag, and numbers modulo M."""
        return TAG_BYTES + super().bytes_per_report

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns all shares, each behind the tag: uniform ones, and what is left of the counts."""
        left = np.frombuffer(super().randomize(vector, generator), self.count_type)
        stream, parts = stream_of(generator), list[bytes]()
        tag = _random_bytes(stream, TAG_BYTES)
        for _ in range(self.shares - 1):
            part = _random_bytes(stream, left.nbytes)
            left = left - np.frombuffer(part, self.count_type)  # whole numbers wrap around modulo M
            parts.append(tag + part)
        return b"".join([*parts, tag + left.tobytes()])

    def shares_of(self, report: bytes) -> list[bytes]:
        """Returns what each aggregator gets of a report, in their order.

        Raises:
            ValueError: If it is none that :meth:`encode` returned.
        """
        size, head = self.bytes_per_report, self.report_size - self.bytes_per_report
        whole = len(instance_of("report", report, (bytes,)))
        if whole != head + self.shares * size:
            raise ValueError(
                f"report must be all {self.shares} shares, {head + self.shares * size} bytes, as "
                f"encode returns them, got {whole}"
            )
        starts = range(head, whole, size)
        return [report[:head] + report[start : start + size] for start in starts]

    def check_numbers(self, numbers: bytes) -> None:
        """Takes all numbers: every share may be an honest client's."""

    def keep(self, held: list[Any], numbers: bytes) -> None:
        """Adds a share to those held, as the server says later which are in the sum."""
        held.append(numbers)

    def mix(self, held: list[Any], generator: torch.Generator) -> bytes:
        """Returns the sum of shares without tags, modulo M."""
        return self.sum_of(held).tobytes()

    def sum_of(self, shares: Iterable[bytes]) -> npt.NDArray[Any]:
        """Returns the sum of numbers modulo M, shape (d,)."""
        total = np.zeros(self.dimension, self.count_type)
        for share in shares:
            total += np.frombuffer(share, self.count_type)
        return total


class Aggregator(Shuffler):
    """Takes one share of each client's report, and hands over one sum of them in each round.

    Args:
        format: What reports look like.
        book: Where it notes which rounds it has handed over: a
            :class:`~opacus_shuffle.federated.reporter.FileBook`; by default in memory, for
            simulations.

    Formal Guarantees:
        In a round it hands over the sum of one set of shares, whatever the server asks for: of
        ``min_reports`` different clients at least, and of no other set afterwards, also if it is
        started anew, as its book says. It need not agree with other aggregators: sums of different
        sets add up to uniform numbers, which tell nothing (Theorem 8.8).
    """

    takes_shares = True
    format: SharedBitSums

    def __init__(self, format: SharedBitSums, *, book: ClientBook | None = None) -> None:
        super().__init__(instance_of("format", format, (SharedBitSums,)))
        self.book = ClientBook() if book is None else instance_of("book", book, (ClientBook,))
        self._chosen = b""

    def _tagged(self) -> dict[bytes, memoryview]:
        """Returns views of the open round's shares by their tags; of equal tags the first one's."""
        return {share[:TAG_BYTES]: memoryview(share)[TAG_BYTES:] for share in reversed(self._held)}

    def tags(self, number: int) -> bytes:
        """Returns the tags of the round's shares, sorted.

        Once it is closed they are those of its sum, so that a server that was killed finds them. A
        server that asks often sees when each has come, and may know whose it is: it may choose who
        is in the sum, anyway (Theorem 8.8).

        Raises:
            UnknownRoundError: If this round is neither open nor the one that was closed last.
        """
        with self._lock:
            if self._is_closed(number):
                return self._chosen
            self._check_open(number)
            return b"".join(sorted(self._tagged()))

    def close_round(self, number: int, chosen: bytes = b"") -> Released:
        """Closes a round, and hands over the sum of some shares modulo M; destroys all shares.

        Args:
            number: The round.
            chosen: Tags of the shares in the sum, one after another. If they are fewer than
                ``min_reports``, the round is dropped.

        Returns:
            What the server may see. The same again if it asks again for the same.

        Raises:
            UnknownRoundError: If this round is neither open nor the one that was closed last.
            ValueError: If there is no such share, one is named twice, or a sum of this round was
                handed over before.
        """
        with self._lock:
            if self._closed is not None and self._is_closed(number):
                if chosen != self._chosen:
                    raise ValueError(
                        f"round {number} is closed: another sum of it would tell what is in one of "
                        "them alone"
                    )
                return self._closed
            self._check_open(number)
            shares, wanted = self._tagged(), tags_in(chosen)
            if len(set(wanted)) < len(wanted) or not shares.keys() >= set(wanted):
                raise ValueError(
                    f"chosen must be tags of shares of round {number}, each once: ask for its tags"
                )
            if len(wanted) >= self.min_reports:  # noted before it is seen
                self.book.note(
                    number, max_rounds=LARGEST_ROUND, fingerprint=self.format.fingerprint
                )
            self._chosen = chosen
            return self._release(number, len(wanted), [shares[tag] for tag in wanted])


class Aggregation:
    """All aggregators of a run, as a client and as the server's ``Ledger`` see them.

    Args:
        format: What reports look like.
        aggregators: As many as there are shares: each an :class:`Aggregator` in this process, or a
            :class:`FarShuffler` with this party's secret at one elsewhere, a secret of its own at
            each: whoever learns one at an aggregator could else report in this party's name at
            another. Everyone names them in any order.

    Formal Guarantees:
        A round is the sum of all reports of which every aggregator has a share. What does not add
        up to counts of so many clients is a dropped round.
    """

    predictable: tuple[str, ...] = ()

    def __init__(
        self, format: SharedBitSums, aggregators: Sequence[Aggregator | FarShuffler]
    ) -> None:
        self.format = instance_of("format", format, (SharedBitSums,))
        self.aggregators = [
            instance_of("each of aggregators", each, (Aggregator, FarShuffler))
            for each in aggregators
        ]
        self.shares = min(
            len({getattr(each, own, id(each)) for each in self.aggregators})
            for own in ("url", "_secret")
        )
        if not len(self.aggregators) == self.shares == format.shares:
            raise ValueError(
                f"aggregators must be {format.shares}, as the format's shares, no two the same "
                f"one, and none shown another one's secret, got {len(self.aggregators)}: one that "
                "has this party's secret at another could report there in its name"
            )
        self.simulated = any(each.simulated for each in self.aggregators)

    def submit(self, report: bytes, *, sender: str | None = None) -> None:
        """Sends each aggregator its share; the same report again changes nothing.

        Args:
            report: What the client's ``encode`` returned.
            sender: Who sends it, to aggregators in this process; others go by secrets.

        Raises:
            RefusedReportError: If a share is not taken. The report is missing then.
        """
        for each, share in zip(self.aggregators, self.format.shares_of(report), strict=True):
            if isinstance(each, FarShuffler):
                each.submit(share)
            else:
                each.submit(sender, share)

    def open_round(self, number: int, fingerprint: bytes) -> None:
        """Opens a round at all aggregators."""
        for each in self.aggregators:
            each.open_round(number, fingerprint)

    def close_round(self, number: int) -> Released:
        """Closes a round at all aggregators, and adds up their sums.

        Raises:
            UnknownRoundError: If an aggregator was started anew: it has lost its shares.
            ValueError: If an aggregator hands over another sum than it was asked for.
        """
        common = set.intersection(*(set(tags_in(each.tags(number))) for each in self.aggregators))
        chosen = b"".join(sorted(common))
        sums = [each.close_round(number, chosen) for each in self.aggregators]
        reports = len(common) if len(common) >= self.format.min_reports else 0
        size = self.format.dimension * self.format.count_type.itemsize if reports else 0
        if any((len(part.mixed), part.num_reports) != (size, reports) for part in sums):
            raise ValueError(
                f"an aggregator hands over another sum of round {number} than it was asked for: "
                "are all of the same version?"
            )
        total = self.format.sum_of(part.mixed for part in sums if reports)
        if total.max() > reports * self.format.bits:
            warnings.warn(
                f"round {number} is dropped: its shares do not add up to counts of {reports} "
                "clients, as one of them or an aggregator has lied",
                stacklevel=2,
            )
            return Released(number, 0, b"")
        return Released(number, reports, total.astype("<i8").tobytes() if reports else b"")

    def forget_round(self, number: int) -> None:
        """Has all aggregators destroy what they handed over of a round."""
        for each in self.aggregators:
            each.forget_round(number)


def tags_in(joined: bytes) -> list[bytes]:
    """Returns the tags that are joined."""
    return [joined[start : start + TAG_BYTES] for start in range(0, len(joined), TAG_BYTES)]


def _random_bytes(stream: SecretGenerator, count: int) -> bytes:
    return stream.words(-(-count // 8)).tobytes()[:count]
