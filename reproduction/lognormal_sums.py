r"""Approximates sums of log-normal terms.

The methods are WS Lemma 1 (Fenton–Wilkinson) and the others of WS Figure 2.

S = Σ_j counts_j terms e^Y, Y ~ N(means_j, std²), all independent. No closed form is known; WS
Theorem 6 replaces S by one log-normal variable. Equal terms are given as one mean and a count, so
10⁸ of them cost no more than one. These are approximations, not privacy bounds; :func:`monte_carlo`
shows their errors.

    ==================  ======================================================================
    fenton_wilkinson    the log-normal distribution with the sum's own mean and variance
                        (WS Eq. 9–10)
    schwartz_yeh        the normal distribution with the mean and variance of log S, found by
                        combining two terms at a time
    monte_carlo         samples of log S; the terms beyond ``largest`` per group by the central
                        limit theorem
    least_squares       a normal distribution through the samples' quantiles
    kernel_density      the samples, smoothed
    ==================  ======================================================================

>>> # 10⁸ terms with c/σ = 1/0.25, as in WS Figure 2:
>>> distribution = fenton_wilkinson(0.0, 4.0, 10**8)
>>> generator = np.random.default_rng(0)
>>> samples = monte_carlo(
...     0.0, 4.0, 10**8, repetitions=100, generator=generator, largest=1000
... )
>>> round(distribution.mean, 2), round(distribution.std, 2), round(float(np.median(samples)), 1)
(26.38, 0.29, 26.4)
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_ndtr, logsumexp, ndtr, ndtri
from scipy.stats import gaussian_kde

from opacus_shuffle.core.validation import finite_number, instance_of, integer, one_of

Vector = npt.NDArray[np.float64]

LARGEST_COUNT = 2**53
_LARGEST_STD = 100.0
_LARGEST_MEAN = 1e6
_CHUNK = 2**19
"""Number of draws in memory at a time."""
_STRIDE = 200
"""Equal terms are added one by one up to twice this number.

After n terms, further terms are added in strides of n divided by this number.
"""
_BERRY_ESSEEN = 0.4748
"""Shevtsova 2011, equal terms."""


@dataclasses.dataclass(frozen=True)
class NormalDistribution:
    """A normal distribution for log S.

    Attributes:
        mean: Of log S.
        std: Standard deviation of log S, > 0.
    """

    mean: float
    std: float

    def cdf(self, x: npt.ArrayLike) -> Vector:
        """P(log S ≤ x), the shape of ``x``."""
        return np.asarray(ndtr((np.asarray(x, dtype=np.float64) - self.mean) / self.std))


@dataclasses.dataclass(frozen=True, eq=False)
class SampledDistribution:
    """The distribution of samples of log S, each smoothed by a normal of ``bandwidth``.

    At 0 it is the empirical distribution.

    Attributes:
        samples: Of log S, shape (k,).
        bandwidth: Standard deviation of the smoothing, ≥ 0.
    """

    samples: Vector
    bandwidth: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", np.sort(_checked_samples(self.samples, at_least=1)))
        if finite_number("bandwidth", self.bandwidth) < 0:
            raise ValueError(f"bandwidth must not be negative, got {self.bandwidth!r}")

    def cdf(self, x: npt.ArrayLike) -> Vector:
        """P(log S ≤ x), the shape of ``x``."""
        points = np.asarray(x, dtype=np.float64)
        if not self.bandwidth:
            return np.asarray(
                np.searchsorted(self.samples, points, side="right") / len(self.samples)
            )
        means = [
            float(np.mean(ndtr((point - self.samples) / self.bandwidth)))
            for point in points.ravel()
        ]
        return np.array(means).reshape(points.shape)


def fenton_wilkinson(
    means: npt.ArrayLike, std: float, counts: npt.ArrayLike | None = None
) -> NormalDistribution:
    """Returns the log-normal distribution with the mean and the variance of S: WS Lemma 1.

    Eq. 9–10 are computed in logarithms throughout.

    Args:
        means: Means of Y, shape (k,) or one number, at most 1e6 in size.
        std: Standard deviation of every Y, in [1e-6, 100].
        counts: How many terms have each mean, shape (k,), whole numbers of at least 1; ``None``
            means one each.

    Returns:
        The normal distribution that replaces that of log S.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        None: an approximation. Mean and variance of S itself are exact, but where std² exceeds
        about log d they are dominated by terms so large that they rarely occur: S is almost never
        near its own mean, and this distribution lies far below that of S.
    """
    centres, numbers, width = _checked(means, std, counts)
    top = float(centres.max())
    log_first = float(logsumexp(centres - top, b=numbers))
    log_second = float(logsumexp(2 * (centres - top), b=numbers))
    log_excess = width**2 + math.log(-math.expm1(-(width**2)))  # log(e^{std²} − 1)
    variance = float(np.logaddexp(0.0, log_excess + log_second - 2 * log_first))
    return NormalDistribution(top + log_first + (width**2 - variance) / 2, math.sqrt(variance))


def schwartz_yeh(
    means: npt.ArrayLike,
    std: float,
    counts: npt.ArrayLike | None = None,
    *,
    combine: Literal["one_by_one", "doubling"] = "one_by_one",
) -> NormalDistribution:
    """Computes Schwartz & Yeh's 1982 approximation by a normal, two terms at a time.

    The method repeatedly replaces log(e^{Y1} + e^{Y2}) by a normal with its exact mean and
    variance.

    ``"one_by_one"`` adds one term at a time, as WS Section VI-C says. The distribution changes
    little from one of n equal terms to the next, so from 400 on they are added n/200 at once, by a
    midpoint rule (for 10⁵ terms this moves the standard deviation by less than 1e-6 of itself for
    std up to 4, by 1e-3 for std 20). ``"doubling"`` adds equal terms in halves, log₂ d times. The
    two are *not* the same approximation: adding two equal normal logarithms averages out their
    tails, and no later step restores them. For 10⁸ terms of std 4, the median of S is e^{−2.1}
    times the true one with doubling, and e^{0.02} times the true one with single steps.

    Args:
        means: Means of Y, shape (k,) or one number, at most 1e6 in size.
        std: Standard deviation of every Y, in [1e-6, 100].
        counts: How many terms have each mean, shape (k,), whole numbers of at least 1; ``None``
            means one each.
        combine: ``"one_by_one"`` or ``"doubling"``.

    Returns:
        The normal distribution that replaces that of log S.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        None for more than two terms: an approximation. For two terms, mean and variance are exact
        up to rounding.
    """
    centres, numbers, width = _checked(means, std, counts)
    add = (
        _add_doubling
        if one_of("combine", combine, ("one_by_one", "doubling")) == "doubling"
        else _add_one_by_one
    )
    total: NormalDistribution | None = None
    for index in np.argsort(centres, kind="stable"):  # the small terms first
        total = add(total, NormalDistribution(float(centres[index]), width), int(numbers[index]))
    assert total is not None  # there is a term
    return total


def _add_doubling(
    total: NormalDistribution | None, term: NormalDistribution, count: int
) -> NormalDistribution:
    """Adds ``count`` terms like this one to the total, by the binary digits of the count."""
    power = term
    while count:
        if count & 1:
            total = power if total is None else log_sum_of_two(total, power)
        count >>= 1
        power = log_sum_of_two(power, power) if count else power
    assert total is not None  # count was at least 1
    return total


def _add_one_by_one(
    total: NormalDistribution | None, term: NormalDistribution, count: int
) -> NormalDistribution:
    """Adds ``count`` terms like this one to the total, one after the other.

    It adds several terms at once as soon as a single term changes little.
    """
    added = 0
    if total is None:
        total, added = term, 1
    while added < count:
        stride = min(max(added // _STRIDE, 1), count - added)
        total = log_sum_of_two(total, term) if stride == 1 else _stride(total, term, stride)
        added += stride
    return total


def _stride(total: NormalDistribution, term: NormalDistribution, stride: int) -> NormalDistribution:
    """Adds ``stride`` equal terms at once.

    It uses the midpoint rule for e^mean and variance·e^{2·mean}, which grow almost linearly.
    """
    size, spread = _growth(total, term)
    # The increments that are added up here start with the total's own: their middle lies (stride −
    # 1)/2 terms on.
    size, spread = 1 + (stride - 1) / 2 * size, total.std**2 + (stride - 1) / 2 * spread
    middle = NormalDistribution(total.mean + math.log(size), math.sqrt(spread) / size)
    more, wider = _growth(middle, term)
    grown = 1 + stride * size * more
    return NormalDistribution(
        total.mean + math.log(grown), math.sqrt(total.std**2 + stride * size**2 * wider) / grown
    )


def _growth(total: NormalDistribution, term: NormalDistribution) -> tuple[float, float]:
    """Returns the increments of e^mean and of variance·e^{2·mean} by one more term.

    The increments are in units of e^mean and e^{2·mean}.
    """
    gain, growth = _increments(total, term)
    return math.expm1(gain), growth * math.exp(2 * gain) + total.std**2 * math.expm1(2 * gain)


def log_sum_of_two(one: NormalDistribution, other: NormalDistribution) -> NormalDistribution:
    """Returns the normal distribution with the mean and variance of log(e^{Y1} + e^{Y2}).

    Y1 and Y2 are independent.

    With w = Y2 − Y1 the logarithm is Y1 + g(w), g(w) = log(1 + e^w), and Stein's lemma gives
    Cov(Y1, g(w)) = −Var(Y1)·E g'(w). The moments of g(w) are integrals over the line of an analytic
    function, for which the trapezoid rule's error falls exponentially as its step does: below 1e-16
    here for any std. From std 5 on, Gauss–Hermite nodes would be too far apart for the bend of g.

    Args:
        one: Distribution of Y1.
        other: Distribution of Y2.

    Returns:
        The normal distribution.
    """
    if other.mean > one.mean:  # reduces cancellation
        one, other = other, one
    gain, growth = _increments(one, other)
    return NormalDistribution(one.mean + gain, math.sqrt(one.std**2 + growth))


def _increments(one: NormalDistribution, other: NormalDistribution) -> tuple[float, float]:
    """Returns the increments of the logarithm's mean and variance from adding e^{Y2} to e^{Y1}."""
    deviation = math.hypot(one.std, other.std)
    # Errors: e^{−2π²(deviation/step)²} for the normal density, e^{−2π²/step} for the singularities
    # of g at ±iπ.
    step = min(deviation / 2.5, 0.5)
    reach = math.ceil(12 * deviation / step)
    offsets = step * np.arange(-reach, reach + 1)
    weights = np.exp(-((offsets / deviation) ** 2) / 2)
    weights /= weights.sum()
    w = other.mean - one.mean + offsets
    g = np.logaddexp(0.0, w)
    gain = float(weights @ g)
    return gain, float(weights @ (g - gain) ** 2) - 2 * one.std**2 * float(weights @ expit(w))


def monte_carlo(
    means: npt.ArrayLike,
    std: float,
    counts: npt.ArrayLike | None = None,
    *,
    repetitions: int = 1000,
    generator: np.random.Generator | None = None,
    largest: int | None = None,
) -> Vector:
    """Draws samples of log S.

    Memory is bounded for any number of terms; time is proportional to the number of drawn terms.

    With ``largest``, a group of more than twice as many terms is split at the level that
    ``largest`` of its terms exceed on average. Those above (their number is drawn, too) are drawn
    one by one, so the tail is exact; the sum of the others is drawn from the normal distribution
    with its exact mean and variance. :func:`largest_error` bounds the effect on the CDF: 0.003 for
    10⁸ terms, std 4 and ``largest`` 10⁴. 1000 samples then take a second, and three hours if all
    terms are drawn one by one.

    Args:
        means: Means of Y, shape (k,) or one number, at most 1e6 in size.
        std: Standard deviation of every Y, in [1e-6, 100].
        counts: How many terms have each mean, shape (k,), whole numbers of at least 1; ``None``
            means one each.
        repetitions: Number of samples. The CDF's own error is 1.63/√repetitions at 99 % confidence
            (Kolmogorov).
        generator: Source of randomness; ``None`` means a fresh one from the operating system's
            entropy.
        largest: How many terms of each group to draw one by one, at least 100; ``None`` means all.

    Returns:
        Samples of log S, shape (repetitions,).

    Raises:
        ValueError: If an argument is out of range.
    """
    centres, numbers, width = _checked(means, std, counts)
    repetitions = integer("repetitions", repetitions)
    generator = np.random.default_rng() if generator is None else generator
    instance_of("generator", generator, (np.random.Generator,))
    split = np.zeros(len(centres), dtype=bool)
    if largest is not None:
        split = numbers > 2 * integer("largest", largest, minimum=100)
    samples = _one_by_one(centres[~split], numbers[~split], width, repetitions, generator)
    for centre, count in zip(centres[split], numbers[split], strict=True):
        samples = np.logaddexp(
            samples,
            centre + _split_group(int(count), width, repetitions, generator, int(largest or 0)),
        )
    return samples


def _one_by_one(
    centres: Vector, numbers: Vector, width: float, repetitions: int, generator: np.random.Generator
) -> Vector:
    """Returns log sums with every term drawn; −∞ if there are no terms."""
    samples = np.full(repetitions, -np.inf)
    ends = np.cumsum(numbers.astype(np.int64))
    total = int(ends[-1]) if len(ends) else 0
    rows = max(1, min(repetitions, _CHUNK // max(total, 1)))
    for start in range(0, repetitions, rows):
        part = samples[start : start + rows]
        terms = _CHUNK // len(part)
        for first in range(0, total, terms):
            which = np.arange(first, min(first + terms, total))
            draws = generator.standard_normal((len(part), len(which)))
            draws *= width
            draws += centres[np.searchsorted(ends, which, side="right")]
            part[:] = np.logaddexp(part, _log_sum(draws))
    return samples


def _split_group(
    count: int, width: float, repetitions: int, generator: np.random.Generator, largest: int
) -> Vector:
    """Returns log Σ e^{width·z} over ``count`` terms.

    It draws the terms above the level one by one, and the sum of the others as a normal variable.
    """
    share = largest / count
    log_mean, relative = _body(width, share)
    above = generator.binomial(count, share, size=repetitions)
    below = count - above
    shifts = relative / np.sqrt(below) * generator.standard_normal(repetitions)
    samples = log_mean + np.log(below) + np.log1p(np.maximum(shifts, np.nextafter(-1.0, 0.0)))
    for index, number in enumerate(above):
        draws = -width * ndtri(share * (1 - generator.random(int(number))))
        samples[index] = (
            np.logaddexp(samples[index], _log_sum(draws[None])[0]) if number else samples[index]
        )
    return samples


def _log_sum(values: Vector) -> Vector:
    """Returns log Σ e^v along the last axis; overwrites ``values``."""
    top = values.max(axis=-1)
    values -= top[:, None]
    np.exp(values, out=values)
    return np.asarray(top + np.log(values.sum(axis=-1)))


def _body(width: float, share: float) -> tuple[float, float]:
    """Returns the log of the mean, and the standard deviation divided by the mean.

    Both are those of e^{width·z} given that z is below its upper ``share`` quantile.
    """
    level, log_kept = -float(ndtri(share)), math.log1p(-share)
    log_mean = width**2 / 2 + float(log_ndtr(level - width)) - log_kept
    log_square = 2 * width**2 + float(log_ndtr(level - 2 * width)) - log_kept
    return log_mean, math.sqrt(max(math.expm1(log_square - 2 * log_mean), 0.0))


def largest_error(std: float, count: int, largest: int) -> float:
    """Bounds the error of :func:`monte_carlo` with ``largest`` in the CDF of one group's sum.

    The bound is valid at every point (Berry–Esseen).

    Given how many terms lie above the level, the others are independent, and the rest of S is
    independent of them; so the bound for their standardised sum is one for S.

    Args:
        std: Standard deviation of every Y, in [1e-6, 100].
        count: Number of terms in the group.
        largest: How many of them are drawn one by one, at least 100.

    Returns:
        A bound on the distance of the two CDFs, in [0, 1]; 0 for a group that is small enough to be
        drawn one by one.

    Raises:
        ValueError: If an argument is out of range.
    """
    _, numbers, width = _checked(0.0, std, count)
    count, largest = int(numbers[0]), integer("largest", largest, minimum=100)
    if count <= 2 * largest:
        return 0.0
    share = largest / count
    level, (log_mean, relative) = -float(ndtri(share)), _body(width, share)
    middle = min(max(log_mean / width, -12.0), level)  # where e^{width·z} is at its mean
    third = 0.0
    for low, high in ((-13.0, middle), (middle, level)):
        nodes, weights = np.polynomial.legendre.leggauss(400)
        z = (high + low) / 2 + (high - low) / 2 * nodes
        values = (
            np.abs(np.expm1(width * z - log_mean)) ** 3
            * np.exp(-(z**2) / 2)
            / math.sqrt(2 * math.pi)
        )
        third += float(weights @ values) * (high - low) / 2
    # At most 2·largest terms lie above, except with probability e^{−largest/3} (Chernoff); the
    # bound includes it.
    bound = _BERRY_ESSEEN * third / (1 - share) / (
        relative**3 * math.sqrt(count - 2 * largest)
    ) + math.exp(-largest / 3)
    return min(1.0, 1.01 * bound)  # 1 % for the error of the quadrature


def least_squares(samples: npt.ArrayLike) -> NormalDistribution:
    """Fits the normal distribution whose quantiles have the least squared distance to the samples'.

    It is the regression line of a normal probability plot.

    Args:
        samples: Samples of log S, shape (k,), k ≥ 2, not all equal.

    Returns:
        The normal distribution.

    Raises:
        ValueError: If there are too few samples.
    """
    values = np.sort(_checked_samples(samples, at_least=2))
    scores = ndtri((np.arange(len(values)) + 0.5) / len(values))
    return NormalDistribution(
        float(values.mean()), float(scores @ (values - values.mean()) / (scores @ scores))
    )


def kernel_density(samples: npt.ArrayLike) -> SampledDistribution:
    """Returns a Gaussian kernel density estimate of log S with SciPy's bandwidth (Scott's rule).

    Args:
        samples: Samples of log S, shape (k,), k ≥ 2, not all equal.

    Returns:
        The smoothed distribution.

    Raises:
        ValueError: If there are too few samples.
    """
    values = _checked_samples(samples, at_least=2)
    return SampledDistribution(values, math.sqrt(float(gaussian_kde(values).covariance[0, 0])))


def _checked_samples(samples: npt.ArrayLike, *, at_least: int) -> Vector:
    """Checks that samples are finite and, if at least two are required, not all equal."""
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or len(values) < at_least or not np.all(np.isfinite(values)):
        raise ValueError(
            f"samples must be a vector of at least {at_least} finite numbers, got shape "
            f"{values.shape}"
        )
    if at_least > 1 and values.min() == values.max():
        raise ValueError(f"samples must not all be equal, got {len(values)} times {values[0]!r}")
    return values


def _checked(
    means: npt.ArrayLike, std: float, counts: npt.ArrayLike | None
) -> tuple[Vector, Vector, float]:
    """Returns the checked terms: means and counts of one shape (k,), and the standard deviation."""
    centres = np.atleast_1d(np.asarray(means, dtype=np.float64))
    numbers = (
        np.ones(centres.shape)
        if counts is None
        else np.atleast_1d(np.asarray(counts, dtype=np.float64))
    )
    if centres.ndim != 1 or not len(centres) or not np.all(np.abs(centres) <= _LARGEST_MEAN):
        raise ValueError(
            f"means must be a number or a vector of numbers in [-1e6, 1e6], got {means!r}"
        )
    if numbers.shape != centres.shape:
        raise ValueError(
            f"counts must have as many entries as means ({len(centres)}), got shape {numbers.shape}"
        )
    if (
        not np.all((numbers >= 1) & (numbers == np.floor(numbers)))
        or not numbers.sum() <= LARGEST_COUNT
    ):
        raise ValueError(
            f"counts must be whole numbers of at least 1 (2**53 in all at most), got {counts!r}"
        )
    width = finite_number("std", std)
    if not 1e-6 <= width <= _LARGEST_STD:
        raise ValueError(f"std must lie in [1e-6, {_LARGEST_STD:g}], got {std!r}")
    return centres, numbers, width
