"""Binomial numbers by inversion of whole-number tables: how many take part, and the noise bits of all users, added up.

128 random bits beside the distribution's steps, which are summed in whole numbers of 192 bits. So
the distribution is exact but for the steps' rounding to 2⁻¹²⁸, and there is no floating-point
number whose last bits could tell anything. Sixteen of the bits decide where no step lies among the
numbers that begin with them; the other 112 are drawn where one does.

>>> draws = exact_binomials(1000, 0.25, 10_000, SecretGenerator())
>>> round(float(draws.mean()), -1)
250.0
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from opacus_shuffle.core.randomness import SecretGenerator

_PRECISION, _BITS = 192, 128
_WIDEST = 100_000.0
"""Standard deviations above this take tables of millions of steps."""
_BLOCK = 2**16
_STEP_WITHIN = -1


def deviation_of(trials: int, probability: float) -> float:
    """A binomial's standard deviation, which its table grows with."""
    return math.sqrt(trials * probability * (1 - probability))


def exact_binomials(
    trials: int, probability: float, count: int, source: SecretGenerator
) -> npt.NDArray[np.int64]:
    """Draws so many binomial numbers.

    Raises:
        ValueError: If their standard deviation is above 100,000.
    """
    first, high, low = _steps(int(trials), float(probability))
    guide = _guide(int(trials), float(probability))
    drawn = np.empty(count, dtype=np.int64)
    for block in np.split(drawn, range(_BLOCK, count, _BLOCK)):
        begins = source.words(-(-len(block) // 4)).view(np.uint16)[: len(block)]
        passed = guide[begins]
        within = np.flatnonzero(passed == _STEP_WITHIN)
        upper, lower = source.words(2 * len(within)).reshape(2, len(within))
        upper = (begins[within].astype(np.uint64) << np.uint64(48)) | (upper >> np.uint64(16))
        before, until = (
            np.searchsorted(high, upper, side="left"),
            np.searchsorted(high, upper, side="right"),
        )
        for tied in np.flatnonzero(before < until):
            before[tied] += np.count_nonzero(low[before[tied] : until[tied]] <= lower[tied])
        passed[within] = before
        np.add(passed, first, out=block)
    return drawn


@functools.lru_cache(maxsize=8)
def _guide(trials: int, probability: float) -> npt.NDArray[np.int32]:
    """For every 16 bits that a number of 128 can begin with, how many steps are not above it; -1 if a step begins so, too."""
    _, high, _ = _steps(trials, probability)
    ends = np.searchsorted(
        high >> np.uint64(48), np.arange(2**16 + 1, dtype=np.uint64), side="left"
    )
    return np.where(ends[:-1] == ends[1:], ends[:-1], _STEP_WITHIN).astype(np.int32)


@functools.lru_cache(maxsize=8)
def _steps(
    trials: int, probability: float
) -> tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The least number that occurs, and the upper and lower halves of the chances to be at most that, the next, ..."""
    deviation = deviation_of(trials, probability)
    if deviation > _WIDEST:
        raise ValueError(
            f"secure_mode=True draws binomials up to a standard deviation of {_WIDEST:,.0f}, these "
            f"have {deviation:,.0f}: use "
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
    high, low = (
        np.array(half, dtype=np.uint64)
        for half in ([step >> 64 for step in steps], [step & mask for step in steps])
    )
    return mode - len(below), high, low
