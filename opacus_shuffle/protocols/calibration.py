r"""Chooses the grid of a sum and the fewest noise bits that are proved private enough.

The sums are those of SCO, Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation. For
each coordinate a user sends g bits, which encode a position on a grid, and b noise bits, each of
which is 1 with probability p.

For an (ε, δ) budget p is ½. For every b there is a largest g whose bound
(:mod:`opacus_shuffle.analysis.binomial_sums`) meets the budget, and b is the smallest for which the
variance is within :data:`OVERHEAD` of its limit for infinitely many bits. For a noise multiplier
(:func:`plan_with_noise_multiplier`) b is the smallest for which the variance is within a stated
share of the limit; p is less than ½ if one more fair bit per user would be too much noise. The
paper's own constants are in ``reproduction/published_sums.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from opacus_shuffle.analysis import gaussian, sampled_sums
from opacus_shuffle.analysis.binomial_sums import (
    LOST_SHARE,
    MOST_TRIALS,
    BinomialNoise,
    gaussian_bound,
    hockey_stick,
)
from opacus_shuffle.core.validation import (
    finite_number,
    integer,
    moderate,
    noise_level,
    positive,
    sampling_rate,
)

SMALLEST_MULTIPLIER, SMALLEST_EPSILON = 0.1, 1e-9
LARGEST_EPSILON = 300.0
"""At δ = 1e-5, about the ε of one sum with a multiplier of :data:`SMALLEST_MULTIPLIER`."""
OVERHEAD = 0.05
"""By how much the variance for an (ε, δ) budget may exceed its limit, to save bits."""
ROUNDING_SHARE = 0.1
"""The same for a given noise multiplier: 5 % of the standard deviation."""
_GROWTH, _COARSE = 1.25, 8
_FINE_STEP, _FINE = 0.01, 1024
"""Grids with fewer than ``_FINE`` steps are searched in steps of 1 %, finer ones by ``_GROWTH``."""
_PROBABILITY_STEPS = 2**16
"""A noise bit's probability is a multiple of 2⁻¹⁶, so sixteen fair coins draw it exactly."""


@dataclasses.dataclass(frozen=True)
class GridPlan:
    """The grid and the noise bits of one round, which every user needs to know.

    Attributes:
        granularity: g, the number of grid steps across a coordinate's range.
        noise_bits: b, noise bits per user and coordinate.
        bit_probability: p, the probability that a noise bit is 1.
        honest_users: The number of users who add their noise for certain.
    """

    granularity: int
    noise_bits: int
    bit_probability: float
    honest_users: int

    @property
    def noise(self) -> BinomialNoise:
        """The binomial noise that the honest users add to a coordinate's sum."""
        return BinomialNoise(
            trials=self.noise_bits * self.honest_users, probability=self.bit_probability
        )

    def variance(self, num_users: int, rate: float = 1.0) -> float:
        """Computes the variance of a coordinate's sum of ``num_users`` reports, in grid steps².

        It is the variance of the noise plus the largest possible variance of the rounding.
        ``rate`` is the expected share of users whose values lie between two points of the grid.
        """
        return num_users * (
            0.25 * rate + self.noise_bits * self.bit_probability * (1 - self.bit_probability)
        )


@dataclasses.dataclass(frozen=True)
class SumBudget:
    """The privacy budget of a sum over all of its rounds.

    :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum` documents the fields.
    """

    epsilon: float
    delta: float
    honest_fraction: float = 1.0
    rounds: int = 1
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        if not SMALLEST_EPSILON <= positive("epsilon", self.epsilon) <= LARGEST_EPSILON:
            raise ValueError(
                f"epsilon must be at least {SMALLEST_EPSILON:g} and at most {LARGEST_EPSILON:g}, "
                f"got {self.epsilon!r}: choose another one; a larger one offers no protection"
            )
        # The bounds on binomial tails do not reach further.
        if not 1e-200 <= positive("delta", self.delta) < 0.5:
            raise ValueError(
                f"delta must be at least 1e-200 and below 1/2 (SCO Theorem 3.2), got {self.delta!r}"
            )
        if not 1 / 3 - 1e-12 <= finite_number("honest_fraction", self.honest_fraction) <= 1:
            raise ValueError(
                "honest_fraction must lie in [1/3, 1] (SCO Claim A.8), got "
                f"{self.honest_fraction!r}"
            )
        if sampling_rate("sample_rate", self.sample_rate) < 1 and self.honest_fraction < 1:
            raise ValueError(
                f"sample_rate={self.sample_rate!r} requires honest_fraction=1, got "
                f"{self.honest_fraction!r}: amplification by secret samples is not proved with "
                "dishonest users"
            )
        for name in ("epsilon", "delta", "honest_fraction", "sample_rate"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "rounds", integer("rounds", self.rounds))

    @property
    def lost(self) -> float:
        """The share of δ that the binomial tails of one round's coordinates may use together."""
        return LOST_SHARE * self.delta / self.rounds

    @property
    def round_mu(self) -> float:
        """μ, rounded down, of each of equal rounds that together are (ε, δ)-DP.

        The rounds have the same users, or fresh samples of them.
        """
        if self.sample_rate < 1:
            return sampled_sums.largest_mu(
                epsilon=self.epsilon,
                delta=self.delta,
                rounds=self.rounds,
                sample_rate=self.sample_rate,
                lost=self.lost,
            )
        together = gaussian.largest_mu(epsilon=self.epsilon, delta=self.delta * (1 - LOST_SHARE))
        return together / math.sqrt(self.rounds)


def honest_users(num_users: int, honest_fraction: float) -> int:
    """Returns the smallest number of honest users for a fraction of all."""
    return max(1, math.ceil(num_users * honest_fraction - 1e-9))


@functools.lru_cache(maxsize=1024)
def tight_vector_plan(
    *, num_users: int, dimension: int, mu: float, lost: float, honest_fraction: float
) -> GridPlan:
    """Returns the grid with the fewest bits that is ``mu``-Gaussian-private except for ``lost``.

    All coordinates share ``lost``. The variance stays within :data:`OVERHEAD` of its limit.
    """
    honest = honest_users(num_users, honest_fraction)
    tail = max(lost / dimension, 1e-300)

    def largest_granularity(noise: BinomialNoise) -> int:
        g = math.floor(mu * math.sqrt(noise.variance))
        # The slope falls with the shift, so a bound for a larger shift also holds for a smaller.
        for _ in range(2):
            if g < _COARSE and noise.variance + honest / 4 > (1 + OVERHEAD) * (g / mu) ** 2:
                return 0  # The grid is too coarse for OVERHEAD whatever the bound is.
            slope = gaussian_bound(noise, shift=max(g, 1), tail=tail).slope
            if not math.isfinite(slope):
                return 0
            g = min(g, math.floor(mu / slope))
        return g

    return _fewest_fair_bits(num_users, honest, largest_granularity, limit=1 / mu**2)


def plan_with_noise_multiplier(
    num_users: int,
    dimension: int,
    noise_multiplier: float,
    budget: SumBudget,
    *,
    zero_on_grid: bool,
    rate: float,
    rounding_share: float = ROUNDING_SHARE,
) -> GridPlan:
    """Returns the grid with the fewest bits whose covering Gaussian has a given noise multiplier.

    :meth:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum.with_noise_multiplier` documents
    the arguments. Of the budget only ``lost`` and ``honest_fraction`` are used.

    Raises:
        ValueError: If an argument is out of range, or no grid is fine enough.
    """
    if noise_level("noise_multiplier", noise_multiplier) < SMALLEST_MULTIPLIER:
        raise ValueError(
            f"noise_multiplier of a shuffled sum must be at least {SMALLEST_MULTIPLIER}, got "
            f"{noise_multiplier!r}: with less noise, epsilon of a round is in the hundreds, and "
            "binomial tails so far out have no bound"
        )
    share = sampling_rate("rate", rate)
    if share < 1 and not zero_on_grid:
        raise ValueError(
            f"rate={rate!r} requires zero_on_grid=True: otherwise vectors of zero are rounded as "
            "well"
        )
    if not 0.01 <= positive("rounding_share", rounding_share) <= 1:
        raise ValueError(
            f"rounding_share must lie in [0.01, 1], got {rounding_share!r}: a smaller one "
            "requires too many bits"
        )
    return fewest_bits_plan(
        num_users=num_users,
        dimension=dimension,
        mu=math.nextafter(2 / math.nextafter(noise_multiplier, math.inf), 0.0),
        lost=budget.lost,
        honest_fraction=budget.honest_fraction,
        rounding_share=float(rounding_share),
        rate=share,
        zero_on_grid=zero_on_grid,
    )


@functools.lru_cache(maxsize=1024)
def fewest_bits_plan(
    *,
    num_users: int,
    dimension: int,
    mu: float,
    lost: float,
    honest_fraction: float,
    rounding_share: float,
    rate: float,
    zero_on_grid: bool,
) -> GridPlan:
    """Returns the grid with the fewest bits that is ``mu``-Gaussian-private except for ``lost``.

    Args:
        num_users: n, users who report.
        dimension: d.
        mu: μ under replacement.
        lost: The share of one round's δ that the tails of all coordinates may use.
        honest_fraction: The share of users who add their noise for certain.
        rounding_share: By how much the variance may exceed its limit, at the expected number of
            users whose values are rounded.
        rate: The expected share of these users.
        zero_on_grid: The grid has an even number of steps.

    Raises:
        ValueError: If no grid is fine enough.
    """
    honest = honest_users(num_users, honest_fraction)
    share = max(lost / dimension, 1e-300)
    allowed = (1 + rounding_share) / mu**2 * num_users / honest

    def with_bits(g: int, bits: int) -> GridPlan | None:
        """Returns the plan with p as close to ½ as the variance allows, or None.

        None means that this is too little noise.
        """
        variance_of_bit = min(0.25, (allowed * g**2 / num_users - rate / 4) / bits)
        if variance_of_bit <= 0 or bits * honest > MOST_TRIALS:
            return None
        exact = (1 - math.sqrt(1 - 4 * variance_of_bit)) / 2
        p = math.floor(exact * _PROBABILITY_STEPS) / _PROBABILITY_STEPS
        plan = GridPlan(g, bits, p, honest)
        if p <= 0:
            return None
        bound = gaussian_bound(plan.noise, shift=g, tail=share, steepest=mu / g)
        return plan if bound.slope * g <= mu else None

    def with_steps(g: int) -> GridPlan | None:
        """Returns the plan with g grid steps and the fewest noise bits, or None.

        None means that every number of bits is either too little noise or too much.
        """
        high = max(1, math.ceil(4 * (allowed * g**2 / num_users - rate / 4)))
        plan, low = with_bits(g, high), 0
        while plan and high - low > 1:
            middle = (low + high) // 2
            fewer = with_bits(g, middle)
            low, high, plan = (low, middle, fewer) if fewer else (middle, high, plan)
        return plan

    # On any coarser grid rounding alone exceeds the share.
    step = 2 if zero_on_grid else 1
    g = step * max(1, math.ceil(mu * math.sqrt(rate * honest / (4 * rounding_share)) / step - 1e-9))
    while (plan := with_steps(g)) is None:
        if 4 * (g / mu) ** 2 > MOST_TRIALS / _GROWTH**2:
            raise ValueError(
                "no protocol with at most 2**50 noise bits of all users together achieves "
                f"rounding_share={rounding_share} for num_users={num_users} and a noise multiplier "
                f"of {2 / mu:.3g}: raise rounding_share, or choose less extreme values"
            )
        g += step * max(1, math.floor((_FINE_STEP if g < _FINE else _GROWTH - 1) * g / step))
    return plan


@functools.lru_cache(maxsize=1024)
def tight_scalar_plan(
    *, num_users: int, epsilon: float, delta: float, honest_fraction: float
) -> GridPlan:
    """Returns the grid of one coordinate with the fewest bits, by its exact hockey stick."""
    honest = honest_users(num_users, honest_fraction)

    def largest_granularity(noise: BinomialNoise) -> int:
        low, high = 0, noise.trials
        while high - low > 1:
            middle = (low + high) // 2
            fits = hockey_stick(noise, shift=middle, epsilon=epsilon) <= delta
            low, high = (middle, high) if fits else (low, middle)
        return low

    return _fewest_fair_bits(
        num_users,
        honest,
        largest_granularity,
        limit=1 / gaussian.largest_mu(epsilon=epsilon, delta=delta) ** 2,
    )


def _fewest_fair_bits(
    num_users: int,
    honest: int,
    largest_granularity: Callable[[BinomialNoise], int],
    *,
    limit: float,
) -> GridPlan:
    """Returns the plan with the fewest fair noise bits whose variance is near its limit.

    The limit, for the sum of all users, is in units of the squared range.
    """
    # With fewer bits rounding alone adds more than OVERHEAD, or the noise is below one grid step's
    # standard deviation of 1/μ.
    bits = max(1, math.floor(0.5 / OVERHEAD), math.floor(min(4 * limit / honest, MOST_TRIALS)))
    while bits * honest <= MOST_TRIALS:
        noise = BinomialNoise(trials=bits * honest, probability=0.5)
        g = largest_granularity(noise)
        if g >= 1:
            plan = GridPlan(g, bits, 0.5, honest)
            if plan.variance(num_users) / g**2 <= (1 + OVERHEAD) * limit * num_users / honest:
                return plan
        # On a coarse grid neighbouring values of g differ a lot.
        bits = math.ceil(bits * (_GROWTH if g >= _COARSE else 2.0))
    raise ValueError(
        "no protocol with fewer than 2**50 noise bits is private enough for "
        f"num_users={num_users}: raise epsilon or delta, or use fewer rounds"
    )


def noise_variance(*, max_norm: float, epsilon: float, delta: float) -> float:
    """Returns the limit of each coordinate's variance for many users and bits.

    It is in the squared unit of ``max_norm``. Use it to plan before a protocol is built;
    :attr:`ShuffleVectorSum.variance` is the variance of a protocol.

    Args:
        max_norm: Δ₂, the largest ℓ₂ norm of a user's vector.
        epsilon: ε, up to 300.
        delta: δ in (0, ½).
    """
    return (2 * moderate("max_norm", max_norm) / SumBudget(epsilon, delta).round_mu) ** 2
