r"""Computes Theorem 6 of Yang, Ji and Xiang's weight shuffling (WS).

It is an **estimate** and no upper bound on ε.

The shuffled Gaussian releases P(f) + z, P uniform on the permutations of d coordinates, z ~ N(0,
σ²I), where ‖f(x)‖ ≤ c′ and ‖f(x) − f(x′)‖ ≤ c. WS bounds the δ of a pair of data sets *from below*,
replaces a sum of log-normals by one log-normal (WS Lemma 1), and takes the largest value over pairs
by a heuristic. What comes out, by WS Eq. 83 (Eq. 26 misprints its exponents; L = log(d − 1)),

    δ = Φ(s₁/2 + (ζ₁ − ε)/s₁) − e^ε·Φ(s₂/2 + (ζ₂ − ε)/s₂), ζ₁ = −log(1 + e^{L−b₁}),   ζ₂ = −log(1 +
    e^{L−b₂}) − c²/σ²,   b₁ = d·c·c′/((d−1)σ²),   b₂ = d·c·(c + c′)/((d−1)σ²), s_i² = log(1 +
    (e^{c²/σ²} − 1)·(1 + e^{L−2b_i})/(1 + e^{L−b_i})²),

can be negative, and is false at the paper's own settings: for d = 85.8e6, σ = 0.27372, ε = 0.1976
it says 2.5e-7, while the pair of :mod:`opacus_shuffle.analysis.permuted_gaussian` has δ ≥ 1.54e-3
there.

>>> round(compute_epsilon(noise_std=0.27372, delta=2.5e-7, dimension=85_800_000), 3)
0.197
>>> round(compute_delta(epsilon=0.2, noise_std=0.3, dimension=10**8), 4)  # not even a probability
-0.0496
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from opacus_shuffle.analysis.mean_ratio import Vector
from opacus_shuffle.core.solve import safe_root
from opacus_shuffle.core.validation import (
    integer,
    noise_level,
    not_negative,
    open_unit_interval,
    positive,
)

Dimension = int | Sequence[int]
Numbers = float | Vector

_POINTS = 513


def compute_delta(
    *,
    epsilon: float,
    noise_std: float,
    dimension: Dimension,
    clip: float = 1.0,
    batch_clip: float = 1.0,
) -> float:
    """Returns δ of one shuffled Gaussian by WS Theorem 6 (Eq. 83), as the formula has it.

    It may be negative.

    Args:
        epsilon: ε ≥ 0.
        noise_std: Absolute standard deviation of the noise on each coordinate of the sum (WS
            Algorithm 1's σ times ``clip``).
        dimension: d, the coordinates permuted among themselves; 1 is the unshuffled Gaussian. A
            sequence is the reading layer by layer: each layer a release of its own, the worst of
            them counts (and no composition over layers, as in WS).
        clip: c ≥ ‖f(x) − f(x′)‖, one record's clipped gradient.
        batch_clip: c′ ≥ ‖f(x)‖, the sum of a batch; may be 0 or infinite (then nothing is left of
            the gain).

    Returns:
        δ, absolute error below 1e-10 for d up to 1e12 and σ down to 0.05·c.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        None: an approximation of a lower bound.
    """
    epsilon = not_negative("epsilon", epsilon)
    ratio, norm = _scale(noise_std, clip, batch_clip)
    return max(float(_delta(epsilon, ratio, d, norm)) for d in dimensions(dimension))


def compute_epsilon(
    *,
    noise_std: float,
    delta: float,
    dimension: Dimension,
    clip: float = 1.0,
    batch_clip: float = 1.0,
) -> float:
    """Returns the smallest ε ≥ 0 from which on WS Theorem 6 keeps δ within ``delta``, rounded up.

    It is 0 where the formula says so.

    Args:
        noise_std: Absolute standard deviation of the noise on each coordinate of the sum.
        delta: δ in (0, 1).
        dimension: d, or one number per layer.
        clip: c, the norm of one record's gradient.
        batch_clip: c′, the norm of a batch's sum.

    Raises:
        ValueError: If an argument is out of range.

    Formal Guarantees:
        None: an approximation of a lower bound.
    """
    delta = open_unit_interval("delta", delta)
    ratio, norm = _scale(noise_std, clip, batch_clip)
    return max(_epsilon(ratio, delta, d, norm) for d in dimensions(dimension))


def dimensions(dimension: Dimension) -> tuple[int, ...]:
    """Checks one d, or one per layer."""
    layers = tuple(np.atleast_1d(dimension)) if isinstance(dimension, np.ndarray) else dimension
    layers = tuple(layers) if isinstance(layers, Sequence) else (layers,)
    if not layers or isinstance(dimension, str | bytes):
        raise ValueError(
            "dimension must be a whole number or a non-empty sequence of them, one per layer, got "
            f"{dimension!r}"
        )
    return tuple(integer("dimension", size) for size in layers)


def _scale(noise_std: float, clip: float, batch_clip: float) -> tuple[float, float]:
    """Returns σ/c and c′/c, on which alone the formula depends."""
    clip, noise_std = positive("clip", clip), positive("noise_std", noise_std)
    norm = not_negative("batch_clip", batch_clip, infinite=True)
    return noise_level("noise_std / clip", noise_std / clip), norm / clip


def _parts(ratio: Numbers, d: int, norm: float) -> tuple[Vector, Vector, Vector]:
    """Returns −ζ₁, s₁ for c′ = norm.

    With c + c′ in its place −ζ₂ − c²/σ², s₂. All in the log domain.
    """
    inverse = 1 / np.asarray(ratio, dtype=np.float64) ** 2
    if (
        d == 1 or norm == math.inf
    ):  # nothing to permute, or a batch so large that one coordinate is recognized anyway
        return inverse, np.zeros_like(inverse), np.sqrt(inverse)
    exponent = math.log(d - 1) - d / (d - 1) * norm * inverse
    spread = np.logaddexp(0, exponent)
    log_square = np.logaddexp(0, exponent - d / (d - 1) * norm * inverse) - 2 * spread
    log_square += inverse + np.log(-np.expm1(-inverse))
    return inverse, spread, np.sqrt(np.logaddexp(0, log_square))


def _delta(epsilon: Numbers, ratio: Numbers, d: int, norm: float) -> Vector:
    """Evaluates Eq. 83 for arrays, c = 1."""
    inverse, first, s1 = _parts(ratio, d, norm)
    _, second, s2 = _parts(ratio, d, norm + 1)
    with np.errstate(
        over="ignore", divide="ignore", invalid="ignore"
    ):  # s may be too small to divide by: then Φ is 0
        below = np.where(s1 > 0, s1 / 2 - (first + epsilon) / s1, -np.inf)
        above = np.where(s2 > 0, s2 / 2 - (second + inverse + epsilon) / s2, -np.inf)
        return ndtr(below) - np.exp(epsilon + log_ndtr(above))


def _epsilon(ratio: float, delta: float, d: int, norm: float) -> float:
    """Returns ε for one d, c = 1: the largest at which δ falls through the one asked for."""
    _, first, s1 = _parts(ratio, d, norm)
    high = float(s1**2 / 2 - ndtri(delta) * s1 - first)  # the first term alone is within δ here
    if high <= 0:
        return 0.0

    def excess(epsilon: Numbers) -> Vector:
        return _delta(epsilon, ratio, d, norm) - delta

    grid = np.linspace(high, 0.0, _POINTS)
    over = np.flatnonzero(excess(grid) > 0)
    if not len(over):
        return 0.0
    if over[0] == 0:
        return high
    unsafe, safe = float(grid[over[0]]), float(grid[over[0] - 1])
    return safe_root(
        lambda epsilon: float(excess(epsilon)),
        unsafe=unsafe,
        safe=safe,
        tolerance=1e-14 * safe,
        relative_tolerance=1e-13,
        step=1e-13 * safe,
    )
