r"""Bounds the likelihood ratio of a record that becomes its opposite among n − 1 reports of zero.

This is the worst replacement.

With X± = e^{±√u·z − u/2}, z ~ N(0, 1), u = 1/σ², a report of zero has likelihood ratios X₊ and X₋
to the two reports that are compared, at distance 2. Among n shuffled reports the round is the pair
of measures with densities 1 − π + π·X̄₊ and 1 − π + π·X̄₋, where X̄± are means of n copies and π is
the probability that user 1 takes part. Its hockey stick at e^ε, with θ = tanh(ε/2), is

    π·(1 + e^ε)·E(W̄_θ − θ/π)₊,    W_θ = ((1 − θ)(X₊ − 1) − (1 + θ)(X₋ − 1))/2,

which needs, for every θ, the distribution of a mean of one number per report. It is convex in θ, so
a few θ bound all of them. The curve of hockey sticks gives one distribution of a likelihood ratio,
above the true one in both directions at once, as they are equal. Proofs:
docs/proofs/09_replacement.md.

>>> replaced = opposite_reports(noise_multiplier=9.48, num_users=60_000)
>>> beyond = math.expm1(0.001)  # e^ε − 1; offsets are R − 1
>>> round(float(replaced.masses @ np.maximum(replaced.offsets - beyond, 0.0)), 8)
5.307e-05
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy.special import ndtr

from opacus_shuffle.analysis.discretization import (
    Atoms,
    atoms_above,
    growing_grid,
    mean_of_atoms,
    normal_masses,
)
from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.analysis.ratio_distribution import TAILS, RatioDistribution
from opacus_shuffle.analysis.report_shapes import GaussianShift, Shape, shape_of

_RESOLUTION, _COARSER = 0.05, 0.06
"""Grid steps in standard deviations of the mean; the coarser one is for σ below 2 (long tails)."""
_WIDENING = 3.0
"""Beyond this many standard deviations the grid's steps grow with the distance."""
_STEP, _GROWTH = 0.05, 8.0
"""The step of the curve in standard deviations of log R, and the number of them beyond which it
grows.
"""
_SLOPES, _MORE_SLOPES = (1.0, 2.0), tuple(place / 8 for place in range(1, 17))
"""The ε that the slopes θ = tanh(ε/2) are made for, over a power of two.

The power is between 2 and 4 standard deviations of log R. It is the same for many numbers of users,
which share the cached distributions of their slopes. Fewer users have more slopes.
"""
_FEW_USERS = 32
_STEEP, _NEAR_ONE = 0.5, 0.1
"""Above this slope, means also have cells near 1, of this width in units of 1 − slope."""
_LARGEST_SLOPE = 1 - 1e-6
_CLIPPED = 1e-4
"""The share of negligible probabilities that the tails of a mean may lose."""
_LARGEST_LOSS = 60.0
"""Privacy losses beyond this ε count as infinite."""
_LARGEST_ON_SLOPES = 20.0
"""Beyond this ε the values of slopes are kept constant, because 1 − θ is lost to rounding."""


def opposite_reports(
    *,
    noise_multiplier: float,
    num_users: int,
    sample_rate: float = 1.0,
    factor: float = 1.0,
    report: str = "gaussian",
    tail: float = TAILS[0],
    negligible: float = 1e-12,
) -> RatioDistribution:
    """Returns a distribution of R with hockey sticks above those of the round times ``factor``.

    It covers both directions.

    Args:
        noise_multiplier: Local σ.
        num_users: n, user 1 included.
        sample_rate: π in [0, 1], the probability that user 1's report is one of them.
        factor: A factor of the hockey sticks at ε ≥ 0, at least 1 (Φ(t)^{−k}, 1.6).
        report: The shape of X (:mod:`opacus_shuffle.analysis.report_shapes`).
        tail: Where the tails of one report end, in standard deviations.
        negligible: Probabilities that need no accuracy.

    Formal Guarantees:
        Propositions 9.3 to 9.5: an upper bound, up to floating-point rounding of sums of positive
        terms (relative 1e-13).
    """
    shape = shape_of(report, noise_multiplier)
    deviation = math.sqrt(math.log1p(4 * sample_rate**2 * shape.opposed_variance(0.0) / num_users))
    if deviation == 0:
        return RatioDistribution(np.array([0.0]), np.ones(1), 1.0, 0.0, 0.0)
    end = math.asinh(_LARGEST_LOSS / (_GROWTH * deviation)) * _GROWTH / _STEP
    epsilons = _GROWTH * deviation * np.sinh(np.arange(math.ceil(end)) * (_STEP / _GROWTH))
    # A hockey stick decreases in ε, so a bound at a smaller ε holds at a larger one as well.
    capped = np.minimum(epsilons, _LARGEST_ON_SLOPES)
    thetas = np.tanh(capped / 2)
    resolution = _RESOLUTION if noise_multiplier >= 2 else _COARSER
    means = functools.partial(
        _mean,
        shape,
        users=num_users,
        tail=tail,
        resolution=resolution,
        negligible=max(_CLIPPED * negligible, float(ndtr(-tail))),
    )
    unit = 2.0 ** math.floor(math.log2(4 * min(deviation, 1.0)))
    multiples = _SLOPES if num_users >= _FEW_USERS else _MORE_SLOPES
    slopes = [0.0, *(math.tanh(multiple * unit / 2) for multiple in multiples), 1.0]
    farther = 1 + multiples[0] / multiples[-1]
    single = np.ones(len(epsilons))
    if isinstance(shape, GaussianShift):
        single = _one_hockey_stick(epsilons, noise_multiplier, sample_rate)
    sticks_of_slopes = [_hockey_sticks(means(slope), thetas / sample_rate) for slope in slopes]
    while True:
        sticks = np.array(sticks_of_slopes)
        indices = np.clip(np.searchsorted(slopes, thetas, side="right") - 1, 0, len(slopes) - 2)
        share = (thetas - np.take(slopes, indices)) / np.take(np.diff(slopes), indices)
        columns = np.arange(len(thetas))
        chords = (1 - share) * sticks[indices, columns] + share * sticks[indices + 1, columns]
        curve = factor * np.minimum(sample_rate * (1 + np.exp(capped)) * chords, single)
        curve = np.minimum.accumulate(
            np.minimum(curve, 1.0)
        )  # hockey sticks are at most 1 and decrease
        further = math.tanh(farther * math.atanh(slopes[-2]))
        if np.interp(slopes[-2], thetas, curve) <= negligible or further > _LARGEST_SLOPE:
            break
        slopes.insert(-1, further)
        sticks_of_slopes.insert(-1, _hockey_sticks(means(further), thetas / sample_rate))
    enough = int(np.argmax(curve <= 2 * curve[-1] + 1e-3 * negligible)) + 1
    return _hull_distribution(epsilons[:enough], curve[:enough], deviation)


@functools.lru_cache(maxsize=4096)
def _mean(
    shape: Shape, slope: float, *, users: int, tail: float, resolution: float, negligible: float
) -> tuple[Atoms, float]:
    """Returns atoms above the mean of ``users`` copies of W_θ in increasing convex order.

    The second value is the part of the mean that is at infinity.
    """
    if users == 1:
        return _one_report(shape, slope, tail, resolution)
    small = users // 2
    halves = [
        _mean(shape, slope, users=number, tail=tail, resolution=resolution, negligible=negligible)
        for number in (small, users - small)
    ]
    (first, infinite), (second, other) = halves
    weight = small / users
    low, high = min(first[0][0], second[0][0]), max(first[0][-1], second[0][-1])
    deviation = math.sqrt(shape.opposed_variance(slope) / users)
    cuts = growing_grid(_WIDENING * deviation, low, high, deviation * resolution)
    if cuts[-2] < high:
        cuts[-1] = high  # no mass lies beyond, and W_1 never exceeds 1, which matters here
    if _STEEP < slope < 1:
        # Thresholds are as close to 1 as the slope is, and W_θ rarely exceeds 1.
        edge = 1 - slope
        ends = (max(low, -1.0) - 1) / edge, (min(high, 3.0) - 1) / edge
        near = 1 + edge * growing_grid(1.0, *ends, _NEAR_ONE)
        cuts = np.union1d(cuts, near[(near > cuts[0]) & (near < cuts[-2])])
    masses, moments, cuts = mean_of_atoms(
        first, second, weight=weight, cuts=cuts, centre=0.0, negligible=negligible
    )
    atoms, beyond = atoms_above(masses, moments, cuts)
    return (cuts, atoms), beyond + weight * infinite + (1 - weight) * other


def _one_report(shape: Shape, slope: float, tail: float, resolution: float) -> tuple[Atoms, float]:
    """Returns atoms above W_θ, which grows with z.

    Masses and first moments of the cells are exact.
    """
    reach = math.ceil(tail * max(1 / shape.noise_multiplier, 1.0) / resolution)
    z = np.linspace(-tail, tail, 2 * reach + 1)

    def w(plus: Vector, minus: Vector) -> Vector:
        return ((1 - slope) * plus - (1 + slope) * minus) / 2

    levels = w(shape.excess(z), shape.excess(-z))
    # Beyond the last point W_θ may have any value. That range must not share a cell with the range
    # before the first point, as it would where W_θ is level: the moments would cancel.
    levels[-1] += 2.0**-52
    # A level range of W_θ is one cell.
    cuts, first = np.unique(levels, return_index=True)
    ends = np.concatenate([[-np.inf], z[first[1:]], [np.inf]])
    moments = w(shape.moments(ends), shape.moments(ends, sign=-1.0))
    atoms, infinite = atoms_above(normal_masses(ends), moments, cuts)
    return (cuts, atoms), infinite


def _hockey_sticks(mean: tuple[Atoms, float], thresholds: Vector) -> Vector:
    """Returns E(W − threshold)₊ at many thresholds."""
    (indices, masses), infinite = mean
    at = np.searchsorted(indices, thresholds, side="right")
    above, moments = (
        np.append(np.cumsum(weights[::-1])[::-1], 0.0) for weights in (masses, masses * indices)
    )
    return np.maximum(moments[at] - thresholds * above[at], 0.0) + infinite


def _one_hockey_stick(epsilons: Vector, sigma: float, rate: float) -> Vector:
    """Returns the hockey sticks of one report, enlarged by more than rounding errors.

    Those of more users are never larger.
    """
    root, tau = 1 / sigma, np.exp(epsilons)
    middle = (1 - rate) / rate * np.expm1(epsilons) / 2 * math.exp(root**2 / 2)
    z = (
        np.log(middle + np.hypot(middle, np.exp(epsilons / 2))) / root
    )  # where π(X₊ − τX₋) = (1 − π)(τ − 1)
    gained = rate * ndtr(root - z)
    sticks = gained - rate * tau * ndtr(-root - z) - (1 - rate) * np.expm1(epsilons) * ndtr(-z)
    # The subtrahend is at most the first term, so rounding is a small share of that term.
    return np.maximum(sticks, 0.0) * (1 + 1e-9) + 1e-12 * gained


def _hull_distribution(epsilons: Vector, curve: Vector, scale: float) -> RatioDistribution:
    """Returns the R whose hockey sticks in both directions are the lower convex hull of the points.

    They start at ε = 0.

    As a function of τ = e^ε the hockey stick h is convex, and h(1/τ) = 1 − 1/τ + h(τ)/τ, as both
    directions are equal.
    """
    beyond = np.expm1(epsilons)  # τ − 1
    first = int(
        np.argmin(curve + (1 - curve) * np.tanh(epsilons / 2))
    )  # the chord between τ and 1/τ, at 1
    hull, slopes = [first], [-(1 - curve[first]) / (beyond[first] + 2)]
    for point in range(first + 1, len(curve)):
        slope = (curve[point] - curve[hull[-1]]) / (beyond[point] - beyond[hull[-1]])
        while len(hull) > 1 and slope <= slopes[-1]:
            hull.pop(), slopes.pop()
            slope = (curve[point] - curve[hull[-1]]) / (beyond[point] - beyond[hull[-1]])
        hull.append(point)
        slopes.append(slope)
    masses = np.maximum(np.diff(np.append(slopes, 0.0)), 0.0)
    losses, infinite = epsilons[hull], float(curve[hull[-1]])
    mirrored = (masses * np.exp(losses))[::-1]
    if first == 0:  # R = 1 is its own mirror image
        masses, losses, mirrored = np.append(2 * masses[0], masses[1:]), losses, mirrored[:-1]
    logs = np.append(-epsilons[hull][::-1][: len(mirrored)], losses)
    centre = 1.0 if scale < 0.1 else 0.0
    ratios = np.expm1(logs) if centre else np.exp(logs)
    return RatioDistribution(
        np.append(-centre, ratios),
        np.concatenate([[infinite], mirrored, masses]),
        centre,
        infinite,
        scale,
    )
