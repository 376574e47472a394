"""What ran: one frozen record per mechanism of the shuffle-Gaussian family, apart from how it is accounted.

In every one of them a report is a vector clipped to norm C plus its sender's own N(0, σ²C²I), and the adversary sees the
round's reports in random order (and how many there are). ``noise_multiplier`` is always that local σ.

>>> ShuffledCheckIn.from_population(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1).expected_reports
6000.0
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

from opacus_shuffle.validation import positive, sampling_rate, whole_number

if TYPE_CHECKING:
    from typing_extensions import Self


def whole_reports(expected: float) -> int:
    """A product n·γ as a whole count: rounding noise forgiven, any other fraction dropped (fewer reports hide less)."""
    return round(expected) if abs(expected - round(expected)) < 1e-6 else math.floor(expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism(abc.ABC):
    """One round; ``noise_multiplier`` is the local σ, in units of the clipping norm."""

    name: ClassVar[str]
    noise_multiplier: float
    num_users: int

    def __post_init__(self) -> None:
        positive("noise_multiplier", self.noise_multiplier)
        whole_number("num_users", self.num_users)

    @classmethod
    @abc.abstractmethod
    def from_population(cls, *, noise_multiplier: float, num_users: int, sample_rate: float) -> Self:
        """The round of ``num_users`` users who each take part at rate ``sample_rate``."""

    @property
    def expected_reports(self) -> float:
        """Reports per round: exact where the number is fixed, else its mean."""
        return float(self.num_users)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleGauss(Mechanism):
    """All ``num_users`` users of the round report (SG Theorem 1)."""

    name: ClassVar[str] = "shuffle_gauss"

    @classmethod
    def from_population(cls, *, noise_multiplier: float, num_users: int, sample_rate: float) -> Self:
        """A round of n users; in training each batch of B records is one, and being sampled earns nothing."""
        if sampling_rate("sample_rate", sample_rate) != 1.0:
            raise ValueError(
                f"shuffle_gauss gains nothing from sampling, got sample_rate={sample_rate}: pass num_users = reports per "
                "round, or use subsampled_shuffle or shuffled_checkin"
            )
        return cls(noise_multiplier=noise_multiplier, num_users=whole_number("num_users", num_users))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubsampledShuffle(Mechanism):
    """Exactly ``sample_size`` of the ``num_users`` users report, a fresh uniform draw each round (SG Theorem 2)."""

    name: ClassVar[str] = "subsampled_shuffle"
    sample_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if whole_number("sample_size", self.sample_size) > self.num_users:
            raise ValueError(f"sample_size must not exceed num_users={self.num_users}, got {self.sample_size}")

    @classmethod
    def from_population(cls, *, noise_multiplier: float, num_users: int, sample_rate: float) -> Self:
        """M = round(γ·n) of n users."""
        users = whole_number("num_users", num_users)
        size = round(sampling_rate("sample_rate", sample_rate) * users)
        return cls(noise_multiplier=noise_multiplier, num_users=users, sample_size=size)

    @property
    def expected_reports(self) -> float:
        """m, exactly."""
        return float(self.sample_size)

    @property
    def sample_rate(self) -> float:
        """γ = m/n."""
        return self.sample_size / self.num_users


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledCheckIn(Mechanism):
    """Each of the ``num_users`` users reports with probability ``sample_rate``, by its own coin (SG Theorem 3)."""

    name: ClassVar[str] = "shuffled_checkin"
    sample_rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        sampling_rate("sample_rate", self.sample_rate)

    @classmethod
    def from_population(cls, *, noise_multiplier: float, num_users: int, sample_rate: float) -> Self:
        """Rate γ among n users."""
        users = whole_number("num_users", num_users)
        return cls(noise_multiplier=noise_multiplier, num_users=users, sample_rate=sample_rate)

    @property
    def expected_reports(self) -> float:
        """γ·n on average."""
        return self.num_users * self.sample_rate


MECHANISMS: dict[str, type[Mechanism]] = {
    mechanism.name: mechanism for mechanism in (ShuffleGauss, SubsampledShuffle, ShuffledCheckIn)
}
