r"""Bounds integer sums under binomial noise.

One coordinate has an exact hockey stick; several are covered by one Gaussian mechanism.

User i holds w ∈ [0, g]^d, rounds every coordinate at random to a neighbouring integer, and the
analyzer sees every coordinate's sum plus Bin(m, p). Proved for every data set in
docs/proofs/02_sums_with_binomial_noise.md: for d = 1 the worst case is the integer shift g (2.1,
:func:`hockey_stick`); for any d and ‖w − w′‖₂ ≤ g the sums are a post-processing of one Gaussian
mechanism with μ = c·‖w − w′‖₂ but for a probability d·``lost`` (Theorem 2.5,
:func:`gaussian_bound`).

>>> noise = BinomialNoise(trials=40_000, probability=0.5)  # standard deviation 100
>>> bound = gaussian_bound(noise, shift=100, tail=1e-12)
>>> round(100 * bound.slope, 3), bound.lost < 1e-12  # mu of a shift by 100: about 1
(1.042, True)
>>> round(hockey_stick(noise, shift=100, epsilon=3.0), 6)
0.001538
>>> round(math.exp(gaussian.log_delta(mu=1.0, epsilon=3.0)), 6)
0.001537
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from opacus_shuffle.analysis import binomial, gaussian, privacy_loss
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.analysis.privacy_loss import Mixture
from opacus_shuffle.analysis.ratio_distribution import RatioDistribution
from opacus_shuffle.core.validation import integer, open_unit_interval

RELATIVE_ERROR = 1e-9
"""Slopes and tails are enlarged by this fraction, or 2e-14·√m if that is more.

That is above the error of SciPy's incomplete beta function (against 50 digits: 5e-11 at m = 2^30,
6e-9 at 2^40, 1e-7 at 2^50), and of :func:`opacus_shuffle.analysis.binomial.pmf`.
"""

MOST_TRIALS = 2**50

_BLOCKS = 2**16
"""More outcomes than this are grouped into blocks, each with its worst case.

The slope then exceeds c by 0.3 % at most.
"""

_CELLS = 4096
LOST_SHARE = 1e-6
"""Share of δ that the tails of all coordinates and rounds together may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinomialNoise:
    """Bin(trials, probability), added to an integer.

    Attributes:
        trials: m: noise bits per user times honest users.
        probability: p of a noise bit to be 1, in (0, 1).
    """

    trials: int
    probability: float

    def __post_init__(self) -> None:
        # Beyond 2^50, SciPy's tails are not accurate enough.
        object.__setattr__(self, "trials", integer("trials", self.trials, maximum=MOST_TRIALS))
        object.__setattr__(self, "probability", open_unit_interval("probability", self.probability))

    @property
    def variance(self) -> float:
        """m·p·(1 − p)."""
        return self.trials * self.probability * (1 - self.probability)

    @property
    def relative_error(self) -> float:
        """A bound on the relative error of this distribution's tails and probabilities."""
        return max(RELATIVE_ERROR, 2e-14 * math.sqrt(self.trials))

    @property
    def reflected(self) -> BinomialNoise:
        """The distribution of m minus it."""
        return BinomialNoise(trials=self.trials, probability=1 - self.probability)


class GaussianBound(NamedTuple):
    """c of Lemma 2.2, rounded up (``inf`` where the noise has no room for the shift).

    The second field is what each coordinate adds to δ.
    """

    slope: float
    lost: float


def hockey_stick(noise: BinomialNoise, *, shift: int, epsilon: float) -> float:
    """Returns the exact δ(ε) in [0, 1] of one coordinate that moves by ``shift``, rounded up.

    Of the two directions the larger value counts.

    Args:
        noise: The binomial noise.
        shift: Whole number, at least 0, of grid steps.
        epsilon: ε ≥ 0.

    Formal Guarantees:
        For d = 1 proved for every data set with values in [0, shift], replacement adjacency; exact
        for the worst (2.1).
    """
    return max(_upward(noise, shift, epsilon), _upward(noise.reflected, shift, epsilon))


def _upward(noise: BinomialNoise, shift: int, epsilon: float) -> float:
    """Returns the supremum over thresholds of P(B + k > y) − e^ε·P(B > y)."""
    if shift == 0:
        return 0.0
    m, p = noise.trials, noise.probability
    if shift > m:
        return 1.0

    def beyond(
        y: Vector,
    ) -> npt.NDArray[np.bool_]:  # whether P(B + k = y) > e^ε·P(B = y), which is so from one y on
        moved, stayed = binomial.pmf(y - shift, m, p), binomial.pmf(y, m, p)
        with np.errstate(divide="ignore", invalid="ignore"):
            larger = np.log(moved) - np.log(stayed) > epsilon
        return np.where(
            (moved > 0) & (stayed > 0), larger, (moved > stayed) | ((moved == stayed) & (y > m * p))
        )

    first = _first(beyond, shift, m + 1)
    # A step to either side too: the supremum is over all thresholds.
    thresholds = np.array([first - 2, first - 1, first], dtype=np.float64)
    moved, stayed = (
        binomial.sf(thresholds - shift, m, p),
        binomial.sf(thresholds, m, p),
    )
    with np.errstate(divide="ignore"):
        against = np.exp(np.minimum(np.log(stayed) + epsilon, 1.0))  # e^ε alone might overflow
    margin = noise.relative_error
    return float(np.clip(np.max(moved * (1 + margin) - against * (1 - margin)), 0.0, 1.0))


@functools.lru_cache(maxsize=1024)
def gaussian_bound(
    noise: BinomialNoise, *, shift: int, tail: float, steepest: float = math.inf
) -> GaussianBound:
    """Returns the Gaussian mechanism that covers sums whose coordinates move by at most ``shift``.

    They may move in any number and direction.

    Args:
        noise: The noise of every coordinate, independent.
        shift: g, the most that one coordinate can move, in grid steps.
        tail: What may be lost per coordinate, in (0, 1).
        steepest: The largest useful slope. A larger one may be returned as infinite, which takes a
            fraction of the time, because the two ends usually determine the slope.

    Returns:
        Slope and loss; an infinite slope where the noise is too small to cover ``shift`` but for
        ``tail``.

    Formal Guarantees:
        Theorem 2.5 of docs/proofs/02_sums_with_binomial_noise.md: proved for every data set,
        replacement adjacency.
    """
    m, p = noise.trials, noise.probability
    each = tail / 2 / (1 + noise.relative_error)
    lowest = int(binomial.fewest(m, p, each)) - 1 - shift
    highest = m - int(binomial.fewest(m, 1 - p, each)) + shift
    # Whole sums that are rounded lose more if a single outcome has a large share of a tail (2.9).
    if binomial.cdf(lowest, m, p) + binomial.sf(highest - shift - 1, m, p) > tail:
        highest += 1
    if lowest < 1 or highest > m - 1:  # z(lowest − 1) and z(highest) must be finite
        return GaussianBound(math.inf, tail)
    if steepest < math.inf:
        outermost = binomial.pmf([lowest, highest], m, p)
        tails = [binomial.cdf(lowest - 1, m, p), binomial.sf(highest, m, p)]
        if np.any(outermost > steepest * _density(ndtri(tails))):
            return GaussianBound(math.inf, tail)
    step = max(1, math.ceil((highest - lowest + 1) / _BLOCKS))
    ends = np.append(np.arange(lowest - 1, highest, step, dtype=np.float64), float(highest))
    # The largest probability in a block (ends[i], ends[i + 1]]: at the end that is nearer to the
    # mode, or the mode's own.
    mode = min(math.floor((m + 1) * p), m)
    largest = binomial.pmf(np.clip(mode, ends[:-1] + 1, ends[1:]), m, p)
    # Each tail where it is the smaller one. Single outcomes add up to it in a fifth of the time
    # that SciPy's function takes, with an error of 2^16 roundings (1e-11) at most.
    half = int(np.searchsorted(ends, m * p))
    if step == 1:
        below = np.cumsum(np.append(binomial.cdf(ends[0], m, p), largest[: half - 1]))
        above = np.cumsum(np.append(binomial.sf(ends[-1], m, p), largest[half:][::-1]))[::-1]
        smaller = np.concatenate([below, above])
    else:
        smaller = np.concatenate([binomial.cdf(ends[:half], m, p), binomial.sf(ends[half:], m, p)])
    if min(smaller[0], smaller[-1]) <= 0:
        return GaussianBound(math.inf, tail)
    quantiles = ndtri(smaller) * np.where(np.arange(len(ends)) < half, 1.0, -1.0)
    densities = _density(quantiles)
    slope = float(np.max(largest / np.minimum(densities[:-1], densities[1:]))) * (
        1 + noise.relative_error
    )
    lost = binomial.cdf(lowest + shift, m, p) + binomial.sf(highest - shift, m, p)
    once = binomial.cdf(lowest, m, p) + binomial.sf(highest - shift - 1, m, p)
    return GaussianBound(slope, float(max(lost, once)) * (1 + noise.relative_error))


def _density(z: Vector) -> Vector:
    return np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _first(condition: Callable[[Vector], npt.NDArray[np.bool_]], low: int, high: int) -> int:
    """Returns the least whole number from ``low`` on from which on a condition holds.

    If the condition does not hold before ``high``, that is returned.
    """
    low -= 1
    while high - low > 1:  # many points at a time, because SciPy takes as long for one
        points = np.unique(np.linspace(low, high, 64).round())
        holds = np.append(condition(points[1:-1]), True)
        low, high = (int(point) for point in points[np.argmax(holds) :][:2])
    return high


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinomialSum:
    """One round's sum as the analyzer sees it.

    Attributes:
        noise: Of each coordinate.
        shift: g: one user's move from end to end of the ball, in grid steps.
        dimension: d.
    """

    noise: BinomialNoise
    shift: int
    dimension: int


Rounds = Sequence[tuple[BinomialSum, int]]


def gaussian_equivalent(binomial_sum: BinomialSum, *, lost: float) -> tuple[float, float]:
    """Returns (μ, lost): the round is a μ-Gaussian mechanism, but for a probability ``lost``.

    That probability is at most the one given.
    """
    bound = gaussian_bound(
        binomial_sum.noise,
        shift=binomial_sum.shift,
        tail=max(lost / binomial_sum.dimension, 1e-300),
    )
    return bound.slope * binomial_sum.shift, bound.lost * binomial_sum.dimension


def compute_epsilon(rounds: Rounds, *, delta: float) -> float:
    """Returns ε at δ of rounds with the same users, rounded up; ``inf`` if the noise is too small.

    Args:
        rounds: Rounds, each with its number of repetitions, at least 1; later ones may depend on
            the earlier ones' sums.
        delta: δ in (0, 1).

    Formal Guarantees:
        Proved for every data set, replacement adjacency.
    """
    delta = open_unit_interval("delta", delta)
    total = sum(count for _, count in rounds)
    squares = lost = 0.0
    for binomial_sum, count in rounds:
        mu, missing = gaussian_equivalent(binomial_sum, lost=LOST_SHARE * delta / total)
        squares += count * mu**2
        lost += count * missing
    if not math.isfinite(squares) or lost >= delta:
        return math.inf
    return gaussian.compute_epsilon(mu=math.sqrt(squares), delta=delta - lost)


def lower_epsilon(rounds: Rounds, *, delta: float, sample_rate: float = 1.0) -> float:
    """Returns a lower bound on the smallest valid ε, rounded down.

    It is that of one user whose value moves from end to end along one coordinate.

    Args:
        rounds: As :func:`compute_epsilon`.
        delta: δ in (0, 1).
        sample_rate: The probability that the user participates in a round, in secret, if all others
            hold the value that the user's becomes.

    Returns:
        ε ≥ 0; ``inf`` if some round's outcomes reveal the value for certain.
    """
    possible = [
        (binomial_sum, count)
        for binomial_sum, count in rounds
        if binomial_sum.shift <= binomial_sum.noise.trials
    ]
    if len(possible) < len(rounds) and sample_rate == 1:
        return math.inf
    if not possible:
        return 0.0
    each_way = [
        [
            (Mixture.of(_shift_distribution(binomial_sum, reflected).scaled(sample_rate)), count)
            for binomial_sum, count in possible
        ]
        for reflected in (False, True)
    ]
    return max(privacy_loss.lower_epsilon(distributions, delta=delta) for distributions in each_way)


@functools.lru_cache(maxsize=256)
def _shift_distribution(binomial_sum: BinomialSum, reflected: bool) -> RatioDistribution:
    """Returns R's distribution for a shift of one coordinate.

    Outcomes are grouped, which can only lower ε.
    """
    noise = binomial_sum.noise.reflected if reflected else binomial_sum.noise
    m, p = noise.trials, noise.probability
    deviation = math.sqrt(noise.variance)
    reach = 14 * deviation + binomial_sum.shift
    first, last = max(math.floor(m * p - reach), -1), min(math.ceil(m * p + reach), m)
    ends = np.unique(np.round(np.linspace(first, last, min(_CELLS, last - first) + 1)))
    stayed = _cell_masses(ends, m, p)
    moved = _cell_masses(ends - binomial_sum.shift, m, p)
    keep = (stayed > 0) & (
        moved > 0
    )  # the other outcomes reveal the value for certain; dropping them lowers ε
    return RatioDistribution(
        moved[keep] / stayed[keep], stayed[keep], 0.0, 0.0, binomial_sum.shift / deviation
    )


def _cell_masses(ends: Vector, trials: int, probability: float) -> Vector:
    """Returns P(ends[i] < B ≤ ends[i + 1]), from whichever tail is the smaller."""
    below, above = (
        binomial.cdf(ends, trials, probability),
        binomial.sf(ends, trials, probability),
    )
    return np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
