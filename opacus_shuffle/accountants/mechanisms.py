"""What ran: one frozen record per mechanism, apart from how it is accounted.

In the shuffle-Gaussian family a report is a vector clipped to norm C plus its sender's own N(0, σ²C²I), and the adversary sees
the round's reports in random order (and how many there are): ``noise_multiplier`` is that local σ. :class:`ShuffledWeights` is
DP-SGD, one trusted server that adds noise once to the sum, followed by a permutation of weights: there it is the sum's σ. So it
is for :class:`ShuffledSums`, whose reports are bits that only add up to a noised sum.

>>> ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1).expected_reports
6000.0
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from opacus_shuffle.analysis.fenton_wilkinson import dimensions
from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.core.validation import (
    finite_number,
    integer,
    noise_level,
    one_of,
    open_unit_interval,
    positive,
    sampling_rate,
)


def whole_reports(expected: float) -> int:
    """A product n·γ as a whole count: rounding noise forgiven, any other fraction dropped (fewer reports hide less)."""
    return round(expected) if abs(expected - round(expected)) < 1e-6 else math.floor(expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """One round.

    Attributes:
        name: The accountant that goes with it.
        sampling: How the round's users are chosen, in the words of :mod:`opacus_shuffle.analysis.mean_ratio`.
        released: What the adversary sees in the end, in words.
        noise_multiplier: Local σ, in units of the clipping norm (:class:`ShuffledWeights`: that of the sum).
        num_users: n, the whole population.
        sample_rate: γ, the expected share of it in the round.
    """

    name: ClassVar[str]
    sampling: ClassVar[Sampling]
    released: ClassVar[str] = "all the shuffled reports"
    zeroed: ClassVar[str] = "one record's report is noise alone"
    noise_multiplier: float
    num_users: int
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", noise_level("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "num_users", integer("num_users", self.num_users))
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
    sampling: ClassVar[Sampling] = "fixed_size"

    def __post_init__(self) -> None:
        super().__post_init__()
        reports = integer("round(sample_rate * num_users)", round(self.expected_reports))
        object.__setattr__(self, "sample_rate", reports / self.num_users)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledCheckIn(Mechanism):
    """Each of the users reports with probability γ, by its own coin (SG Theorem 3)."""

    name: ClassVar[str] = "shuffled_checkin"
    sampling: ClassVar[Sampling] = "poisson"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledWeights(Mechanism):
    """WS Algorithm 1: DP-SGD on Poisson samples, the noised sum and the weights permuted at every step.

    Attributes:
        noise_multiplier: σ of the **sum** in units of ``clip`` (DP-SGD's own multiplier), for the parameters that are permuted.
        dimension: d, how many coordinates are permuted; 1 is DP-SGD without shuffling. Several numbers are WS's theorem read
            layer by layer, each layer a release of its own.
        clip: c, the norm that each record's gradient is clipped to.
        batch_clip: c′, the norm that the sum is clipped to before the noise, in the same units; by default c.
        unshuffled_noise_multiplier: σ₀ of the parameters that stay where they are; None if there are none.
        orbit: The fewest places that a permuted entry can get to; None for d, as WS takes it (no network's permutations mix
            all its parameters).
    """

    name: ClassVar[str] = "shuffled_fw"
    sampling: ClassVar[Sampling] = "poisson"
    released: ClassVar[str] = "all released weights and gradients"
    zeroed: ClassVar[str] = "one record's gradients are zero"
    dimension: int | tuple[int, ...] = 0
    clip: float = 1.0
    batch_clip: float | None = None
    unshuffled_noise_multiplier: float | None = None
    orbit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.orbit is not None:
            object.__setattr__(self, "orbit", integer("orbit", self.orbit))
        if isinstance(self.dimension, int) and self.dimension == 0:
            raise ValueError(
                "shuffled_fw needs dimension, the number of coordinates that are permuted (1: none): pass dimension=, or train "
                "with opacus_shuffle.PrivacyEngine and shuffle_weights=True, which counts them"
            )
        layers = dimensions(self.dimension)
        object.__setattr__(self, "dimension", layers[0] if len(layers) == 1 else layers)
        object.__setattr__(self, "clip", positive("clip", self.clip))
        norm = self.clip if self.batch_clip is None else self.batch_clip
        object.__setattr__(self, "batch_clip", norm if norm == math.inf else positive("batch_clip", norm))
        if self.unshuffled_noise_multiplier is not None:
            sigma = noise_level("unshuffled_noise_multiplier", self.unshuffled_noise_multiplier)
            if sigma < self.noise_multiplier:
                raise ValueError(
                    f"unshuffled_noise_multiplier must not be below noise_multiplier={self.noise_multiplier}, got {sigma}: the "
                    "parameters that stay have no less noise than those that move (WS Algorithm 1, line 16)"
                )

    @property
    def layers(self) -> tuple[int, ...]:
        """The dimensions, one per release."""
        return dimensions(self.dimension)

    @property
    def record_norm(self) -> float:
        """How far one record can move the clipped sum from zero, over ``clip``: at most 1."""
        return min(1.0, (self.batch_clip or self.clip) / self.clip)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledSums(Mechanism):
    """SCO Algorithm 2: clipped vectors summed by a multi-message shuffle protocol, on samples of fixed size.

    The adversary sees every bit with its coordinate, so the sum of all rounded vectors and binomial noise. Plain numbers for
    these fields come from a :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum`.

    Attributes:
        noise_multiplier: 2/μ: over the clipping norm, the noise of the Gaussian mechanism on the **sum** that is no more
            private than a round. (Replacing a record moves the sum by up to twice the norm.)
        num_users: n, the whole data set.
        sample_rate: γ = B/n, the share of it in each round, drawn afresh and in secret.
        dimension: d, entries of a vector.
        granularity: g, steps of the grid from −C to C.
        noise_trials: m, the honest reports' noise bits of one coordinate together.
        bit_probability: p, that a noise bit is 1.
        lost: The probability that μ does not cover, one round.
        epsilon: ε of one round by the protocol's own calibration, everyone in it.
        delta: δ of one round, likewise.
        calibration: ``"published"`` (SCO Theorem A.6's constants) or ``"tight"``.
        honest_fraction: The share of a round's reports that carry their noise for certain.
    """

    name: ClassVar[str] = "shuffled_sums"
    sampling: ClassVar[Sampling] = "fixed_size"
    released: ClassVar[str] = "all the shuffled messages"
    zeroed: ClassVar[str] = "one record's gradient is zero"
    dimension: int = 0
    granularity: int = 0
    noise_trials: int = 0
    bit_probability: float = 0.5
    lost: float = 0.0
    epsilon: float = 0.0
    delta: float = 0.0
    calibration: str = "tight"
    honest_fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimension == 0:
            raise ValueError(
                "shuffled_sums is described by its protocol, not by a noise_multiplier alone: build an "
                "opacus_shuffle.sco.ShuffleVectorSum, whose statement() and exact_epsilon() say what it costs, and train with "
                "PrivacyEngine(accountant='shuffled_sums').make_private(..., aggregator=protocol)"
            )
        for field in ("dimension", "granularity", "noise_trials"):
            object.__setattr__(self, field, integer(field, getattr(self, field)))
        for field in ("bit_probability", "delta"):
            object.__setattr__(self, field, open_unit_interval(field, getattr(self, field)))
        if not 0 <= finite_number("lost", self.lost) < 1:
            raise ValueError(f"lost must lie in [0, 1), got {self.lost!r}")
        positive("epsilon", self.epsilon)
        one_of("calibration", self.calibration, ("published", "tight"))
        sampling_rate("honest_fraction", self.honest_fraction)
        reports = integer("round(sample_rate * num_users)", round(self.expected_reports))
        object.__setattr__(self, "sample_rate", reports / self.num_users)

    @property
    def bits_per_report(self) -> int:
        """What one record sends in a round."""
        honest = max(1, math.ceil(self.expected_reports * self.honest_fraction - 1e-9))
        return self.dimension * (self.granularity + self.noise_trials // honest)

    @property
    def mu(self) -> float:
        """μ of one round that everyone takes part in, replacement adjacency."""
        return 2 / self.noise_multiplier

    @property
    def noise_std(self) -> float:
        """The binomial noise of one coordinate of the sum, honest reports' alone, over the clipping norm."""
        variance = self.noise_trials * self.bit_probability * (1 - self.bit_probability)
        return 2 * math.sqrt(variance) / self.granularity


MECHANISMS: dict[str, type[Mechanism]] = {
    mechanism.name: mechanism for mechanism in (ShuffleGauss, SubsampledShuffle, ShuffledCheckIn, ShuffledWeights, ShuffledSums)
}
