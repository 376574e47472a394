"""Secret check-in: all users report in every round, and non-participants send noise alone.

Nobody learns who participates: neither the server, nor the shuffler, nor an observer of the
network. Takagi and Liew's blanket mixing (arXiv 2604.28032) is similar; the theorems are this
library's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism, described
from opacus_shuffle.accountants.mechanisms.shuffle_gaussian import GaussianReports
from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.analysis.report_shapes import (
    LEAST_TILTED_NOISE,
    SHAPES,
    pure_epsilon,
    shape_of,
)
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.validation import one_of, sampling_rate
from opacus_shuffle.protocols.calibration import honest_users


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecretCheckIn(GaussianReports):
    """One round in which each of the n users tosses a secret coin of rate q.

    With probability q the user's report is its clipped vector with noise, else it is noise alone.

    Attributes:
        noise_multiplier: σ, the standard deviation of one report's noise over the clipping norm,
            where the mean of a report is the vector. The sum of all reports carries √n·σ.
        num_users: n, all of whom report.
        sample_rate: q, the rate of the coins: the expected share of participants.
        report: The distribution of a participant's report. ``"linear"``: its component along the
            vector has a linearly tilted density. ``"gaussian"``: the vector plus N(0, σ²C²I).
            ``"step"``: its component along the vector exceeds a threshold more often than that of
            noise alone. If hundreds of users send noise alone, linear reports have the smallest ε
            at the same σ. Only step reports have a :meth:`pure_local_epsilon`.
        honest_fraction: The share of the users who follow the protocol and keep noise and coins
            secret.

    Raises:
        ValueError: If a field is out of range.
    """

    name: ClassVar[str] = "secret_checkin"
    sampling: ClassVar[Sampling] = "poisson"
    zeroed: ClassVar[str] = "one record's reports are noise alone"
    least_noise: ClassVar[float] = LEAST_TILTED_NOISE
    num_users: int = described("n, all of whom report in every round", "N")
    sample_rate: float = described("q, with which a user's vector is in its report", "Q")
    report: str = described(
        "the shape of the reports of who takes part",
        "SHAPE",
        choices=tuple(SHAPES),
        default="linear",
    )
    honest_fraction: float = described(
        "share of the users who keep their noise and coins secret", "SHARE", default=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("report", self.report, tuple(SHAPES))
        self._set(honest_fraction=sampling_rate("honest_fraction", self.honest_fraction))
        if self.sample_rate == 1:
            raise ValueError(
                "sample_rate of secret_checkin must be below 1: with 1 everyone participates, "
                "nobody sends noise alone, and no report hides another; pass less (in training: "
                "batches smaller than the data set), or use shuffle_gauss"
            )
        if self.report != "gaussian" and self.noise_multiplier < LEAST_TILTED_NOISE:
            raise ValueError(
                f"noise_multiplier of {self.report} reports must be at least {LEAST_TILTED_NOISE}, "
                f"got {self.noise_multiplier}: with less noise most reports reveal their sender; "
                "pass more, or report='gaussian'"
            )

    @classmethod
    def of_batch(
        cls, *, noise_multiplier: float, num_users: int, emulated: bool = False, **fields: Any
    ) -> Mechanism:
        """Returns the round of one training step, where the noise on the sum is that of all users.

        Reports are Gaussian, as Opacus's noise is, unless another shape is passed.
        """
        if emulated:
            noise_multiplier /= math.sqrt(num_users)
        fields.setdefault("report", "gaussian")
        return super().of_batch(noise_multiplier=noise_multiplier, num_users=num_users, **fields)

    def pure_local_epsilon(self, *, adjacency: str = "zero_out") -> float:
        """Returns one round's ε at δ = 0 for an adversary who sees the sender of every report.

        Such adversaries are the shuffler and the network. The values of rounds add up. It is
        rounded up, and infinite unless ``report`` is ``"step"``, because the likelihood ratios of
        other reports are not bounded. docs/proofs (13.9) covers the effect of double precision.
        """
        return pure_epsilon(
            shape_of(self.report, self.noise_multiplier),
            self.sample_rate,
            Adjacency(adjacency).distance,
        )

    @property
    def honest_users(self) -> int:
        """h, the users whose coins and noise hide each other, with the attacked user."""
        return honest_users(self.num_users, self.honest_fraction)

    @property
    def noised_reports(self) -> float:
        """The number of reports whose noise is in the sum: all users."""
        return float(self.num_users)

    @property
    def reporting_rate(self) -> float:
        """All users report in every round."""
        return 1.0
