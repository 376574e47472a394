"""Cheu, Joseph, Mao and Peng's shuffled vector sums (SCO Algorithm 2) on secret samples."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism, described
from opacus_shuffle.analysis.binomial_sums import (
    MOST_TRIALS,
    BinomialNoise,
    BinomialSum,
    gaussian_equivalent,
)
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.core.validation import (
    instance_of,
    integer,
    one_of,
    open_unit_interval,
    sampling_rate,
)
from opacus_shuffle.protocols.calibration import (
    SMALLEST_MULTIPLIER,
    SumBudget,
    honest_users,
    plan_with_noise_multiplier,
)

if TYPE_CHECKING:  # it needs PyTorch
    from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

TOLERANCE = 1e-6
"""Relative tolerance between σ and the value that follows from the bits.

The tails of SciPy versions differ by about 1e-9.
"""
ROUND_DELTA = 1e-9
"""The δ of a protocol that is built from a noise multiplier. Binomial tails take a millionth of it
in each round.
"""
SAMPLINGS = ("poisson", "fixed_size", "random_allocation")
_BITS = ("granularity", "noise_trials", "bit_probability", "tail")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledSums(Mechanism):
    """One round's sum of clipped vectors, each sent as shuffled bits together with noise bits.

    The adversary sees every bit with its coordinate, which amounts to the sum of all rounded
    vectors and binomial noise. The numbers describe a
    :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum`. :meth:`of_protocol` takes them
    from a protocol, and :meth:`build` chooses them for a noise multiplier.

    Attributes:
        noise_multiplier: 2/μ, the noise over the clipping norm of the Gaussian mechanism on the
            **sum** that covers a round. (Replacing a record moves the sum by up to twice the norm.)
            It must follow from the bits.
        num_users: n, the whole data set.
        sample_rate: γ, the expected share of it in each round.
        sampling: ``"poisson"``: all n users report in every round. A secret coin of rate γ decides
            whether a user's report contains its vector or zero. ``"fixed_size"``: γ·n users, drawn
            afresh and in secret, report. ``"random_allocation"``: all n users report in every
            round, and γ is 1/t. In every epoch of t rounds each user's vector is in one report, by
            a secret uniform draw. Steps are counted as in
            :class:`~opacus_shuffle.accountants.mechanisms.random_allocation.RandomAllocation`.
        dimension: d, entries of a vector.
        granularity: g, steps of the grid from −C to C.
        noise_trials: m, the honest reports' noise bits of one coordinate together, all reports of a
            round.
        bit_probability: p, that a noise bit is 1.
        tail: The share of δ that one round's binomial tails may take; :attr:`lost` is at most that.
        honest_fraction: The share of a round's reports that are certain to carry their noise.

    Raises:
        ValueError: If a number is out of range, or one of them does not follow from the bits.
    """

    name: ClassVar[str] = "shuffled_sums"
    released: ClassVar[str] = "all the shuffled messages"
    zeroed: ClassVar[str] = "one record's gradient is zero"
    noise_is_local: ClassVar[bool] = False
    trains_on_stock_engines: ClassVar[bool] = False
    least_noise: ClassVar[float] = SMALLEST_MULTIPLIER
    # The multiplier follows from the bits, but SciPy versions may round it differently.
    noise_multiplier: float = described(
        "noise of the sum over the clipping norm", "SIGMA", varies=True
    )
    sampling: str = described(  # type: ignore[assignment, misc]
        "who takes part: poisson (all report, each takes part by a secret coin), fixed_size, or "
        "random_allocation (all report, each takes part once in 1/GAMMA rounds)",
        "KIND",
        choices=SAMPLINGS,
        default="poisson",
    )
    dimension: int = described("entries of a vector, the trainable parameters", "D")
    granularity: int = described(
        "steps of the grid (default: chosen for the noise)", "G", default=0
    )
    noise_trials: int = described(
        "noise bits of one coordinate, all honest reports'", "M", default=0
    )
    bit_probability: float = described("that a noise bit is 1", "P", default=0.5)
    tail: float = described(
        "share of delta that binomial tails may take in one round", "P", default=0.0
    )
    honest_fraction: float = described(
        "share of the reports that carry their noise for certain", "SHARE", default=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("sampling", self.sampling, SAMPLINGS)
        if self.sampling == "fixed_size":
            self._round_the_sample()
        if self.sampling == "random_allocation":
            self._set(sample_rate=1 / _batches(self.sample_rate))
        granularity = integer("granularity", self.granularity, minimum=0)
        noise_trials = integer("noise_trials", self.noise_trials, minimum=0, maximum=MOST_TRIALS)
        if not granularity or not noise_trials:
            raise ValueError(
                "shuffled_sums is described by its bits (granularity, noise_trials, ...), not by a "
                "noise multiplier alone: let ShuffledSums.build choose them, or read them off a "
                "ShuffleVectorSum with ShuffledSums.of_protocol"
            )
        self._set(
            dimension=integer("dimension", self.dimension),
            granularity=granularity,
            noise_trials=noise_trials,
            bit_probability=open_unit_interval("bit_probability", self.bit_probability),
            tail=open_unit_interval("tail", self.tail),
        )
        open_unit_interval("1 - bit_probability", 1 - self.bit_probability)
        honest = sampling_rate("honest_fraction", self.honest_fraction)
        if honest < 1 and self.sample_rate < 1 and self.sampling == "fixed_size":
            raise ValueError(
                f"honest_fraction={self.honest_fraction} goes with sampling='poisson' or "
                f"sample_rate=1, got sampling={self.sampling!r} and "
                f"sample_rate={self.sample_rate}: the number of honest users in a sample is "
                "random, and dishonest users know which of them are in it; pass honest_fraction=1"
            )
        follows = 2 / gaussian_equivalent(self._sum, lost=self.tail)[0]
        if not math.isclose(follows, self.noise_multiplier, rel_tol=TOLERANCE):
            raise ValueError(
                "noise_multiplier must follow from the protocol's own bits (dimension, "
                f"granularity, noise_trials, bit_probability, tail), which give {follows!r}, got "
                f"{self.noise_multiplier!r}: let ShuffledSums.build or ShuffledSums.of_protocol "
                "compute it; a protocol's noise is fixed, another noise takes another protocol"
            )

    @classmethod
    def build(cls, **fields: Any) -> Mechanism:
        """Returns the mechanism with these fields.

        If the bits are missing, they are those of the protocol with this noise. A grid does not
        allow every noise, so the multiplier may exceed the given one by up to 5 %.
        """
        sound = {*cls.required_fields()} <= fields.keys() <= {*cls.field_names()}
        if any(fields.get(name) for name in _BITS) or not sound:
            return super().build(**fields)
        users = integer("num_users", fields["num_users"])
        rate = sampling_rate("sample_rate", fields.get("sample_rate", 1.0))
        sampling = fields.get("sampling", "poisson")
        everyone_reports = one_of("sampling", sampling, SAMPLINGS) != "fixed_size"
        reports = users
        if not everyone_reports:
            reports = integer("round(sample_rate * num_users)", round(rate * users))
        # What ShuffleVectorSum.with_noise_multiplier builds, without importing PyTorch.
        honest_fraction = fields.get("honest_fraction", 1.0)
        budget = SumBudget(1.0, ROUND_DELTA, honest_fraction)
        plan = plan_with_noise_multiplier(
            reports,
            integer("dimension", fields["dimension"]),
            fields["noise_multiplier"],
            budget,
            zero_on_grid=everyone_reports,
            rate=rate if everyone_reports else 1.0,
        )
        summed = BinomialSum(
            noise=plan.noise, shift=plan.granularity, dimension=fields["dimension"]
        )
        mu, _ = gaussian_equivalent(summed, lost=budget.lost)
        if sampling == "random_allocation":
            rate = 1 / _batches(rate)
        return cls(
            noise_multiplier=math.nextafter(2 / mu, 0.0),
            num_users=users,
            sample_rate=rate if everyone_reports else reports / users,
            sampling=sampling,
            dimension=summed.dimension,
            granularity=plan.granularity,
            noise_trials=plan.noise.trials,
            bit_probability=plan.bit_probability,
            tail=budget.lost,
            honest_fraction=budget.honest_fraction,
        )

    @classmethod
    def of_protocol(
        cls,
        protocol: ShuffleVectorSum,
        *,
        num_users: int | None = None,
        sample_rate: float | None = None,
        num_batches: int | None = None,
    ) -> ShuffledSums:
        """Returns the round of a protocol, by default with everyone's vector in it.

        Args:
            protocol: The protocol, whose ``num_users`` are the reports of a round.
            num_users: n, if the reports are a fresh sample of fixed size.
            sample_rate: γ, if all n users report and a secret coin of this rate decides whether a
                report contains the vector.
            num_batches: t, if all n users report and each vector is in one of every t reports, by a
                secret draw.

        Raises:
            ValueError: If more than one of the three is given.
        """
        from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

        instance_of("protocol", protocol, (ShuffleVectorSum,))
        if (num_users, sample_rate, num_batches).count(None) < 2:
            raise ValueError(
                f"num_users={num_users} is for samples of fixed size, sample_rate={sample_rate} "
                f"for coins, num_batches={num_batches} for random allocation: pass one of them"
            )
        users = (
            protocol.num_users
            if num_users is None
            else integer("num_users", num_users, minimum=protocol.num_users)
        )
        sampling = "poisson" if num_users is None else "fixed_size"
        rate = protocol.num_users / users if sample_rate is None else sample_rate
        if num_batches is not None:
            sampling, rate = "random_allocation", 1 / integer("num_batches", num_batches)
        return cls(
            noise_multiplier=protocol.noise_multiplier,
            num_users=users,
            sample_rate=rate,
            sampling=sampling,
            dimension=protocol.dimension,
            granularity=protocol.granularity,
            noise_trials=protocol.sum_round.noise.trials,
            bit_probability=protocol.bit_probability,
            tail=protocol.tail,
            honest_fraction=protocol.honest_fraction,
        )

    @property
    def noise(self) -> BinomialNoise:
        """The noise of the honest reports in one coordinate."""
        return BinomialNoise(trials=self.noise_trials, probability=self.bit_probability)

    @property
    def _sum(self) -> BinomialSum:
        """One round as the analyzer sees it, without the sampling."""
        return BinomialSum(noise=self.noise, shift=self.granularity, dimension=self.dimension)

    @property
    def lost(self) -> float:
        """The probability that μ does not cover, one round."""
        return gaussian_equivalent(self._sum, lost=self.tail)[1]

    @property
    def reports(self) -> int:
        """The number of users who report in a round: a sample of fixed size, or all users."""
        return round(self.expected_reports) if self.sampling == "fixed_size" else self.num_users

    @property
    def num_batches(self) -> int:
        """1/γ, the rounds of an epoch of random allocation."""
        return round(1 / self.sample_rate)

    def sampled_sum(self, mu: float) -> SampledSum:
        """Returns the round as a record of :mod:`opacus_shuffle.analysis.sampled_sums`.

        Args:
            mu: μ under replacement.
        """
        return SampledSum(
            mu=mu, sample_rate=self.sample_rate, lost=self.lost, sampling=str(self.sampling)
        )

    @property
    def bits_per_coordinate(self) -> int:
        """The steps of the grid plus one user's noise bits, g + b."""
        return self.granularity + self.noise_trials // honest_users(
            self.reports, self.honest_fraction
        )

    @property
    def count_bits_per_coordinate(self) -> int:
        """⌈log₂(g + b + 1)⌉, because a user may send the shuffler the count of its ones."""
        return self.bits_per_coordinate.bit_length()

    @property
    def reporting_rate(self) -> float:
        """γ for samples of fixed size, else 1, because all users report."""
        return self.sample_rate if self.sampling == "fixed_size" else 1.0

    @property
    def mu(self) -> float:
        """μ of one round with everyone in it, replacement adjacency."""
        return 2 / self.noise_multiplier

    @property
    def noise_std(self) -> float:
        """The honest reports' noise on one coordinate of the sum, in clipping norms."""
        return 2 * math.sqrt(self.noise.variance) / self.granularity

    @property
    def noise_of_sum(self) -> float:
        """Standard deviation of one coordinate of the sum, in clipping norms.

        It includes the noise bits and the largest error of rounding.
        """
        honest = honest_users(self.reports, self.honest_fraction)
        variance = self.noise.variance * self.reports / honest + self.expected_reports / 4
        return 2 * math.sqrt(variance) / self.granularity


def _batches(sample_rate: float) -> int:
    """Returns t where γ is 1/t; refuses every other γ."""
    batches = round(min(1 / sample_rate, 2.0**53))
    if not math.isclose(sample_rate * batches, 1.0):
        raise ValueError(
            "sample_rate with sampling='random_allocation' is 1 over the number of batches of an "
            f"epoch, got {sample_rate!r}: pass 1 / {batches}, say"
        )
    return batches
