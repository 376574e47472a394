"""Report formats: how a vector is noised and packed, checked, mixed and decoded.

:class:`ReportFormat` is what the formats have in common; nothing else of this package knows which
there are. :class:`BitSums` are Cheu, Joseph, Mao and Peng's shuffled vector sums (SCO), with
everyone's coin a secret. :class:`GaussianReports` are those of Liew and Takahashi's shuffle
Gaussian mechanism (SG). :class:`SecretReports` are noise alone where the coin says no, so that the
coin hides everyone, too.

A report is bytes: a header that says which round and settings it is of, and the numbers. All
randomness is the operating system's own: a generator that PyTorch seeds is no secret to who sees
enough of its numbers, and a server sees many.

>>> sizes = {"dimension": 3, "max_norm": 1.0, "num_users": 1000, "sample_rate": 0.1}
>>> sums = BitSums(**sizes, noise_multiplier=2.0, delta=1e-6)
>>> len(sums.encode(1, torch.tensor([0.6, 0.8, 0.0]))) == 12 + sums.bytes_per_report
True
>>> reports = GaussianReports(**sizes, noise_multiplier=2.0)
>>> report = reports.encode(1, torch.tensor([3.0, 4.0, 0.0]))
>>> len(report), reports.open(report)[0]
(24, 1)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import struct
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from opacus_shuffle.accountants.mechanism import Communication, Mechanism
from opacus_shuffle.accountants.mechanisms import (
    SecretCheckIn,
    ShuffledCheckIn,
    ShuffledSums,
    ShuffleGauss,
)
from opacus_shuffle.analysis.report_shapes import shape_of
from opacus_shuffle.core.gaussian_noise import GridNoise
from opacus_shuffle.core.participation import permutation
from opacus_shuffle.core.randomness import SecretGenerator, check_generator, stream_of
from opacus_shuffle.core.validation import (
    instance_of,
    integer,
    moderate,
    noise_level,
    one_of,
    reject_unknown,
    sampling_rate,
)
from opacus_shuffle.protocols.calibration import honest_users
from opacus_shuffle.protocols.linear_reports import report_along, tilted
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

_HEADER = struct.Struct("<I8s")  # the round, and the fingerprint of the settings
LARGEST_ROUND = 2**32 - 1

_REFUSED = 1e-30
"""The probability that an honest report is refused: far below any δ in all rounds together."""
_LEAST, _MOST = 1e-30, 1e30
"""Numbers that single precision holds with all of their bits, and their sums, too."""
_SHORTEST = 1e-150
"""Norms above it are exact in double precision, where squares of numbers below it vanish."""


class ReportFormat(ABC):
    """A way of reporting a vector, with the noise that hides it.

    Every client sends one report in every round, all of one length, whatever its coin says: who
    watches the network learns nothing from it, and the shuffler knows how many clients are there.

    Args:
        dimension: d, entries of a vector.
        max_norm: C, absolute; longer vectors are scaled down to it.
        num_users: n, all clients.
        sample_rate: γ, the chance that a client takes part in a round, by a coin of its own.
        honest_fraction: The share of the clients that is certain to follow the protocol; the others
            may send what they like.
        min_reports: So many clients must have reported before a round is released, by default all
            of them. Whoever is missing, and whoever keeps it away: a round of fewer is dropped.

    Attributes:
        kind: The format's name.
        mechanism: What one round is to the accountant.
        honest_reports: Those that the accountant counts on: of ``min_reports``, all but as many as
            may be dishonest.
        plan: What follows from the settings by a computation, which clients, shuffler and server
            must have in common, too.
        num_batches: t, where each client takes part in one of every t rounds; else None.
        shares: How many parties get a share of each report; with 1 it is whole.
    """

    kind: ClassVar[str]
    mechanism: Mechanism
    num_batches: int | None = None
    shares: int = 1

    def __init__(
        self,
        *,
        dimension: int,
        max_norm: float,
        num_users: int,
        sample_rate: float,
        honest_fraction: float,
        min_reports: int | None,
    ) -> None:
        self.dimension = integer("dimension", dimension)
        self.max_norm = moderate("max_norm", max_norm)
        self.num_users = integer("num_users", num_users)
        self.sample_rate = sampling_rate("sample_rate", sample_rate)
        self.honest_fraction = sampling_rate("honest_fraction", honest_fraction)
        fewest = self.num_users if min_reports is None else min_reports
        self.min_reports = integer("min_reports", fewest, maximum=self.num_users)
        self.plan: dict[str, Any] = {}
        # The worst case: all dishonest clients are there, and the missing ones are all honest.
        dishonest = self.num_users - honest_users(self.num_users, self.honest_fraction)
        self.honest_reports = self.min_reports - dishonest
        if self.honest_reports < 1:
            raise ValueError(
                f"min_reports={self.min_reports} may all come from the {dishonest} of num_users="
                f"{self.num_users} that are dishonest with honest_fraction={honest_fraction}: "
                "nothing hides a report then; raise min_reports"
            )

    @staticmethod
    def of_settings(settings: Any) -> ReportFormat:
        """Makes the format from settings, which all parties read from one file.

        Args:
            settings: ``{"kind": ..., **keywords}``, as :attr:`settings` returns them.

        Raises:
            ValueError: If there is no such kind, or a keyword is missing, unknown or out of range.
        """
        given = dict(instance_of("settings", settings, (dict,)))
        formats: list[type[ReportFormat]] = [BitSums, GaussianReports, SecretReports]
        kinds = {kind.kind: kind for kind in [*BitSums.__subclasses__(), *formats]}
        kind = kinds[one_of("kind in settings", given.pop("kind", None), kinds)]
        parameters = inspect.signature(kind).parameters
        unknown = {str(name): value for name, value in given.items() if name not in parameters}
        reject_unknown(f"settings of {kind.kind}", unknown, parameters)
        try:
            return kind(**given)
        except TypeError as error:
            raise ValueError(f"settings of {kind.kind}: {error}; add what is missing") from None

    @property
    def settings(self) -> dict[str, Any]:
        """The format as plain values, for a JSON file; :meth:`of_settings` reads them."""
        names = inspect.signature(type(self)).parameters
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """The first 8 bytes of SHA-256 of the settings, by which parties recognise each other's."""
        agreed = json.dumps({**self.settings, **self.plan}, sort_keys=True)
        return hashlib.sha256(agreed.encode()).digest()[:8]

    def check_fingerprint(self, whose: str, fingerprint: bytes) -> None:
        """Refuses a party whose settings are different.

        Raises:
            ValueError: If it does.
        """
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{whose} goes by other settings than these, {self.settings}: give everyone the "
                "same file of settings, and the same version of this package and of SciPy"
            )

    @abstractmethod
    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns the numbers of one report, of the same length for all vectors.

        Args:
            vector: float64 on the CPU, shape (d,), of norm at most C; None if the client's coin
                said no.
            generator: On the CPU.
        """

    @abstractmethod
    def check_numbers(self, numbers: bytes) -> None:
        """Refuses numbers that no honest client sends.

        Args:
            numbers: As many bytes as a report has.

        Raises:
            ValueError: If a number is out of range.
        """

    def keep(self, held: list[Any], numbers: bytes) -> None:
        """Adds a report's numbers to what the shuffler holds."""
        held.append(numbers)

    @abstractmethod
    def merge(self, held: list[Any], mixed: bytes, num_reports: int) -> None:
        """Adds what another shuffler has mixed of its reports to what the shuffler holds.

        Raises:
            ValueError: If so many reports cannot have been mixed to that.
        """

    @abstractmethod
    def mix(self, held: list[Any], generator: torch.Generator) -> bytes:
        """Returns what the shuffler hands over, which does not depend on the order of reports."""

    def sizes(self, num_reports: int) -> range:
        """Returns the possible sizes, in bytes, of so many mixed reports, with none left out."""
        return range(most := num_reports * self.bytes_per_report, most + 1)

    @abstractmethod
    def estimate(self, mixed: bytes, num_reports: int) -> torch.Tensor:
        """Returns the unbiased estimate of the sum of all vectors: float64, shape (d,).

        Args:
            mixed: What :meth:`mix` made.
            num_reports: How many clients reported.
        """

    def sent(self, rounds: int) -> Communication:
        """Returns a sentence on what a client sends in so many rounds."""
        size = self.shares * self.bytes_per_report
        return Communication(
            bits_per_coordinate=-(-8 * size // self.dimension),
            count_bits_per_coordinate=None,
            bytes_per_user=rounds * size,
            every_round=True,
        )

    @property
    @abstractmethod
    def bytes_per_report(self) -> int:
        """How many bytes the numbers of a report have."""

    @property
    def report_size(self) -> int:
        """How many bytes a whole report has."""
        return _HEADER.size + self.bytes_per_report

    def encode(
        self, number: int, vector: torch.Tensor | None, generator: torch.Generator | None = None
    ) -> bytes:
        """Returns one client's report of a round: clipped, noised and packed.

        Args:
            number: The round.
            vector: Shape (d,), any norm. One whose norm is not finite in double precision is
                reported as zero; None if the client's coin said no.
            generator: On the CPU; by default the operating system's.

        Raises:
            ValueError: If the vector is no dense real tensor of this shape.
        """
        check_generator("generator", generator)
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        clipped = None if vector is None else self.clip(vector)
        header = _HEADER.pack(round_, self.fingerprint)
        draws = SecretGenerator(secure=True) if generator is None else generator
        return header + self.randomize(clipped, draws)

    def clip(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the vector in float64 on the CPU, clipped to norm C; zero if not finite."""
        given = instance_of("vector", vector, (torch.Tensor,)).detach()
        if given.shape != (self.dimension,):
            raise ValueError(
                f"vector must have shape ({self.dimension},), got {tuple(given.shape)}: join the "
                "parts"
            )
        if given.layout != torch.strided or given.is_complex() or given.is_meta:
            raise ValueError(
                f"vector must be a dense tensor of real numbers, got {given.layout}, "
                f"{given.dtype}, {given.device}"
            )
        point = given.to("cpu", torch.float64)
        # Squares of entries below 1e-154 vanish, which are far shorter than any norm that C may be.
        norm = float(torch.linalg.vector_norm(point))
        if norm <= self.max_norm:
            return point
        if not math.isfinite(norm):
            return torch.zeros_like(point)
        # A hair less, so that no rounding makes it longer than the noise is made for.
        return point * (self.max_norm / norm * (1 - 2**-40))

    def open(self, report: bytes) -> tuple[int, bytes]:
        """Reads a report's round and numbers, which do not say who sent it.

        Raises:
            ValueError: If it is none of this format; the message says why, and nothing of what is
                in it.
        """
        if not isinstance(report, bytes) or len(report) != self.report_size:
            got = len(report) if isinstance(report, bytes) else type(report).__name__
            raise ValueError(f"report must be {self.report_size} bytes, got {got}")
        round_, fingerprint = _HEADER.unpack_from(report)
        self.check_fingerprint("the report's client", fingerprint)
        numbers = report[_HEADER.size :]
        self.check_numbers(numbers)
        return round_, numbers


def check_mixed(possible: bool) -> None:
    """Refuses what cannot be the mix of as many reports as the shuffler states."""
    if not possible:
        raise ValueError(
            "what a shuffler has mixed cannot be of as many reports as it states: are all "
            "shufflers of the same version?"
        )


class BitSums(ReportFormat):
    """Reports a vector as bits on a grid with noise bits; the shuffler adds up the ones.

    A client hands the shuffler the number of its ones in each coordinate. If its coin says no, it
    reports zero, which nobody can tell from another vector. The sum is as private as a trusted
    server's.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: Of the **sum**, over C, as in DP-SGD.
        num_users: n, all clients; each sends a report in every round.
        sample_rate: γ, the chance that a client's vector is in its report.
        sampling: ``"poisson"``: each client tosses a coin for every round. ``"random_allocation"``:
            γ is 1/t, and each client's vector is in one of every t rounds, by a uniform draw of its
            own at the first of them; whoever misses that one sits them all out. Begun epochs count
            in full.
        delta: δ of the whole run, of which binomial tails take a millionth.
        rounds: Rounds of the run, which share those tails.
        honest_fraction: The share of the clients that is certain to follow the protocol.
        min_reports: So many clients must have reported, by default all. The accountant counts on
            the noise of so many less those that may be dishonest: a third of all at least.

    Formal Guarantees:
        What the shuffler hands over tells one number per coordinate, the sum of all ones: the round
        of ``shuffled_sums`` with secret coins.
        :class:`~opacus_shuffle.accountants.mechanisms.shuffled_sums.ShuffledSums` has the proof.
    """

    kind: ClassVar[str] = "bit_sums"
    counts_in_a_number = 1  # that it must have room for

    def __init__(
        self,
        *,
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
        super().__init__(
            dimension=dimension,
            max_norm=max_norm,
            num_users=num_users,
            sample_rate=sample_rate,
            honest_fraction=honest_fraction,
            min_reports=min_reports,
        )
        if 3 * self.honest_reports < self.num_users:
            raise ValueError(
                f"min_reports={self.min_reports} and honest_fraction={honest_fraction} make "
                f"{self.honest_reports} honest reports certain, BitSums needs a third of "
                f"num_users={self.num_users}, {-(-self.num_users // 3)}: raise min_reports"
            )
        self.protocol = ShuffleVectorSum.with_noise_multiplier(
            self.num_users,
            self.dimension,
            self.max_norm,
            noise_multiplier,
            delta=delta,
            rounds=rounds,
            honest_fraction=self.honest_reports / self.num_users,
            zero_on_grid=True,
            rate=self.sample_rate,
        )
        self.sampling = one_of("sampling", sampling, ("poisson", "random_allocation"))
        self.mechanism = dataclasses.replace(
            ShuffledSums.of_protocol(self.protocol, sample_rate=self.sample_rate),
            sampling=self.sampling,
        )
        if self.sampling == "random_allocation":
            self.num_batches = self.mechanism.num_batches
        self.noise_multiplier = float(noise_multiplier)
        self.delta, self.rounds = self.protocol.delta, self.protocol.rounds
        parts = ("granularity", "noise_bits", "bit_probability")
        self.plan = {name: getattr(self.protocol, name) for name in parts}
        self.bits = self.protocol.granularity + self.protocol.noise_bits

    @functools.cached_property
    def count_type(self) -> np.dtype:
        """Whole numbers that hold the largest count in the fewest of 1, 2, 4 or 8 bytes."""
        largest = self.counts_in_a_number * self.bits
        return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if largest < 256**size))

    @property
    def bytes_per_report(self) -> int:
        """How many bytes a report's counts have, each in the fewest whole bytes."""
        return self.dimension * self.count_type.itemsize

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns the number of ones of each coordinate."""
        counts = (
            self.protocol.encode_zeros(1, generator)
            if vector is None
            else self.protocol.encode_scaled([vector[None]], torch.ones(1).double(), generator)
        )
        ones = self.protocol.draw_noise(1, generator, part=True).add_(counts)
        return ones.numpy().astype(self.count_type).tobytes()

    def check_numbers(self, numbers: bytes) -> None:
        """Refuses counts of more ones than there are bits."""
        largest = int(np.frombuffer(numbers, self.count_type).max())
        if largest > self.bits:
            raise ValueError(
                f"report counts {largest} ones in a coordinate of {self.bits} bits: it is not taken"
            )

    def keep(self, held: list[Any], numbers: bytes) -> None:
        """Adds a report's counts to their sum, so that a shuffler holds one number a coordinate."""
        self._add(held, np.frombuffer(numbers, self.count_type))

    def merge(self, held: list[Any], mixed: bytes, num_reports: int) -> None:
        """Adds another shuffler's sum of counts."""
        check_mixed(len(mixed) in self.sizes(num_reports))
        counts = np.frombuffer(mixed, "<i8")
        check_mixed(counts.min() >= 0 and counts.max() <= num_reports * self.bits)
        self._add(held, counts)

    def _add(self, held: list[Any], counts: npt.NDArray[Any]) -> None:
        if not held:
            held.append(np.zeros(self.dimension, np.int64))
        np.add(held[0], counts, out=held[0], dtype=np.int64, casting="same_kind")

    def mix(self, held: list[Any], generator: torch.Generator) -> bytes:
        """Returns the sum of the counts."""
        return held[0].astype("<i8").tobytes()

    def sizes(self, num_reports: int) -> range:
        """Returns the size of a sum: eight bytes per coordinate."""
        return range(8 * self.dimension, 8 * self.dimension + 1)

    def estimate(self, mixed: bytes, num_reports: int) -> torch.Tensor:
        """Returns the estimate of the sum from the counts of ones."""
        ones = np.frombuffer(mixed, "<i8").astype(np.int64)
        return self.protocol.decode(torch.from_numpy(ones), num_reports)


class VectorReports(ReportFormat):
    """Reports vectors in single precision, each with its own noise and its vector as mean.

    Args:
        noise_multiplier: σ of each report, over C.
        **of_all: As of every format.

    Attributes:
        scale: σC, the standard deviation of a report's noise, absolute.
        longest_report: The norm that an honest report exceeds with a chance of at most 10⁻³⁰.
    """

    def __init__(self, *, noise_multiplier: float, **of_all: Any) -> None:
        super().__init__(**of_all)
        self.noise_multiplier = noise_level("noise_multiplier", noise_multiplier)
        self.scale = self.noise_multiplier * self.max_norm

    def noise_norm(self, chance: float) -> float:
        """Returns the norm, over σC, that noise alone exceeds with this chance."""
        return math.sqrt(float(stats.chi2(self.dimension).isf(chance)))

    def take_up_to(self, longest: float) -> None:
        """Sets which reports are taken: those of this norm over σC, or a smaller one.

        Raises:
            ValueError: If single precision does not hold such reports.
        """
        self.longest_report = self.scale * longest
        if not (self.scale >= _LEAST and self.longest_report <= _MOST):
            raise ValueError(
                f"max_norm={self.max_norm} with noise_multiplier={self.noise_multiplier} is beyond "
                "single precision, which reports travel in: scale the vectors"
            )

    @staticmethod
    def packed(steps: torch.Tensor, step: float) -> bytes:
        """Rounds a report to its grid and packs it; it is overwritten.

        It was made in double precision, and is rounded here, once: the last bits of a sum tell
        whether anything was added (Mironov 2012), multiples of a grid do not.

        Args:
            steps: The report in steps of the grid, shape (d,).
            step: The grid's, absolute, a power of two.
        """
        return steps.round_().mul_(step).numpy().astype("<f4").tobytes()

    @property
    def bytes_per_report(self) -> int:
        """How many bytes a report has: four a coordinate."""
        return 4 * self.dimension

    def check_numbers(self, numbers: bytes) -> None:
        """Refuses numbers that are not finite, and reports longer than an honest one ever is."""
        values = np.frombuffer(numbers, "<f4").astype(np.float64)
        # No library of matrices takes this norm: its threads wait for each other.
        norm = math.sqrt(np.square(values).sum())
        if not norm <= self.longest_report:  # nor is NaN
            raise ValueError(
                f"report has a norm of {norm:.3g}, which no honest one exceeds "
                f"{self.longest_report:.3g} of: it is not taken"
            )

    def merge(self, held: list[Any], mixed: bytes, num_reports: int) -> None:
        """Adds another shuffler's reports."""
        size = self.bytes_per_report
        check_mixed(num_reports <= self.num_users and len(mixed) in self.sizes(num_reports))
        reports = [mixed[start : start + size] for start in range(0, len(mixed), size)]
        for report in reports:
            self.check_numbers(report)
        held += reports

    def mix(self, held: list[Any], generator: torch.Generator) -> bytes:
        """Returns the reports in random order."""
        return b"".join(held[place] for place in permutation(len(held), generator))

    def estimate(self, mixed: bytes, num_reports: int) -> torch.Tensor:
        """Returns the sum of the reports."""
        reports = np.frombuffer(mixed, "<f4").reshape(-1, self.dimension)
        for report in reports:
            self.check_numbers(report.tobytes())  # again: this is another party
        return torch.from_numpy(reports.sum(axis=0, dtype=np.float64))


class GaussianReports(VectorReports):
    """Reports a vector clipped to norm C plus N(0, σ²C²I), in single precision.

    A client whose coin says no sends a report of nothing but zeros, which noise never is: the
    shuffler knows then that it is there, and hands nothing of it over. It holds these like the
    others until it mixes: while reports come in, nothing that it does depends on a coin, as whoever
    sends can watch how long that takes.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: σ of each report, over C.
        num_users: n, all clients.
        sample_rate: γ, the chance that a client takes part in a round.
        honest_fraction: The share of the clients that is certain to follow the protocol.
        min_reports: So many clients must have reported, by default all. The accountant counts on so
            many less those that may be dishonest.

    Formal Guarantees:
        All reports of a round in random order, with their number, are what the accountant's
        mechanism accounts for: ``shuffled_checkin``, or ``shuffle_gauss`` where every client takes
        part, with the honest reports as its users.
    """

    kind: ClassVar[str] = "gaussian_reports"

    def __init__(
        self,
        *,
        dimension: int,
        max_norm: float,
        noise_multiplier: float,
        num_users: int,
        sample_rate: float = 1.0,
        honest_fraction: float = 1.0,
        min_reports: int | None = None,
    ) -> None:
        super().__init__(
            dimension=dimension,
            max_norm=max_norm,
            noise_multiplier=noise_multiplier,
            num_users=num_users,
            sample_rate=sample_rate,
            honest_fraction=honest_fraction,
            min_reports=min_reports,
        )
        self.take_up_to(1 / self.noise_multiplier + self.noise_norm(_REFUSED))
        reports: dict[str, Any] = {
            "noise_multiplier": self.noise_multiplier,
            "num_users": self.honest_reports,
        }
        self.mechanism = (
            ShuffleGauss(**reports)
            if self.sample_rate == 1
            else ShuffledCheckIn(**reports, sample_rate=self.sample_rate)
        )

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns the vector with noise in double precision, rounded to a grid once; or zeros."""
        if vector is None:
            return bytes(self.bytes_per_report)
        stream = stream_of(generator)
        step = GridNoise(self.scale, stream).step
        steps = stream.precise_normals(self.dimension).mul_(self.scale / step)
        return self.packed(steps.add_(vector, alpha=1 / step), step)

    def mix(self, held: list[Any], generator: torch.Generator) -> bytes:
        """Returns the reports of those who take part, in random order."""
        blank = bytes(self.bytes_per_report)
        return super().mix([numbers for numbers in held if numbers != blank], generator)

    def sizes(self, num_reports: int) -> range:
        """Returns the possible sizes, in bytes: any number of the clients may participate."""
        return range(0, super().sizes(num_reports).stop, self.bytes_per_report)


class SecretReports(VectorReports):
    """Reports a vector with noise if the client's coin says yes, and noise alone if it says no.

    Nobody can tell the two apart, the shuffler neither: who does not take part hides those who do,
    and the coin hides everyone. Reports of both kinds are made by the same steps, and rounded to
    the same grid, as a vector plus noise would else have bits that noise alone never has.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: σ of each report, over C. The sum of n reports carries √n·σC.
        num_users: n, all clients.
        sample_rate: q, below 1, the chance that a client's vector is in its report.
        report: ``"linear"``: along the vector noise is drawn with a density that is tilted, in
            place of moved; ``"gaussian"``: the vector is added to N(0, σ²C²I); ``"step"``: noise
            along the vector is above a threshold more often, which bounds what a report tells
            whoever sees who sends it. Where hundreds of clients send noise alone, linear reports
            cost the least ε at one σ.
        honest_fraction: The share of the clients that is certain to follow the protocol.
        min_reports: So many clients must have reported, by default all. The accountant counts on so
            many less those that may be dishonest.

    Attributes:
        grid: What every number of a report is a multiple of, absolute: a power of two of which
            single precision holds all multiples up to the longest report.

    Formal Guarantees:
        All reports of a round in random order are what ``secret_checkin`` accounts for, with the
        honest reports as its users: docs/proofs/12_secret_checkin.md. The client's vector may
        depend on its records and on all that was released, but on none of its own earlier coins or
        noise; and whether it reports, on neither coin nor records.
    """

    kind: ClassVar[str] = "secret_reports"

    def __init__(
        self,
        *,
        dimension: int,
        max_norm: float,
        noise_multiplier: float,
        num_users: int,
        sample_rate: float,
        report: str = "linear",
        honest_fraction: float = 1.0,
        min_reports: int | None = None,
    ) -> None:
        super().__init__(
            dimension=dimension,
            max_norm=max_norm,
            noise_multiplier=noise_multiplier,
            num_users=num_users,
            sample_rate=sample_rate,
            honest_fraction=honest_fraction,
            min_reports=min_reports,
        )
        self.mechanism = SecretCheckIn(
            noise_multiplier=self.noise_multiplier,
            num_users=self.honest_reports,
            sample_rate=self.sample_rate,
            report=report,
        )
        self.report = report
        if report == "gaussian":
            self.take_up_to(1 / self.noise_multiplier + self.noise_norm(_REFUSED))
        else:
            # Such a report has the density X over that of noise alone, and by Cauchy and Schwarz
            # P(A)² ≤ E X²·(noise alone's chance of A).
            square = 1 + math.exp(shape_of(report, self.noise_multiplier).log_variance)
            self.take_up_to(self.noise_norm(_REFUSED**2 / square))
        self.grid = float(np.spacing(np.float32(self.longest_report)))

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns a report; without a vector it is that of zero, which is noise alone."""
        stream = stream_of(generator)
        noise = stream.precise_normals(self.dimension)
        point = torch.zeros_like(noise) if vector is None else vector
        if self.report != "gaussian":
            report = self._tilted(point, noise, stream)
        else:
            report = noise + point / self.scale
        return self.packed(report.mul_(self.scale / self.grid), self.grid)

    def _tilted(
        self, point: torch.Tensor, noise: torch.Tensor, stream: SecretGenerator
    ) -> torch.Tensor:
        """Returns a linear or step report in units of its noise; every step is taken for zero, too.

        With a probability of norm over C the part along the vector is drawn anew, else it stays.
        """
        norm = torch.linalg.vector_norm(point)
        # Shorter vectors, which norms in double precision say nothing of, are drawn anew never.
        unit = point / norm.clamp_min(_SHORTEST)
        (toss,), signed = stream.uniforms(1), stream.signed_uniforms(1)
        (drawn,) = tilted(signed, self.noise_multiplier, self.report)
        part = torch.where(toss < norm / self.max_norm, drawn, unit @ noise)
        return report_along(unit, part, noise)
