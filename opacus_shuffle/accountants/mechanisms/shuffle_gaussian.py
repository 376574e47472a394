"""Liew and Takahashi's shuffle Gaussian mechanisms (SG).

There is one for each of the Theorems 1, 2 and 3, which differ in the sampling of users. A report is
a vector clipped to norm C plus N(0, σ²C²I), added by its sender. The adversary sees the round's
reports in random order, and their number. ``noise_multiplier`` is the local σ.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism, described
from opacus_shuffle.analysis.mean_ratio import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianReports(Mechanism):
    """A round in which users send their vectors with Gaussian noise."""

    @property
    def bits_per_coordinate(self) -> int:
        """The bits of a number in single precision, which training sends."""
        return 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleGauss(GaussianReports):
    """All ``num_users`` users of the round report (SG Theorem 1).

    In training they are the records of the batch.

    Attributes:
        noise_multiplier: σ of **each report**, over the clipping norm.
        num_users: n, the users of one round.
        sample_rate: Leave it at 1: everyone reports.
    """

    name: ClassVar[str] = "shuffle_gauss"
    sampling: ClassVar[Sampling] = None
    num_users: int = described("n, the users of one round, all of whom report", "N")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_rate != 1.0:
            raise ValueError(
                f"shuffle_gauss gains nothing from sampling, got sample_rate={self.sample_rate}: "
                "pass num_users = reports per round, or use subsampled_shuffle or shuffled_checkin"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubsampledShuffle(GaussianReports):
    """Exactly m = round(γ·n) of the users report, a fresh uniform draw each round (SG Theorem 2).

    γ becomes m/n.

    Attributes:
        noise_multiplier: σ of **each report**, over the clipping norm.
        num_users: n, the population.
        sample_rate: γ in (0, 1], the share that is drawn.
    """

    name: ClassVar[str] = "subsampled_shuffle"
    sampling: ClassVar[Sampling] = "fixed_size"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._round_the_sample()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledCheckIn(GaussianReports):
    """Each user reports with probability γ, by its own coin (SG Theorem 3).

    Attributes:
        noise_multiplier: σ of **each report**, over the clipping norm.
        num_users: n, all users who toss a coin.
        sample_rate: γ in (0, 1], the probability that a user reports.
    """

    name: ClassVar[str] = "shuffled_checkin"
    sampling: ClassVar[Sampling] = "poisson"
