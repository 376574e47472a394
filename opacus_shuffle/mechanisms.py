"""What ran: one frozen record per mechanism of the shuffle-Gaussian family, apart from how it is accounted.

In every one of them a report is a vector clipped to norm C plus its sender's own N(0, σ²C²I), and the adversary sees the
round's reports in random order (and how many there are). ``noise_multiplier`` is always that local σ.

>>> ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1).expected_reports
6000.0
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.validation import noise_level, sampling_rate, whole_number


def whole_reports(expected: float) -> int:
    """A product n·γ as a whole count: rounding noise forgiven, any other fraction dropped (fewer reports hide less)."""
    return round(expected) if abs(expected - round(expected)) < 1e-6 else math.floor(expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One round.

    Attributes:
        name: The accountant that goes with it.
        sampling: How the round's users are chosen, in the words of :mod:`opacus_shuffle.analysis.mean_ratio`.
        noise_multiplier: Local σ, in units of the clipping norm.
        num_users: n, the whole population.
        sample_rate: γ, the expected share of it in the round.
    """

    name: ClassVar[str]
    sampling: ClassVar[Sampling]
    noise_multiplier: float
    num_users: int
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", noise_level("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "num_users", whole_number("num_users", self.num_users))
        object.__setattr__(self, "sample_rate", sampling_rate("sample_rate", self.sample_rate))

    @property
    def expected_reports(self) -> float:
        """Reports per round: exact where their number is fixed, else its mean."""
        return self.num_users * self.sample_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleGauss(Mechanism):
    """All ``num_users`` users of the round report (SG Theorem 1); in training, the records of the batch."""

    name: ClassVar[str] = "shuffle_gauss"
    sampling: ClassVar[Sampling] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_rate != 1.0:
            raise ValueError(
                f"shuffle_gauss gains nothing from sampling, got sample_rate={self.sample_rate}: pass num_users = reports "
                "per round, or use subsampled_shuffle or shuffled_checkin"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubsampledShuffle(Mechanism):
    """Exactly m = round(γ·n) of the users report, a fresh uniform draw each round (SG Theorem 2); γ becomes m/n."""

    name: ClassVar[str] = "subsampled_shuffle"
    sampling: ClassVar[Sampling] = "without_replacement"

    def __post_init__(self) -> None:
        super().__post_init__()
        reports = whole_number("round(sample_rate * num_users)", round(self.expected_reports))
        object.__setattr__(self, "sample_rate", reports / self.num_users)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledCheckIn(Mechanism):
    """Each of the users reports with probability γ, by its own coin (SG Theorem 3)."""

    name: ClassVar[str] = "shuffled_checkin"
    sampling: ClassVar[Sampling] = "check_in"


MECHANISMS: dict[str, type[Mechanism]] = {
    mechanism.name: mechanism for mechanism in (ShuffleGauss, SubsampledShuffle, ShuffledCheckIn)
}
