"""The binomial distribution by special functions, for up to 2⁵⁰ trials.

``scipy.stats`` has the same functions, but its import takes longer than most of the computations
here.

>>> [round(float(f(2, 5, 0.5)), 4) for f in (pmf, cdf, sf)]
[0.3125, 0.5, 0.5]
>>> [int(number) for number in likely_range(10_000, 0.5, 1e-6)]
[4762, 5238]
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import betainc, betaincc, gammaln, ndtri

_SMALL_CHANCE = 2.0**-10
"""Below this chance of success, 1 − chance would lose too many digits of it."""


def pmf(k: Any, trials: int, chance: float) -> Any:
    """Returns P(B = k), by Loader's saddle-point expansion (2000), which has no cancellation."""
    k = np.asarray(k, dtype=np.float64)
    inside = np.clip(k, 1.0, max(trials - 1, 1))
    mean, other = trials * chance, trials * (1 - chance)
    with np.errstate(divide="ignore", invalid="ignore"):  # for fewer than two trials
        u, v = (inside - mean) / mean, (mean - inside) / other
        deviance = mean * ((1 + u) * np.log1p(u) - u) + other * ((1 + v) * np.log1p(v) - v)
        factorials = _stirling_error(float(trials)) - sum(
            _stirling_error(number) for number in (inside, trials - inside)
        )
        between = np.sqrt(trials / (2 * math.pi * inside * (trials - inside))) * np.exp(
            factorials - deviance
        )
    ends = np.exp(trials * np.where(k == 0, math.log1p(-chance), math.log(chance)))
    return np.where((k > 0) & (k < trials), between, np.where((k == 0) | (k == trials), ends, 0.0))


def _stirling_error(n: Any) -> Any:
    """Returns log n! minus Stirling's formula for it."""
    by_gamma = gammaln(n + 1.0) - (n + 0.5) * np.log(n) + n - math.log(2 * math.pi) / 2
    inverse = np.maximum(n, 1.0) ** -2.0
    coefficients = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)
    series = np.maximum(n, 1.0) ** -1.0 * np.polynomial.polynomial.polyval(inverse, coefficients)
    return np.where(np.asarray(n) > 15, series, by_gamma)


def cdf(k: Any, trials: Any, chance: float) -> Any:
    """Returns P(B ≤ k)."""
    inside = np.clip(k, 0, trials - 1)
    if chance < _SMALL_CHANCE:
        tail = betaincc(inside + 1, trials - inside, chance)
    else:  # the same function, in a fifth of the time
        tail = betainc(trials - inside, inside + 1, 1 - chance)
    return np.where(np.less(k, 0), 0.0, np.where(k >= trials, 1.0, tail))


def sf(k: Any, trials: Any, chance: float) -> Any:
    """Returns P(B > k)."""
    inside = np.clip(k, 0, trials - 1)
    tail = betainc(inside + 1, trials - inside, chance)
    return np.where(np.less(k, 0), 1.0, np.where(k >= trials, 0.0, tail))


def fewest(trials: Any, chance: float, probability: float) -> Any:
    """Returns the largest number below which a binomial lies with at most ``probability``."""
    # A normal distribution with a correction for skewness is usually off by one at most.
    z, variance = ndtri(probability), trials * chance * (1 - chance)
    guess = trials * chance + z * np.sqrt(variance) + (0.5 - chance) * (z * z - 1) / 3
    number = np.clip(np.floor(guess), 0.0, trials)
    while np.any(too_small := cdf(number, trials, chance) <= probability):
        number = number + too_small
    while np.any(too_large := cdf(number - 1, trials, chance) > probability):
        number = number - too_large
    return number


def likely_range(trials: Any, chance: float, probability: float) -> tuple[Any, Any]:
    """Returns numbers outside which a binomial lies with at most ``probability`` a side."""
    if probability > 1e-12:
        most = trials - fewest(trials, 1 - chance, probability)
        return fewest(trials, chance, probability), most
    # Bernstein's inequality, because a search loses its accuracy so far from the mean.
    mean = trials * chance
    tail = -math.log(probability)
    reach = tail / 3 + np.sqrt(tail**2 / 9 + 2 * mean * (1 - chance) * tail)
    return np.maximum(np.floor(mean - reach), 0.0), np.minimum(np.ceil(mean + reach), trials)
