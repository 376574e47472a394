"""Binomial numbers of any size from the cryptographic stream: tables where these pay, else rejection.

NumPy draws binomials from generators of its own, none of which is a cipher. Hörmann's transformed
rejection ("The generation of binomial random variates", 1993, algorithm BTRS) takes two uniform
numbers a try and about 1.3 tries, on whole arrays at once. Logarithms of ratios of chances are
written with log1p of differences, so that they are right to 10⁻⁹ also for 10¹³ trials.

>>> draws = draw_binomials(10**12, np.full(5_000, 0.25), SecretGenerator())
>>> round(float(draws.std()) / deviation_of(10**12, 0.25), 1)
1.0
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from opacus_shuffle.core.exact_binomials import deviation_of, exact_binomials
from opacus_shuffle.core.randomness import SecretGenerator

Vector = npt.NDArray[np.float64]

_NARROW, _MANY = 1000.0, 128
"""Standard deviation and number of binomials whose table costs less than it saves."""
_FEW = 10.0
"""Expected successes below which chances are added up one by one."""
_STIRLING = np.array(
    [
        math.lgamma(k + 1) - (k + 0.5) * math.log(k + 1) + k + 1 - 0.5 * math.log(2 * math.pi)
        for k in range(10)
    ]
)


def alike_binomials(
    trials: int, probability: float, count: int, stream: SecretGenerator
) -> npt.NDArray[np.int64]:
    """Draws ``count`` binomials of the same parameters: exactly to 2⁻¹²⁸ in secure mode, and where a table pays.

    Raises:
        ValueError: In secure mode, if their standard deviation is above 100,000.
    """
    pays = count >= _MANY and deviation_of(trials, probability) <= _NARROW
    if pays or stream.secure:
        return exact_binomials(trials, probability, count, stream)
    return draw_binomials(trials, np.full(count, probability), stream)


def draw_binomials(
    trials: npt.ArrayLike, probability: npt.ArrayLike, stream: SecretGenerator
) -> npt.NDArray[np.int64]:
    """Draws one binomial for each pair of parameters, in double precision: int64, their common shape.

    Args:
        trials: Whole numbers, at most 2⁵³.
        probability: In [0, 1].
        stream: Of the random bits.
    """
    n, p = np.broadcast_arrays(np.asarray(trials, np.float64), np.asarray(probability, np.float64))
    shape, n, p = n.shape, n.ravel(), p.ravel()
    less = np.minimum(p, 1 - p)
    drawn = np.empty(len(n))
    few = n * less < _FEW
    for which, draw in ((few, _by_adding_up), (~few, _by_rejection)):
        drawn[which] = draw(n[which], less[which], stream)
    return np.where(p > 0.5, n - drawn, drawn).astype(np.int64).reshape(shape)


def _by_adding_up(n: Vector, p: Vector, stream: SecretGenerator) -> Vector:
    """Subtracts the chances of 0, 1, 2, … from a uniform number until it is used up."""
    left, k = stream.uniforms(len(n)).numpy(), np.zeros(len(n))
    chance = np.exp(n * np.log1p(-p))
    for number in range(200):  # 10 are expected at most: more have a chance below 10⁻¹⁰⁰
        above = left >= chance
        if not above.any():
            break
        left = np.where(above, left - chance, -1.0)
        k += above
        chance = chance * (n - number) / (number + 1) * p / (1 - p)
    return np.minimum(k, n)


def _by_rejection(n: Vector, p: Vector, stream: SecretGenerator) -> Vector:
    """Hörmann's BTRS; p at most 1/2, n·p at least 10. Names are the paper's."""
    spread = np.sqrt(n * p * (1 - p))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    drawn, open_ = np.empty(len(n)), np.arange(len(n))
    while len(open_):
        u, v = stream.uniforms(2 * len(open_)).numpy().reshape(2, -1)
        u, v = u - 0.5, 1 - v
        us = 0.5 - np.abs(u)
        us[us == 0] = 2.0**-54
        a_, b_, n_, p_, spread_ = a[open_], b[open_], n[open_], p[open_], spread[open_]
        k = np.floor((2 * a_ / us + b_) * u + n_ * p_ + 0.5)
        inside = (k >= 0) & (k <= n_)
        taken = (us >= 0.07) & (v <= 0.92 - 4.2 / b_)
        asked = np.flatnonzero(inside & ~taken)
        height = (2.83 + 5.1 / b_) * spread_ / (a_ / us**2 + b_)
        bound = _log_ratio(k[asked], n_[asked], p_[asked])
        taken[asked] = np.log(v[asked] * height[asked]) <= bound
        taken &= inside
        drawn[open_[taken]] = k[taken]
        open_ = open_[~taken]
    return drawn


def _log_ratio(k: Vector, n: Vector, p: Vector) -> Vector:
    """Returns log(chance of k / chance of the mode m)."""
    m = np.floor((n + 1) * p)
    odds = p / (1 - p)
    at_mode = np.log1p((odds * (n - m + 1) - (m + 1)) / (m + 1))
    down, up = np.log1p((k - m) / (n - k + 1)), np.log1p((k - m) / (m + 1))
    rest = _stirling(m) + _stirling(n - m) - _stirling(k) - _stirling(n - k)
    return (k - m) * at_mode + (n + 1) * down - (k + 0.5) * (down + up) + rest


def _stirling(k: Vector) -> Vector:
    """Returns log k! less Stirling's formula for it in k + 1."""
    next_, square = k + 1, (k + 1) ** 2
    series = (1 / 12 - (1 / 360 - 1 / 1260 / square) / square) / next_
    return np.where(k < 10, _STIRLING[np.minimum(k, 9).astype(int)], series)
