"""Report formats: how vectors are noised and packed, and reports checked, mixed and decoded.

:class:`ReportFormat` is the common interface. :class:`ShuffledSumReports` implement Cheu, Joseph,
Mao and Peng's shuffled vector sums (SCO), with secret coins. :class:`GaussianReports` implement
Liew and Takahashi's shuffle Gaussian mechanism (SG). :class:`SecretReports` contain noise alone if
a client does not participate, so that the coin hides every client.

A report is bytes: a header with its round and the fingerprint of its settings, and then the
numbers. All randomness is keyed by the operating system. PyTorch's generators would not be secret:
their state can be computed from enough of their outputs, and a server sees many.

>>> sizes = {"dimension": 3, "max_norm": 1.0, "num_users": 1000, "sample_rate": 0.1}
>>> sums = ShuffledSumReports(**sizes, noise_multiplier=2.0, delta=1e-6)
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
from scipy.special import gammainccinv

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

_HEADER = struct.Struct("<I8s")  # round, fingerprint of the settings
LARGEST_ROUND = 2**32 - 1

_REFUSED = 1e-30
"""The probability that an honest report is refused: negligible compared with any δ."""
_LEAST, _MOST = 1e-30, 1e30
"""The range of numbers that single precision represents with full accuracy, and their sums."""
_SHORTEST = 1e-150
"""The smallest norm that double precision computes exactly: smaller squares underflow."""


class ReportFormat(ABC):
    """A format of reports: how a client reports a vector with noise.

    Every client sends one report in every round, all of the same length, so an observer of the
    network learns nothing about a client's coin.

    Args:
        dimension: d, entries of a vector.
        max_norm: C, absolute; longer vectors are scaled down to it.
        num_users: n, all clients.
        sample_rate: γ, the probability that a client participates in a round, by a coin of its own.
        honest_fraction: The share of clients that certainly follow the protocol; the others may
            send anything.
        min_reports: The smallest number of reports with which a round is released; by default all
            clients'. A round with fewer reports is dropped, whatever the reason.

    Attributes:
        kind: The name of the format.
        mechanism: The mechanism by which the accountant accounts for one round.
        honest_reports: The number of reports whose noise the accountant relies on: ``min_reports``
            minus the number of clients that may be dishonest.
        plan: Values computed from the settings, which must be equal for clients, shuffler and
            server.
        num_batches: t, if each client participates in one of every t rounds; else None.
        shares: The number of secret shares into which a report is split; 1 means that it is whole.
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
        # In the worst case all dishonest clients report, and the missing clients are all honest.
        dishonest = self.num_users - honest_users(self.num_users, self.honest_fraction)
        self.honest_reports = self.min_reports - dishonest
        if self.honest_reports < 1:
            raise ValueError(
                f"min_reports={self.min_reports} reports may all come from the {dishonest} of "
                f"num_users={self.num_users} that are dishonest with honest_fraction="
                f"{honest_fraction}: no noise is then certain; raise min_reports"
            )

    @staticmethod
    def of_settings(settings: Any) -> ReportFormat:
        """Makes the format from settings, which all parties read from the same file.

        Args:
            settings: ``{"kind": ..., **keywords}``, as returned by :attr:`settings`.

        Raises:
            ValueError: If the kind is unknown, or a keyword is missing, unknown or out of range.
        """
        keywords = dict(instance_of("settings", settings, (dict,)))
        formats: list[type[ReportFormat]] = [ShuffledSumReports, GaussianReports, SecretReports]
        by_kind = {each.kind: each for each in [*ShuffledSumReports.__subclasses__(), *formats]}
        chosen = by_kind[one_of("kind in settings", keywords.pop("kind", None), by_kind)]
        parameters = inspect.signature(chosen).parameters
        unknown = {str(name): value for name, value in keywords.items() if name not in parameters}
        reject_unknown(f"settings of {chosen.kind}", unknown, parameters)
        try:
            return chosen(**keywords)
        except TypeError as error:
            raise ValueError(f"settings of {chosen.kind}: {error}; add the argument") from None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as plain values, for a JSON file that :meth:`of_settings` reads."""
        names = inspect.signature(type(self)).parameters
        return {"kind": self.kind, **{name: getattr(self, name) for name in names}}

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """The first 8 bytes of SHA-256 of the settings, which parties compare."""
        agreed = json.dumps({**self.settings, **self.plan}, sort_keys=True)
        return hashlib.sha256(agreed.encode()).digest()[:8]

    def check_fingerprint(self, whose: str, fingerprint: bytes) -> None:
        """Compares the fingerprint of a party's settings.

        Raises:
            ValueError: If its settings are different.
        """
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{whose} uses other settings than {self.settings}: give all parties the same file "
                "of settings, and the same versions of this package and of SciPy"
            )

    @abstractmethod
    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns the packed numbers of one report; their length is the same for all vectors.

        Args:
            vector: float64 on the CPU, shape (d,), of norm at most C; None if the client does not
                participate.
            generator: On the CPU.
        """

    @abstractmethod
    def check_numbers(self, numbers: bytes) -> None:
        """Refuses numbers that no honest client sends.

        Args:
            numbers: The packed numbers of a report.

        Raises:
            ValueError: If a number is out of range.
        """

    def keep(self, stored: list[Any], numbers: bytes) -> None:
        """Adds the numbers of a report to the stored ones."""
        stored.append(numbers)

    @abstractmethod
    def merge(self, stored: list[Any], mixed: bytes, num_reports: int) -> None:
        """Adds the output of another shuffler to the stored reports.

        Raises:
            ValueError: If the output does not match its number of reports.
        """

    @abstractmethod
    def mix(self, stored: list[Any], generator: torch.Generator) -> bytes:
        """Returns the output of the shuffler, which does not depend on the order of the reports."""

    def check_size(self, mixed: bytes, num_reports: int) -> None:
        """Raises an error if mixed reports do not match their stated number."""
        if len(mixed) not in self.sizes(num_reports):
            raise _mismatch(num_reports)

    def sizes(self, num_reports: int) -> range:
        """Returns the possible sizes in bytes of ``num_reports`` mixed reports."""
        return range(most := num_reports * self.bytes_per_report, most + 1)

    @abstractmethod
    def estimate(self, mixed: bytes, num_reports: int) -> torch.Tensor:
        """Returns the unbiased estimate of the sum of all vectors: float64, shape (d,).

        Args:
            mixed: The output of :meth:`mix`.
            num_reports: The number of clients that reported.
        """

    def sent(self, rounds: int) -> Communication:
        """Returns how much a client sends in ``rounds`` rounds."""
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
        """The size in bytes of the numbers of a report."""

    @property
    def report_size(self) -> int:
        """The size in bytes of a report with its header."""
        return _HEADER.size + self.bytes_per_report

    def encode(
        self, number: int, vector: torch.Tensor | None, generator: torch.Generator | None = None
    ) -> bytes:
        """Returns one client's report of a round: clipped, noised and packed.

        Args:
            number: The round.
            vector: Shape (d,), any norm. A vector whose norm is not finite in double precision is
                reported as zero. None if the client does not participate.
            generator: On the CPU. By default, its key is from the operating system.

        Raises:
            ValueError: If the vector is not a dense real tensor of this shape.
        """
        check_generator("generator", generator)
        round_ = integer("number", number, minimum=0, maximum=LARGEST_ROUND)
        clipped = None if vector is None else self.clip(vector)
        header = _HEADER.pack(round_, self.fingerprint)
        draws = SecretGenerator(secure=True) if generator is None else generator
        return header + self.randomize(clipped, draws)

    def clip(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the vector in float64 on the CPU, clipped to norm C; zero if it is not finite."""
        given = instance_of("vector", vector, (torch.Tensor,)).detach()
        if given.shape != (self.dimension,):
            raise ValueError(
                f"vector must have shape ({self.dimension},), got {tuple(given.shape)}: "
                "flatten and concatenate its tensors"
            )
        if given.layout != torch.strided or given.is_complex() or given.is_meta:
            raise ValueError(
                f"vector must be a dense tensor of real numbers, got {given.layout}, "
                f"{given.dtype}, {given.device}"
            )
        point = given.to("cpu", torch.float64)
        # Squares of entries below 1e-154 underflow, which changes no norm in the range of C.
        norm = float(torch.linalg.vector_norm(point))
        if norm <= self.max_norm:
            return point
        if not math.isfinite(norm):
            return torch.zeros_like(point)
        # Slightly shorter, so that rounding cannot make it longer than C.
        return point * (self.max_norm / norm * (1 - 2**-40))

    def open(self, report: bytes) -> tuple[int, bytes]:
        """Reads the round and the numbers of a report.

        Raises:
            ValueError: If the report is not of this format. The message does not contain its
                numbers.
        """
        if not isinstance(report, bytes) or len(report) != self.report_size:
            got = len(report) if isinstance(report, bytes) else type(report).__name__
            raise ValueError(f"report must be {self.report_size} bytes, got {got}")
        round_, fingerprint = _HEADER.unpack_from(report)
        self.check_fingerprint("the report's client", fingerprint)
        numbers = report[_HEADER.size :]
        self.check_numbers(numbers)
        return round_, numbers


def _mismatch(num_reports: int) -> ValueError:
    """Returns the error for the output of a shuffler that states a wrong number of reports."""
    return ValueError(
        f"the output of a shuffler does not match its stated report count, {num_reports}: check "
        "that all shufflers have the same version"
    )


class ShuffledSumReports(ReportFormat):
    """Reports a vector as bits on a grid with noise bits; the shuffler adds up the ones.

    A client sends its number of ones in each coordinate. If it does not participate, it reports
    zero, which is indistinguishable from another vector. The sum is as private as a trusted
    server's.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: The noise of the **sum**, over C, as in DP-SGD.
        num_users: n, all clients; each sends a report in every round.
        sample_rate: γ, the probability that a client's vector is in its report.
        sampling: ``"poisson"``: each client tosses a coin for every round. ``"random_allocation"``:
            γ is 1/t, and each client's vector is in one of every t rounds (an epoch), by a uniform
            draw of its own at the first of them. A client that misses the first round does not
            participate in the epoch. A begun epoch is accounted in full.
        delta: δ of the whole run. Binomial tails use a millionth of it.
        rounds: The rounds of the run, which share these tails.
        honest_fraction: The share of clients that certainly follow the protocol.
        min_reports: The smallest number of reports of a round; by default all clients'. The
            accountant relies on the noise of this number minus the clients that may be dishonest,
            which must be at least a third of all clients.

    Formal Guarantees:
        The output of the shuffler is one number per coordinate, the sum of all ones. This is the
        round of ``shuffled_sums`` with secret coins, for which
        :class:`~opacus_shuffle.accountants.mechanisms.shuffled_sums.ShuffledSums` has the proof.
    """

    kind: ClassVar[str] = "shuffled_sum_reports"
    max_summands = 1  # how many counts one packed number must be able to hold the sum of

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
                f"min_reports={self.min_reports} and honest_fraction={honest_fraction} guarantee "
                f"{self.honest_reports} honest reports, but ShuffledSumReports requires a third of "
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
        planned = ("granularity", "noise_bits", "bit_probability")
        self.plan = {name: getattr(self.protocol, name) for name in planned}
        self.bits = self.protocol.granularity + self.protocol.noise_bits

    @functools.cached_property
    def count_type(self) -> np.dtype:
        """The smallest unsigned integer type that holds the largest count."""
        largest = self.max_summands * self.bits
        return np.dtype(next(f"<u{size}" for size in (1, 2, 4, 8) if largest < 256**size))

    @property
    def bytes_per_report(self) -> int:
        """The size in bytes of the counts of a report."""
        return self.dimension * self.count_type.itemsize

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns the number of ones in each coordinate, packed."""
        own = torch.zeros(self.dimension) if vector is None else vector
        ones = self.protocol.randomize(own, generator)
        return ones.numpy().astype(self.count_type).tobytes()

    def check_numbers(self, numbers: bytes) -> None:
        """Refuses counts of more ones than there are bits."""
        largest = int(np.frombuffer(numbers, self.count_type).max())
        if largest > self.bits:
            raise ValueError(f"report counts {largest} ones in a coordinate of {self.bits} bits")

    def keep(self, stored: list[Any], numbers: bytes) -> None:
        """Adds the counts of a report to the stored sum."""
        self._add(stored, np.frombuffer(numbers, self.count_type))

    def merge(self, stored: list[Any], mixed: bytes, num_reports: int) -> None:
        """Adds the sum of counts of another shuffler."""
        self.check_size(mixed, num_reports)
        counts = np.frombuffer(mixed, "<i8")
        if counts.min() < 0 or counts.max() > num_reports * self.bits:
            raise _mismatch(num_reports)
        self._add(stored, counts)

    def _add(self, stored: list[Any], counts: npt.NDArray[Any]) -> None:
        if not stored:
            stored.append(np.zeros(self.dimension, np.int64))
        np.add(stored[0], counts, out=stored[0], dtype=np.int64, casting="same_kind")

    def mix(self, stored: list[Any], generator: torch.Generator) -> bytes:
        """Returns the sum of the counts."""
        return stored[0].astype("<i8").tobytes()

    def sizes(self, num_reports: int) -> range:
        """Returns the size of a sum: eight bytes per coordinate."""
        return range(8 * self.dimension, 8 * self.dimension + 1)

    def estimate(self, mixed: bytes, num_reports: int) -> torch.Tensor:
        """Returns the estimate of the sum from the number of ones."""
        ones = np.frombuffer(mixed, "<i8").astype(np.int64)
        return self.protocol.decode(torch.from_numpy(ones), num_reports)


class VectorReports(ReportFormat):
    """The base of reports in single precision, each with its own noise and its vector as mean.

    Args:
        noise_multiplier: σ of each report, over C.
        **options: The arguments of every format.

    Attributes:
        scale: σC, the standard deviation of a report's noise, absolute.
        longest_report: The norm that an honest report exceeds with probability at most 10⁻³⁰.
    """

    def __init__(self, *, noise_multiplier: float, **options: Any) -> None:
        super().__init__(**options)
        self.noise_multiplier = noise_level("noise_multiplier", noise_multiplier)
        self.scale = self.noise_multiplier * self.max_norm

    def noise_norm(self, probability: float) -> float:
        """Returns the norm, over σC, that noise alone exceeds with this probability."""
        return math.sqrt(2 * float(gammainccinv(self.dimension / 2, probability)))

    def set_longest_report(self, longest: float) -> None:
        """Sets the largest norm, over σC, of reports that are accepted.

        Raises:
            ValueError: If such reports exceed the range of single precision.
        """
        self.longest_report = self.scale * longest
        if not (self.scale >= _LEAST and self.longest_report <= _MOST):
            raise ValueError(
                f"max_norm={self.max_norm} with noise_multiplier={self.noise_multiplier} exceeds "
                "the range of single precision, in which reports are sent: scale the vectors"
            )

    @staticmethod
    def packed(steps: torch.Tensor, step: float) -> bytes:
        """Rounds a report to its grid and packs it. The argument is overwritten.

        The report was computed in double precision and is rounded once, here. The last bits of a
        floating-point sum can reveal whether a vector was added (Mironov 2012); multiples of a grid
        cannot.

        Args:
            steps: The report in grid steps, shape (d,).
            step: The grid step, absolute, a power of two.
        """
        return steps.round_().mul_(step).numpy().astype("<f4").tobytes()

    @property
    def bytes_per_report(self) -> int:
        """The size in bytes of the numbers of a report: four per coordinate."""
        return 4 * self.dimension

    def check_numbers(self, numbers: bytes) -> None:
        """Refuses numbers that are not finite, and reports longer than any honest one."""
        values = np.frombuffer(numbers, "<f4").astype(np.float64)
        # Not by BLAS, whose threads would wait for each other in a service.
        norm = math.sqrt(np.square(values).sum())
        if not norm <= self.longest_report:  # also refuses NaN
            raise ValueError(
                f"report has norm {norm:.3g}, and honest reports do not exceed "
                f"{self.longest_report:.3g}"
            )

    def merge(self, stored: list[Any], mixed: bytes, num_reports: int) -> None:
        """Adds the reports of another shuffler."""
        size = self.bytes_per_report
        if num_reports > self.num_users:
            raise _mismatch(num_reports)
        self.check_size(mixed, num_reports)
        reports = [mixed[start : start + size] for start in range(0, len(mixed), size)]
        for report in reports:
            self.check_numbers(report)
        stored += reports

    def mix(self, stored: list[Any], generator: torch.Generator) -> bytes:
        """Returns the reports in random order."""
        return b"".join(stored[index] for index in permutation(len(stored), generator))

    def estimate(self, mixed: bytes, num_reports: int) -> torch.Tensor:
        """Returns the sum of the reports."""
        reports = np.frombuffer(mixed, "<f4").reshape(-1, self.dimension)
        for report in reports:
            self.check_numbers(report.tobytes())  # again, as the shuffler is another party
        return torch.from_numpy(reports.sum(axis=0, dtype=np.float64))


class GaussianReports(VectorReports):
    """Reports a vector clipped to norm C plus N(0, σ²C²I), in single precision.

    A client that does not participate sends zeros, which noise never is. The shuffler counts the
    client, and removes its report when it mixes. Until then it stores the report like any other, so
    that the time to process a report does not depend on the coin.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: σ of each report, over C.
        num_users: n, all clients.
        sample_rate: γ, the probability that a client participates in a round.
        honest_fraction: The share of clients that certainly follow the protocol.
        min_reports: The smallest number of reports of a round; by default all clients'.

    Formal Guarantees:
        The accountant's mechanism covers all reports of a round in random order, and their number:
        ``shuffled_checkin``, or ``shuffle_gauss`` if every client participates, with the honest
        reports as its users.
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
        self.set_longest_report(1 / self.noise_multiplier + self.noise_norm(_REFUSED))
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
        """Returns the vector with noise, rounded to a grid once; zeros without a vector."""
        if vector is None:
            return bytes(self.bytes_per_report)
        stream = stream_of(generator)
        step = GridNoise(self.scale, stream).step
        steps = stream.precise_normals(self.dimension).mul_(self.scale / step)
        return self.packed(steps.add_(vector, alpha=1 / step), step)

    def mix(self, stored: list[Any], generator: torch.Generator) -> bytes:
        """Returns the reports of the participating clients in random order."""
        blank = bytes(self.bytes_per_report)
        return super().mix([numbers for numbers in stored if numbers != blank], generator)

    def sizes(self, num_reports: int) -> range:
        """Returns the possible sizes in bytes: any number of clients may participate."""
        return range(0, super().sizes(num_reports).stop, self.bytes_per_report)


class SecretReports(VectorReports):
    """Reports a vector with noise if the client participates, and noise alone if it does not.

    No party can distinguish the two, not even the shuffler. Clients that do not participate hide
    those that do, and the coin hides every client. All reports are computed by the same steps and
    rounded to the same grid, because a vector plus noise could otherwise have bits that noise alone
    never has.

    Args:
        dimension: d.
        max_norm: C, absolute.
        noise_multiplier: σ of each report, over C. The sum of n reports carries √n·σC.
        num_users: n, all clients.
        sample_rate: q, below 1, the probability that a client's vector is in its report.
        report: ``"linear"``: the noise along the vector has a tilted density instead of a shifted
            one. ``"gaussian"``: the vector is added to N(0, σ²C²I). ``"step"``: the noise along the
            vector exceeds a threshold more often, which bounds what a single report reveals. If
            hundreds of clients send noise alone, linear reports have the smallest ε at a given σ.
        honest_fraction: The share of clients that certainly follow the protocol.
        min_reports: The smallest number of reports of a round; by default all clients'.

    Attributes:
        grid: The grid step of all numbers of a report, absolute. It is a power of two of which
            single precision represents all multiples up to the longest report.

    Formal Guarantees:
        ``secret_checkin`` covers all reports of a round in random order, with the honest reports as
        its users (docs/proofs/12_secret_checkin.md). A client's vector may depend on its records
        and on everything released, but not on its own earlier coins or noise. Whether a client
        reports must depend neither on its coin nor on its records.
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
            self.set_longest_report(1 / self.noise_multiplier + self.noise_norm(_REFUSED))
        else:
            # The density of such a report over that of noise alone is X. By Cauchy and Schwarz,
            # P(A)² ≤ E X²·(the probability of A under noise alone).
            square = 1 + math.exp(shape_of(report, self.noise_multiplier).log_variance)
            self.set_longest_report(self.noise_norm(_REFUSED**2 / square))
        self.grid = float(np.spacing(np.float32(self.longest_report)))

    def randomize(self, vector: torch.Tensor | None, generator: torch.Generator) -> bytes:
        """Returns a report. Without a vector it is a report of zero, which is noise alone."""
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
        """Returns a linear or step report in units of its noise; the same steps run for zero.

        With probability norm/C the component along the vector is drawn from the tilted density.
        """
        norm = torch.linalg.vector_norm(point)
        # Shorter vectors, whose computed norms are inexact, keep the component of the noise.
        unit = point / norm.clamp_min(_SHORTEST)
        (uniform,), signed = stream.uniforms(1), stream.signed_uniforms(1)
        (drawn,) = tilted(signed, self.noise_multiplier, self.report)
        component = torch.where(uniform < norm / self.max_norm, drawn, unit @ noise)
        return report_along(unit, component, noise)
