r"""Chooses a protocol's grid and number of noise bits: as printed, or as few as are proved.

SCO is Cheu, Joseph, Mao and Peng's shuffle-private convex optimisation, whose protocols these are.
One user's coordinate travels as g bits that say where on the grid it lies and b noise bits that are
1 with probability p.

**published**: SCO Theorem A.6 (Claim A.8, Corollary A.9 with drop-outs), constants as printed.
**tight**: p = ½, and for every b the largest g whose bound
(:mod:`opacus_shuffle.analysis.binomial_sums`) meets (ε, δ); b is the smallest with which the
variance is within :data:`OVERHEAD` of its limit for infinitely many bits. A protocol that is built
for a noise multiplier sends the fewest bits with which its variance is within a stated share of the
limit, with p below ½ where a fair bit more would be too much noise.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from opacus_shuffle.analysis import gaussian, sampled_sums
from opacus_shuffle.analysis.advanced_composition import step_budget
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
    one_of,
    positive,
    sampling_rate,
)

CALIBRATIONS = ("published", "tight")
SMALLEST_MULTIPLIER, SMALLEST_EPSILON = 0.1, 1e-9
LARGEST_EPSILON = 300.0
"""At δ = 1e-5 about what one sum with a multiplier of :data:`SMALLEST_MULTIPLIER` costs."""
OVERHEAD = 0.05
"""How far above its limit the tight calibration's variance may stay for the sake of fewer bits."""
ROUNDING_SHARE = 0.1
"""The same for a protocol that is built for a noise multiplier: 5 % of the standard deviation."""
_PACE, _COARSE = 1.25, 8
_FINE_PACE, _FINE = 0.01, 1024
"""Grids of fewer steps than that are searched at this pace, larger ones at :data:`_PACE`."""
_PROBABILITY_STEPS = 2**16
"""One over the unit of a noise bit's probability: sixteen fair coins make it exactly."""


@dataclasses.dataclass(frozen=True)
class GridPlan:
    """The grid and the noise bits of one round, which every user needs to know.

    Attributes:
        granularity: g, grid steps from end to end of a coordinate's range.
        noise_bits: b, noise bits per user and coordinate.
        bit_probability: p, that a noise bit is 1.
        honest_users: How many users add their noise for certain.
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
        """The variance of a coordinate's sum of ``num_users`` reports, in grid steps squared.

        It is that of the noise, and of rounding at its worst. ``rate`` is the expected share of the
        users whose values are rounded, as those on the grid are not.
        """
        return num_users * (
            0.25 * rate + self.noise_bits * self.bit_probability * (1 - self.bit_probability)
        )


@dataclasses.dataclass(frozen=True)
class Promise:
    """The numbers that a protocol is made for: users, ε, δ, honest fraction.

    The protocols say what each field means.
    """

    epsilon: float
    delta: float
    calibration: str = "tight"
    honest_fraction: float = 1.0
    rounds: int = 1
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        one_of("calibration", self.calibration, CALIBRATIONS)
        if positive("epsilon", self.epsilon) > 15 and self.calibration == "published":
            raise ValueError(
                "epsilon with calibration='published' must not exceed 15 (SCO Theorem 3.2), got "
                f"{self.epsilon!r}: choose a smaller one, or calibration='tight'"
            )
        if self.epsilon > LARGEST_EPSILON:
            raise ValueError(
                f"epsilon must not exceed {LARGEST_EPSILON:g}, got {self.epsilon!r}: choose a "
                "smaller one; so large a one protects nobody, and the tails of its noise are not "
                "known"
            )
        if self.epsilon < SMALLEST_EPSILON:
            raise ValueError(
                f"epsilon must be at least {SMALLEST_EPSILON:g}, got {self.epsilon!r}: choose a "
                "larger one"
            )
        # Smaller tails are not known.
        if not 1e-200 <= positive("delta", self.delta) < 0.5:
            raise ValueError(
                f"delta must be at least 1e-200 and below 1/2 (SCO Theorem 3.2), got {self.delta!r}"
            )
        if not 1 / 3 - 1e-12 <= finite_number("honest_fraction", self.honest_fraction) <= 1:
            raise ValueError(
                "honest_fraction must lie in [1/3, 1] (SCO Claim A.8), got "
                f"{self.honest_fraction!r}"
            )
        rate = sampling_rate("sample_rate", self.sample_rate)
        if rate < 1 and (self.calibration != "tight" or self.honest_fraction < 1):
            raise ValueError(
                f"sample_rate={self.sample_rate!r} takes calibration='tight' and "
                f"honest_fraction=1, got {self.calibration!r} and {self.honest_fraction!r}: what a "
                "secret sample gains is not proved for others"
            )
        for name in ("epsilon", "delta", "honest_fraction", "sample_rate"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "rounds", integer("rounds", self.rounds))

    @property
    def lost(self) -> float:
        """The share of δ that the tails of one round's coordinates may take together."""
        return LOST_SHARE * self.delta / self.rounds

    @property
    def round_mu(self) -> float:
        """μ, rounded down, of each of equal rounds that together are (ε, δ)-DP.

        They are of the same users, or of samples.
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

    @property
    def published_round(self) -> tuple[float, float]:
        """(ε, δ) of each of T rounds with the same users, as SCO Algorithm 5 prints it.

        That is ε/(2√(2T·ln(1/δ))) and δ/(T + 1). Where that is too much (the printed ln(1/δ) stands
        for ln((T+1)/δ), and the term in ε² was left out: T > 1/δ, or ε large and δ near ½), the
        most that advanced composition allows at the same δ's. One round gets all of it.
        """
        epsilon, delta, rounds = self.epsilon, self.delta, self.rounds
        if rounds == 1:
            return epsilon, delta
        printed = epsilon / (2 * math.sqrt(2 * rounds * -math.log(delta)))
        allowed, _ = step_budget(
            epsilon=epsilon, delta=delta, steps=rounds, delta_split=rounds / (rounds + 1)
        )
        return min(printed, allowed), delta / (rounds + 1)


def honest_users(num_users: int, honest_fraction: float) -> int:
    """Returns the fewest users that a fraction of them can be."""
    return max(1, math.ceil(num_users * honest_fraction - 1e-9))


def published_vector_plan(
    *,
    num_users: int,
    dimension: int,
    max_norm: float,
    epsilon: float,
    delta: float,
    honest_fraction: float,
) -> GridPlan:
    """Returns the grid of SCO Theorem A.6; with drop-outs of Corollary A.9, whose ε/γ is our ε.

    ``granularity`` is max(2Δ₂√n, √d, 4) as printed: it depends on the unit in which ``max_norm`` is
    measured.
    """
    share = delta / (dimension + 1)
    return _published_plan(
        granularity=max(2 * max_norm * math.sqrt(num_users), math.sqrt(dimension), 4.0),
        epsilon=epsilon,
        split=18 * math.sqrt(-math.log(share)),
        delta=share,
        num_users=num_users,
        honest_fraction=honest_fraction,
    )


def published_scalar_plan(
    *, num_users: int, max_value: float, epsilon: float, delta: float, honest_fraction: float
) -> GridPlan:
    """Returns the grid of SCO Lemma 3.1; with drop-outs of Claim A.8.

    Lemma 3.1 asks for g ≥ Δ√n alone, but its proof takes ln((1+α)/(1−α)) ≤ 3α with α = ε/(3g)
    "small": that needs α ≤ 0.858, so g ≥ ε/2.57 besides (at n = 1, Δ = 1, ε = 15 the printed g = 1
    gives α = 5).
    """
    least = max(epsilon * honest_fraction / 2.57, 3.0 if honest_fraction < 1 else 1.0)
    return _published_plan(
        granularity=max(max_value * math.sqrt(num_users), least),
        epsilon=epsilon,
        split=1.0,
        delta=delta,
        num_users=num_users,
        honest_fraction=honest_fraction,
    )


def _published_plan(
    *,
    granularity: float,
    epsilon: float,
    split: float,
    delta: float,
    num_users: int,
    honest_fraction: float,
) -> GridPlan:
    """Takes the smallest b above 180g²ln(2/δ)/(ε²n), and p = 90g²ln(2/δ)/(bε²n).

    The ε of these is a coordinate's: ε·γ/``split``.
    """
    # Claim A.8 is for ε ≤ 1 of a protocol in which all are honest.
    if honest_fraction < 1 and epsilon * honest_fraction > 1:
        raise ValueError(
            f"calibration='published' with honest_fraction={honest_fraction!r} needs epsilon * "
            f"honest_fraction <= 1 in each round (SCO Corollary A.9), got epsilon={epsilon!r}: use "
            "calibration='tight' or a smaller epsilon"
        )
    if granularity > 2**40:
        raise ValueError(
            f"the paper's grid would have {granularity:.3g} steps: measure values in a larger unit"
        )
    g = math.ceil(granularity - 1e-9)
    local = epsilon * honest_fraction / split
    half = 90 * g**2 * math.log(2 / delta) / (local**2 * num_users)
    if 2 * half * num_users > MOST_TRIALS:
        raise ValueError(
            f"calibration='published' would send {2 * half:.3g} noise bits per user and "
            "coordinate: use calibration='tight' or a larger epsilon"
        )
    b = math.floor(2 * half) + 1
    return GridPlan(g, b, half / b, honest_users(num_users, honest_fraction))


@functools.lru_cache(maxsize=1024)
def tight_vector_plan(
    *, num_users: int, dimension: int, mu: float, lost: float, honest_fraction: float
) -> GridPlan:
    """Returns the cheapest grid that is ``mu``-Gaussian-private but for ``lost``.

    All coordinates share ``lost``.
    """
    honest = honest_users(num_users, honest_fraction)
    tail = max(lost / dimension, 1e-300)

    def largest_granularity(noise: BinomialNoise) -> int:
        g = math.floor(mu * math.sqrt(noise.variance))
        # The slope falls with the shift, so what fits a larger one fits.
        for _ in range(2):
            if g < _COARSE and noise.variance + honest / 4 > (1 + OVERHEAD) * (g / mu) ** 2:
                return 0  # too coarse a grid, whatever the bound says
            slope = gaussian_bound(noise, shift=max(g, 1), tail=tail).slope
            if not math.isfinite(slope):
                return 0
            g = min(g, math.floor(mu / slope))
        return g

    return _cheapest(num_users, honest, largest_granularity, limit=1 / mu**2)


def plan_with_noise_multiplier(
    num_users: int,
    dimension: int,
    noise_multiplier: float,
    promise: Promise,
    *,
    zero_on_grid: bool,
    rate: float,
    rounding_share: float = ROUNDING_SHARE,
) -> GridPlan:
    """Returns the grid with the fewest bits whose covering Gaussian has a noise multiplier.

    :meth:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum.with_noise_multiplier` says what
    the arguments are; of the promise only what the tails may take and the honest fraction count.

    Raises:
        ValueError: If an argument is out of range, or no protocol gets there.
    """
    if noise_level("noise_multiplier", noise_multiplier) < SMALLEST_MULTIPLIER:
        raise ValueError(
            f"noise_multiplier of a shuffled sum must be at least {SMALLEST_MULTIPLIER}, got "
            f"{noise_multiplier!r}: below, epsilon of a round is in the hundreds, and no tails "
            "are known so far out"
        )
    share = sampling_rate("rate", rate)
    if share < 1 and not zero_on_grid:
        raise ValueError(
            f"rate={rate!r} is for zero_on_grid=True: else vectors of zero are rounded like "
            "others; pass it too"
        )
    if not 0.01 <= positive("rounding_share", rounding_share) <= 1:
        raise ValueError(
            f"rounding_share must lie in [0.01, 1], got {rounding_share!r}: a smaller one "
            "takes too many bits"
        )
    return fewest_bits_plan(
        num_users=num_users,
        dimension=dimension,
        mu=math.nextafter(2 / math.nextafter(noise_multiplier, math.inf), 0.0),
        lost=promise.lost,
        honest_fraction=promise.honest_fraction,
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
    """Returns the grid with the fewest bits that is ``mu``-Gaussian-private but for ``lost``.

    Args:
        num_users: n, users who report.
        dimension: d.
        mu: μ under replacement.
        lost: What the tails of all coordinates may take of one round's δ.
        honest_fraction: The share of users who add their noise for certain.
        rounding_share: How far above the limit the variance may be, at the expected number of users
            whose values are rounded.
        rate: Their expected share.
        zero_on_grid: The grid has an even number of steps.

    Raises:
        ValueError: If no protocol gets there.
    """
    honest = honest_users(num_users, honest_fraction)
    share = max(lost / dimension, 1e-300)
    allowed = (1 + rounding_share) / mu**2 * num_users / honest

    def with_bits(g: int, bits: int) -> GridPlan | None:
        """Returns the plan whose noise bits are 1 as near half the time as the variance allows.

        None where that is too little noise.
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

    def at(g: int) -> GridPlan | None:
        """Returns the grid of g steps with the fewest noise bits.

        None where no number of them is enough noise and not too much.
        """
        high = max(1, math.ceil(4 * (allowed * g**2 / num_users - rate / 4)))
        plan, low = with_bits(g, high), 0
        while plan and high - low > 1:
            middle = (low + high) // 2
            fewer = with_bits(g, middle)
            low, high, plan = (low, middle, fewer) if fewer else (middle, high, plan)
        return plan

    # Rounding alone takes that share on a grid which is coarser.
    step = 2 if zero_on_grid else 1
    g = step * max(1, math.ceil(mu * math.sqrt(rate * honest / (4 * rounding_share)) / step - 1e-9))
    while (plan := at(g)) is None:
        if 4 * (g / mu) ** 2 > MOST_TRIALS / _PACE**2:
            raise ValueError(
                "no protocol with at most 2**50 noise bits of all users together keeps to "
                f"rounding_share={rounding_share} for num_users={num_users} and a noise multiplier "
                f"of {2 / mu:.3g}: raise that share, or take less extreme ones"
            )
        g += step * max(1, math.floor((_FINE_PACE if g < _FINE else _PACE - 1) * g / step))
    return plan


@functools.lru_cache(maxsize=1024)
def tight_scalar_plan(
    *, num_users: int, epsilon: float, delta: float, honest_fraction: float
) -> GridPlan:
    """Returns the cheapest grid of one coordinate, by its exact hockey stick."""
    honest = honest_users(num_users, honest_fraction)

    def largest_granularity(noise: BinomialNoise) -> int:
        low, high = 0, noise.trials
        while high - low > 1:
            middle = (low + high) // 2
            fits = hockey_stick(noise, shift=middle, epsilon=epsilon) <= delta
            low, high = (middle, high) if fits else (low, middle)
        return low

    return _cheapest(
        num_users,
        honest,
        largest_granularity,
        limit=1 / gaussian.largest_mu(epsilon=epsilon, delta=delta) ** 2,
    )


def _cheapest(
    num_users: int,
    honest: int,
    largest_granularity: Callable[[BinomialNoise], int],
    *,
    limit: float,
) -> GridPlan:
    """Finds the fewest noise bits whose variance, of all users' sum, is near its limit.

    The limit is in units of the range squared.
    """
    # Rounding alone costs 1/bits of the noise, and a grid of one step at least has a standard
    # deviation of 1/μ.
    bits = max(1, math.floor(0.5 / OVERHEAD), math.floor(min(4 * limit / honest, MOST_TRIALS)))
    while bits * honest <= MOST_TRIALS:
        noise = BinomialNoise(trials=bits * honest, probability=0.5)
        g = largest_granularity(noise)
        if g >= 1:
            plan = GridPlan(g, bits, 0.5, honest)
            if plan.variance(num_users) / g**2 <= (1 + OVERHEAD) * limit * num_users / honest:
                return plan
        # On a coarse grid whole steps are far apart.
        bits = math.ceil(bits * (_PACE if g >= _COARSE else 2.0))
    raise ValueError(
        "no protocol with fewer than 2**50 noise bits is private enough for "
        f"num_users={num_users}: raise epsilon or delta, or take fewer rounds"
    )


def noise_variance(
    *, dimension: int, max_norm: float, epsilon: float, delta: float, calibration: str = "tight"
) -> float:
    """Returns each coordinate's variance as the number of users and bits grows.

    It is in the square of ``max_norm``'s unit. For planning before a protocol is built:
    :attr:`ShuffleVectorSum.variance` is the protocol's own.

    Args:
        dimension: d.
        max_norm: Δ₂, the largest ℓ₂ norm of a user's vector.
        epsilon: ε, up to 300; with ``"published"`` up to 15.
        delta: δ in (0, ½).
        calibration: ``"published"`` or ``"tight"``.
    """
    dimension, norm = integer("dimension", dimension), moderate("max_norm", max_norm)
    promise = Promise(epsilon, delta, calibration)
    if calibration == "tight":
        return (2 * norm / promise.round_mu) ** 2
    share = delta / (dimension + 1)
    return (2 * norm) ** 2 * 90 * math.log(2 / share) / 2 * 18**2 * -math.log(share) / epsilon**2
