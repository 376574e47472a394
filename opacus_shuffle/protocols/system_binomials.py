"""Binomial numbers from the operating system's bytes, for sums in secure mode.

By inversion: 128 random bits beside the distribution's steps, which are summed in whole numbers of 192 bits. So the
distribution is exact but for the steps' rounding to 2⁻¹²⁸, and there is no floating-point number whose last bits could tell
anything.

>>> draws = system_binomials(1000, 0.25, 10_000, SystemGenerator())
>>> round(float(draws.mean()), -1)
250.0
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from opacus_shuffle.core.system_randomness import SystemGenerator

_PRECISION, _BITS = 192, 128
_WIDEST = 100_000.0
"""Standard deviations above this take tables of millions of steps."""


def system_binomials(trials: int, probability: float, count: int, generator: SystemGenerator) -> npt.NDArray[np.int64]:
    """Draws so many binomial numbers.

    Raises:
        ValueError: If their standard deviation is above 100,000.
    """
    first, high, low = _steps(int(trials), float(probability))
    upper, lower = generator.words(2 * count).reshape(2, count)
    before, until = np.searchsorted(high, upper, side="left"), np.searchsorted(high, upper, side="right")
    for tied in np.flatnonzero(before < until):
        before[tied] += np.count_nonzero(low[before[tied] : until[tied]] <= lower[tied])
    return first + before.astype(np.int64)


@functools.lru_cache(maxsize=8)
def _steps(trials: int, probability: float) -> tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The least number that occurs, and the upper and lower halves of the chances to be at most that, the next, ..."""
    deviation = math.sqrt(trials * probability * (1 - probability))
    if deviation > _WIDEST:
        raise ValueError(
            f"secure_mode=True draws binomials up to a standard deviation of {_WIDEST:,.0f}, these have {deviation:,.0f}: use "
            "a protocol with fewer noise bits, or leave secure_mode out"
        )
    share, rest = Fraction(probability), 1 - Fraction(probability)
    up, down = share.numerator * rest.denominator, share.denominator * rest.numerator
    mode = min(trials, math.floor((trials + 1) * share))
    above, below = [1 << _PRECISION], []
    for number in range(mode, trials):
        weight = above[-1] * (trials - number) * up // ((number + 1) * down)
        if not weight:
            break
        above.append(weight)
    weight = above[0]
    for number in range(mode, 0, -1):
        weight = weight * number * down // ((trials - number + 1) * up)
        if not weight:
            break
        below.append(weight)
    weights, total, steps = below[::-1] + above, sum(below) + sum(above), []
    reached = 0
    for weight in weights[:-1]:
        reached += weight
        steps.append((reached << _BITS) // total)
    mask = (1 << 64) - 1
    high, low = (np.array(half, dtype=np.uint64) for half in ([each >> 64 for each in steps], [each & mask for each in steps]))
    return mode - len(below), high, low
