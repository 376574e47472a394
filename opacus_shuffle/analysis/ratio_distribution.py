r"""Computes a discrete distribution above or below that of the mean ratio R in convex order.

R is the likelihood ratio of a shuffled round (:mod:`opacus_shuffle.analysis.mean_ratio`): the mean
of n independent copies of X = e^{√u·z − u/2}, z ~ N(0, 1), u = 1/σ². Both directions' hockey sticks
are expectations of convex functions of R, so such a distribution bounds both at once. X is cut into
cells along its logarithm; a cell's mass goes to its two ends (**upper**) or to its mean
(**lower**), and R_n comes from R_⌊n/2⌋ and R_⌈n/2⌉ (docs/proofs/06_distributions_on_grids.md, 6.1
to 6.5). With the default step, upper and lower ε differ by some tenths of a percent for n from 1 to
10⁷.

>>> upper = mean_distribution(noise_multiplier=9.48, num_users=60_000)
>>> lower = mean_distribution(noise_multiplier=9.48, num_users=60_000, side="lower")
>>> def hockey_stick(ratio, epsilon):
...     return float(ratio.masses @ np.maximum(ratio.offsets - math.expm1(epsilon), 0.0))
>>> round(hockey_stick(lower, 0.0005), 8), round(hockey_stick(upper, 0.0005), 8)
(2.634e-05, 2.652e-05)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np
from scipy.special import ndtr

from opacus_shuffle.analysis.discretization import (
    atoms_above,
    growing_grid,
    mean_of_atoms,
    normal_masses,
)
from opacus_shuffle.analysis.mean_ratio import Sampling, Vector
from opacus_shuffle.analysis.report_shapes import Shape, StepTilt, shape_of

Side = Literal["upper", "lower"]

RESOLUTION = 0.03
"""Grid step in standard deviations of log R."""

_WIDENING = 8.0
"""Beyond this many standard deviations the grid's steps grow with the distance."""

TAILS = (9.0, 13.0, 19.0, 27.0, 37.0)
"""Where the tails of one report end, in standard deviations: probabilities 1e-19 to 1e-299."""

_LARGEST_LOG = 650.0
"""The largest logarithm of a ratio that is used."""


@dataclasses.dataclass(frozen=True)
class RatioDistribution:
    """A discrete distribution on [0, ∞), with the part of its mean at infinity.

    Attributes:
        offsets: R − ``centre``, increasing, shape (k,).
        masses: Probabilities under the data set in which nobody moved, shape (k,).
        centre: 1 if ratios near 1 matter, 0 if ratios near 0 do.
        infinite: The probability of R = ∞ under the moved data set.
        scale: The approximate standard deviation of log R, the unit of grids.
    """

    offsets: Vector
    masses: Vector
    centre: float
    infinite: float
    scale: float

    @property
    def log_ratios(self) -> Vector:
        """The logarithms of R, −∞ for R = 0."""
        with np.errstate(divide="ignore"):
            return np.log1p(self.offsets) if self.centre else np.log(self.offsets)

    def scaled(self, rate: float) -> RatioDistribution:
        """Returns the distribution of 1 + rate·(R − 1), at least 0; any rate ≥ 0."""
        offsets = np.maximum(self.offsets * rate + (1 - rate) * (1 - self.centre), -self.centre)
        return RatioDistribution(
            offsets, self.masses, self.centre, self.infinite * rate, self.scale * rate
        )

    def clipped(self, budget: float, side: Side) -> RatioDistribution:
        """Returns the distribution without its outermost atoms, which spans fewer decades (6.5).

        The atoms have a probability of up to ``budget`` at either end. Upper: they move to R = 0
        and to infinity, and the next atom inside takes the mass that preserves the mean. Lower:
        they are dropped.
        """
        ratios = self.offsets + self.centre
        above = np.cumsum((self.masses * ratios)[::-1])[::-1]
        start = min(int(np.searchsorted(np.cumsum(self.masses), budget)), len(ratios) - 1)
        end = max(int(np.searchsorted(-above, -budget)), start + 1)
        masses = self.masses[start:end].copy()
        offsets = self.offsets[start:end]
        if side == "lower":
            return dataclasses.replace(self, offsets=offsets, masses=masses)
        low, high = slice(0, start), slice(end, None)
        stays = float(self.masses[low] @ ratios[low]) / ratios[start] if ratios[start] > 0 else 0.0
        zero = max(float(self.masses[low].sum()) - stays, 0.0)
        infinite = self.infinite + float(self.masses[high] @ (self.offsets[high] - offsets[-1]))
        masses[0] += stays
        masses[-1] += self.masses[high].sum()
        if zero:
            offsets, masses = np.append(-self.centre, offsets), np.append(zero, masses)
        return dataclasses.replace(self, offsets=offsets, masses=masses, infinite=infinite)


def has_distribution(noise_multiplier: float, tail: float = TAILS[0]) -> bool:
    """Tells whether σ is large enough for double precision (σ ≥ 0.05 with the shortest tails)."""
    root = 1 / noise_multiplier
    return root * root / 2 + tail * root <= _LARGEST_LOG


def mean_distribution(
    *,
    noise_multiplier: float,
    num_users: int,
    sample_rate: float = 1.0,
    sampling: Sampling = None,
    report: str = "gaussian",
    side: Side = "upper",
    resolution: float = RESOLUTION,
    tail: float = TAILS[0],
) -> RatioDistribution:
    """Returns the distribution of R for one round.

    Its size is of order 20/resolution for every n.

    Args:
        noise_multiplier: Local σ, at least 0.05 (less where a longer ``tail`` asks for more, see
            :func:`has_distribution`).
        num_users: n, the whole population.
        sample_rate: γ; without replacement m = round(γ·n) take part.
        sampling: ``None``, ``"fixed_size"`` or ``"poisson"``.
        report: The shape of X (:mod:`opacus_shuffle.analysis.report_shapes`).
        side: ``"upper"`` is above R in convex order, ``"lower"`` below.
        resolution: Grid step in standard deviations of log R; time grows with its inverse square,
            the error with its square.
        tail: Where the tails of one report end, in standard deviations.

    Raises:
        ValueError: If σ is too small.

    Formal Guarantees:
        Exact in convex order, up to floating-point rounding of sums of positive terms (relative
        1e-13).

    Source: this library's; the mean-preserving split of one variable is "connect the dots"
    (Doroshenko et al. 2022).
    """
    if report == "gaussian" and not has_distribution(noise_multiplier, tail):
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r} is too small for the distribution of the mean "
            "ratio: use 0.05 or more"
        )
    shape = shape_of(report, noise_multiplier)
    if sampling == "fixed_size":
        reports = round(sample_rate * num_users)
        drawn = _distribution(shape, 1.0, reports, side, resolution, tail)
        return drawn.scaled(reports / num_users)
    return _distribution(shape, sample_rate, num_users, side, resolution, tail)


@functools.lru_cache(maxsize=4096)
def _distribution(
    shape: Shape, rate: float, users: int, side: Side, resolution: float, tail: float
) -> RatioDistribution:
    """Returns the mean of ``users`` copies of 1 − B + B·X: halves, and halves of halves."""
    if users == 1:
        return _one_report(shape, rate, side, resolution, tail)
    small = users // 2
    first, second = (
        _distribution(shape, rate, number, side, resolution, tail)
        for number in (small, users - small)
    )
    weight, scale, centre = small / users, _scale(shape, rate, users), first.centre
    lows = [half.offsets[half.offsets > -centre].min() for half in (first, second)]
    if isinstance(shape, StepTilt):
        # If a copy may be 0, the mean may be far below every positive copy.
        lows.append(math.expm1(shape.log_range(tail)[0]))
    ends = np.array([min(lows), max(first.offsets[-1], second.offsets[-1])])
    low, high = np.log1p(ends) if centre else np.log(ends)
    grid = growing_grid(_WIDENING * scale, low, high, scale * resolution)
    one = first.offsets, first.masses
    masses, moments, cuts = mean_of_atoms(
        one,
        one if first is second else (second.offsets, second.masses),
        weight=weight,
        cuts=_offsets_of(grid, centre),
        centre=centre,
        negligible=float(ndtr(-tail)),
    )
    mean = _discretize(masses, moments, cuts, centre=centre, scale=scale, side=side)
    infinite = mean.infinite + weight * first.infinite + (1 - weight) * second.infinite
    return dataclasses.replace(mean, infinite=infinite)


def _scale(shape: Shape, rate: float, users: int) -> float:
    """Returns the deviation of log R if R were lognormal with its variance γ·Var X/n.

    It is exact for one Gaussian report.
    """
    excess = math.log(rate / users) + shape.log_variance
    return math.sqrt(excess if excess > 30 else math.log1p(math.exp(excess)))


def _offsets_of(log_ratios: Vector, centre: float) -> Vector:
    """Returns R − centre at the grid's points, after the floor R = 0."""
    return np.concatenate([[-centre], np.expm1(log_ratios) if centre else np.exp(log_ratios)])


def _one_report(
    shape: Shape, rate: float, side: Side, resolution: float, tail: float
) -> RatioDistribution:
    """Returns 1 − B + B·X on the grid.

    Masses and first moments of the cells are exact (6.2, 6.4).
    """
    scale, centre = _scale(shape, rate, 1), shape.centre
    unit = min(scale, 1 / shape.noise_multiplier)
    # R = 1 is among its points.
    grid = growing_grid(_WIDENING * unit, *shape.log_range(tail), unit * resolution)
    z = np.concatenate([[-np.inf], shape.inverse(grid), [np.inf]])
    masses, moments = normal_masses(z), shape.moments(z, centre=centre)
    if rate < 1:
        masses, moments = masses * rate, moments * rate
        at_one = int(np.searchsorted(grid, 0.0, side="right"))
        masses[at_one] += 1 - rate
        moments[at_one] += (1 - rate) * (1 - centre)
    return _discretize(
        masses, moments, _offsets_of(grid, centre), centre=centre, scale=scale, side=side
    )


def _discretize(
    masses: Vector, moments: Vector, cuts: Vector, *, centre: float, scale: float, side: Side
) -> RatioDistribution:
    """Returns atoms from cells [cuts₀, cuts₁), …, [cuts_k, ∞).

    They are at the cells' ends (upper) or at their means (lower).
    """
    if side == "lower":
        some = masses > 0
        # No mean is below R = 0, but a rounded quotient may be.
        means = np.maximum(moments[some] / masses[some], -centre)
        return RatioDistribution(means, masses[some], centre, 0.0, scale)
    atoms, infinite = atoms_above(masses, moments, cuts)
    return RatioDistribution(cuts, atoms, centre, infinite, scale)
