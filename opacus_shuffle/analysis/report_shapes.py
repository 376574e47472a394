r"""Defines the shapes of one report: how its density depends on a vector.

A report of zero is N(0, I), in units of its noise. A report of a vector along u has X(z) times that
density, where z is its component along u, and X grows with z and has mean 1 under N(0, 1):

* ``"gaussian"``: X(z) = exp(kz − k²/2), the report is shifted by k;
* ``"linear"``: X(z) = a·(z − t)₊, the report is tilted. Of all shapes with the same mean it has the
  least variance of X (docs/proofs/13_linear_reports.md, 13.1), and no exponential tail.
* ``"step"``: X is one number below t and another one above. It is bounded, so that a report has a
  pure local ε, too (13.7 to 13.9).

All are described by k, the mean of z in a report of norm C, or by σ = 1/k: the noise of a report
over the clipping norm, where reports are scaled so that their mean is the vector.

>>> shapes = LinearTilt(2.0), GaussianShift(2.0), StepTilt(2.0)
>>> [round(math.exp(shape.log_variance), 4) for shape in shapes]
[0.2516, 0.284, 0.3927]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from opacus_shuffle.analysis.discretization import lognormal_moments, normal_masses
from opacus_shuffle.analysis.mean_ratio import Vector

LEAST_TILTED_NOISE = 0.2
"""The least σ of linear and step reports. With less, almost every report reveals its vector."""

_LEVEL_NOISE = 8.0
"""Above this σ, X = 1 + z/σ and t = −σ in double precision, and general formulas cancel."""


@dataclasses.dataclass(frozen=True)
class GaussianShift:
    """Reports whose vector is added to N(0, I).

    Attributes:
        noise_multiplier: σ of one report over the clipping norm; the shift is 1/σ.
    """

    noise_multiplier: float

    @property
    def centre(self) -> float:
        """The number that is subtracted from ratios: 1 if those near 1 matter, 0 if near 0."""
        return 1.0 if self.noise_multiplier >= 1 else 0.0

    def excess(self, z: Vector) -> Vector:
        """Returns X − 1."""
        root = 1 / self.noise_multiplier
        return np.expm1(root * z - root**2 / 2)

    def moments(self, ends: Vector, *, centre: float = 1.0, sign: float = 1.0) -> Vector:
        """Returns E[X(sign·z) − centre; z in a cell] of the cells between neighbouring ends."""
        root = sign / self.noise_multiplier
        return lognormal_moments(ends, root) if centre else normal_masses(ends - root)

    def inverse(self, log_ratios: Vector) -> Vector:
        """Returns z from log X."""
        root = 1 / self.noise_multiplier
        return (log_ratios + root * root / 2) / root

    def log_range(self, tail: float) -> tuple[float, float]:
        """Returns the range of log X for z within its tails under both densities."""
        root = 1 / self.noise_multiplier
        end = root * root / 2 + tail * root
        return -end, end

    @property
    def log_variance(self) -> float:
        """The logarithm of Var X."""
        u = self.noise_multiplier**-2
        return u if u > 30 else math.log(math.expm1(u))

    def opposed_variance(self, slope: float) -> float:
        """Returns Var((1 − θ)X(z) − (1 + θ)X(−z))/4, or what it is at σ = 0.06 if that is less."""
        u = min(self.noise_multiplier**-2, 300.0)
        return math.exp(-u) * (math.expm1(2 * u) + (slope * math.expm1(u)) ** 2) / 2


@dataclasses.dataclass(frozen=True)
class LinearTilt:
    """Reports whose component along the vector has a linearly tilted density.

    Attributes:
        noise_multiplier: σ = 1/k, at least :data:`LEAST_TILTED_NOISE`.
    """

    noise_multiplier: float
    centre: ClassVar[float] = 1.0

    @property
    def threshold(self) -> float:
        """t, below which the density is 0."""
        return _threshold(self.noise_multiplier)

    @property
    def slope(self) -> float:
        """The factor a of (z − t)₊."""
        t = self.threshold
        return 1 / float(_density(t) - t * ndtr(-t))

    @property
    def unit_point(self) -> float:
        """The point t + 1/a at which X = 1, without cancellation for t far below 0."""
        t = self.threshold
        return float(_density(t) + t * ndtr(t))

    def excess(self, z: Vector) -> Vector:
        """Returns X − 1."""
        return np.maximum(self.slope * (z - self.unit_point), -1.0)

    def moments(self, ends: Vector, *, centre: float = 1.0, sign: float = 1.0) -> Vector:
        """Returns E[X(sign·z) − 1; z in a cell] of the cells between neighbouring ends."""
        if sign < 0:
            return self.moments(-ends[::-1])[::-1]
        kept = np.maximum(ends, self.threshold)
        above = self.slope * (-np.diff(_density(kept)) - self.unit_point * normal_masses(kept))
        return above - normal_masses(np.minimum(ends, self.threshold))

    def inverse(self, log_ratios: Vector) -> Vector:
        """Returns z from log X."""
        return self.unit_point + np.expm1(log_ratios) / self.slope

    def log_range(self, tail: float) -> tuple[float, float]:
        """Returns the range of log X for z within its tails; ratios below 1e-4 count as 1e-4."""
        low, high = self.excess(np.array([-tail, tail + 1]))
        return math.log1p(max(low, 1e-4 - 1)), math.log1p(high)

    @property
    def log_variance(self) -> float:
        """The logarithm of Var X."""
        return math.log(self._variance)

    @property
    def _variance(self) -> float:
        """Var X."""
        if self.noise_multiplier >= _LEVEL_NOISE:
            return self.noise_multiplier**-2
        t = self.threshold
        return self.slope**2 * float((1 + t * t) * ndtr(-t) - t * _density(t)) - 1

    def opposed_variance(self, slope: float) -> float:
        """Returns Var((1 − θ)X(z) − (1 + θ)X(−z))/4."""
        reach = max(-self.threshold, 0.0)  # both are positive between −reach and reach
        inside = float(ndtr(reach) - ndtr(-reach))
        product = self.slope**2 * float((reach**2 - 1) * inside + 2 * reach * _density(reach))
        level = self.noise_multiplier >= _LEVEL_NOISE
        covariance = -self._variance if level else product - 1
        return ((self._variance - covariance) + slope**2 * (self._variance + covariance)) / 2


@dataclasses.dataclass(frozen=True)
class StepTilt:
    """Reports whose component along the vector exceeds a threshold more often than noise alone.

    Attributes:
        noise_multiplier: σ = 1/k, at least :data:`LEAST_TILTED_NOISE`.
    """

    noise_multiplier: float
    centre: ClassVar[float] = 1.0

    @property
    def levels(self) -> tuple[float, float, float]:
        """The threshold t, X − 1 below it and X − 1 from there on."""
        return _levels(self.noise_multiplier)

    def excess(self, z: Vector) -> Vector:
        """Returns X − 1."""
        threshold, below, above = self.levels
        return np.where(z >= threshold, above, below)

    def moments(self, ends: Vector, *, centre: float = 1.0, sign: float = 1.0) -> Vector:
        """Returns E[X(sign·z) − 1; z in a cell] of the cells between neighbouring ends."""
        if sign < 0:
            return self.moments(-ends[::-1])[::-1]
        threshold, below, above = self.levels
        return above * normal_masses(np.maximum(ends, threshold)) + below * normal_masses(
            np.minimum(ends, threshold)
        )

    def inverse(self, log_ratios: Vector) -> Vector:
        """Returns the least z at which X reaches the ratios: −∞, t or ∞."""
        threshold, below, above = self.levels
        excess = np.expm1(log_ratios)
        return np.where(excess > above, np.inf, np.where(excess > below, threshold, -np.inf))

    def log_range(self, tail: float) -> tuple[float, float]:
        """Returns the range of log X; ratios below 1e-4 count as 1e-4."""
        _, below, above = self.levels
        return math.log1p(max(below, 1e-4 - 1)), math.log1p(above)

    @property
    def log_variance(self) -> float:
        """The logarithm of Var X."""
        _, below, above = self.levels
        return math.log(-below * above)

    def opposed_variance(self, slope: float) -> float:
        """Returns Var((1 − θ)X(z) − (1 + θ)X(−z))/4, as X(z) and X(−z) have covariance −below²."""
        _, below, above = self.levels
        return -below * ((above - below) + slope**2 * (above + below)) / 2


Shape = GaussianShift | LinearTilt | StepTilt
SHAPES: dict[str, type[Shape]] = {"linear": LinearTilt, "gaussian": GaussianShift, "step": StepTilt}
"""Every shape by the name that ``report`` has."""


def shape_of(report: str, noise_multiplier: float) -> Shape:
    """Returns the shape of this name with this σ."""
    return SHAPES[report](noise_multiplier)


def pure_epsilon(shape: Shape, sample_rate: float, distance: float = 1.0) -> float:
    """Returns one report's ε at δ = 0 for an adversary who sees who sends it (13.9).

    Args:
        shape: The report's shape. ε is infinite unless it is a step: other ratios are not bounded.
        sample_rate: q, the probability that the vector is in the report. ε is infinite at 1.
        distance: 1 for zero-out, 2 for replacement adjacency.
    """
    if not isinstance(shape, StepTilt) or sample_rate == 1:
        return math.inf
    _, below, above = shape.levels
    lowest, highest = math.log1p(sample_rate * below), math.log1p(sample_rate * above)
    # Enlarged by more than all rounding errors.
    return (1 + 1e-9) * (highest - lowest if distance == 2 else max(highest, -lowest))


def _density(z: Vector | float) -> Vector:
    """Returns the standard normal density, 0 at infinity."""
    return np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi)


@functools.lru_cache(maxsize=4096)
def _threshold(noise_multiplier: float) -> float:
    """Returns t at which a report's mean is k = 1/σ: Φ(−t)/(φ(t) − tΦ(−t)) = k."""
    if noise_multiplier >= _LEVEL_NOISE:
        return -noise_multiplier
    k = 1 / noise_multiplier

    def excess(t: float) -> float:
        log_share = float(log_ndtr(-t))
        return math.exp(log_share) - k * float(_density(t) - t * math.exp(log_share))

    return float(brentq(excess, -1 - noise_multiplier, k, xtol=1e-14, rtol=1e-14))


@functools.lru_cache(maxsize=4096)
def _levels(noise_multiplier: float) -> tuple[float, float, float]:
    """Returns a step's t, and X − 1 below it and from there on (13.7)."""
    height = math.sqrt(math.pi / 2) / noise_multiplier
    if height <= 1:
        return 0.0, -height, height
    k = 1 / noise_multiplier

    def excess(t: float) -> float:
        return float(_density(t) - k * ndtr(-t))

    # φ(t)/Φ(−t), the mean of a normal number beyond t, is below k at t = 0 and above t everywhere.
    t = float(brentq(excess, 0.0, k, xtol=1e-14, rtol=1e-14))
    return t, -1.0, float(ndtr(t) / ndtr(-t))
