"""Binomial numbers by inversion of whole-number tables: who takes part, and all users' noise bits.

128 random bits are compared with the distribution's steps, which are summed in whole numbers of 192
bits. So the distribution is exact but for the steps' rounding to 2⁻¹²⁸, and there is no
floating-point number whose last bits could tell anything. Sixteen of the bits decide where no step
lies among the numbers that begin with them; the other 112 are drawn where one does. Where the table
would be too long, the trials are split and the parts' numbers added up.

>>> draws = exact_binomials(1000, 0.25, 10_000, SecretGenerator())
>>> round(float(draws.mean()), -1)
250.0
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import SecretGenerator, for_pytorch, room_for, stream_of

Words = npt.NDArray[np.uint64]

_PRECISION, _BITS = 192, 128
_WIDEST = 20_000.0
"""Standard deviation of a table's numbers at most; it has some thirty times as many steps."""
_BLOCK = 2**17
_BLOCK_ON_GPU = 2**23
_STEP_WITHIN = -1


def draw_binomials(
    trials: int, probability: float, count: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Draws binomial numbers where a caller's generator lives: int64, shape (count,).

    Raises:
        ValueError: If it is no generator.
    """
    if isinstance(generator, torch.Generator | SecretGenerator) and generator.device.type != "cpu":
        return binomials_on_gpu(trials, probability, count, generator)
    return torch.from_numpy(exact_binomials(trials, probability, count, stream_of(generator)))


def exact_binomials(
    trials: int, probability: float, count: int, source: SecretGenerator
) -> npt.NDArray[np.int64]:
    """Draws so many binomial numbers, each independent of the others."""
    totals: npt.NDArray[np.int64] = functools.reduce(
        np.add, _drawn_parts(trials, probability, count, source)
    )
    return totals


def _drawn_parts(
    trials: int, probability: float, count: int, source: SecretGenerator
) -> Iterator[npt.NDArray[np.int64]]:
    """Yields arrays of shape (count,) whose sum is binomial; few trials need one array alone."""
    # Parts of one size share a table, and are drawn together as far as memory allows.
    together = max(1, _BLOCK // max(1, count))
    for size, number in _parts(trials, probability):
        for begin in range(0, number, together):
            rows = min(together, number - begin)
            drawn = _draw(size, float(probability), rows * count, source).reshape(rows, count)
            yield drawn[0] if rows == 1 else drawn.sum(0)


def binomials_on_gpu(
    trials: int, probability: float, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Draws binomial numbers on a generator's device, from its random bits: int64, shape (count,).

    Of each number's 128 bits 63 are compared with the steps, and the other 65 where a step begins
    with the same 63, which hardly ever happens.
    """
    totals = torch.zeros(count, dtype=torch.int64, device=generator.device)
    for size, number in _parts(trials, probability):
        first, high, low, _ = _table(size, float(probability))
        begins = high >> np.uint64(1)
        steps = torch.from_numpy(begins.view(np.int64)).to(generator.device)
        for block in torch.split(totals, _BLOCK_ON_GPU) if len(steps) else ():
            for _ in range(number):
                bits = torch.empty_like(block).random_(generator=for_pytorch(generator))
                passed = torch.searchsorted(steps, bits, right=True)
                tied = steps[(passed - 1).clamp_(min=0)] == bits
                for place in tied.nonzero().flatten().tolist():
                    equal = np.flatnonzero(begins == np.uint64(bits[place].item()))
                    passed[place] -= _steps_above(high[equal] & np.uint64(1), low[equal], generator)
                block += passed
        totals += number * first
    return totals


def _steps_above(odd: Words, low: Words, generator: torch.Generator) -> int:
    """Returns how many steps' last 65 bits are above 65 bits that are drawn."""
    words = torch.randint(
        2**13, (5,), generator=for_pytorch(generator), device=generator.device
    ).tolist()
    drawn = sum(word << (13 * place) for place, word in enumerate(words))
    rests = ((int(bit) << 64) | int(rest) for bit, rest in zip(odd, low, strict=True))
    return sum(rest > drawn for rest in rests)


def _parts(trials: int, probability: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Splits trials into parts whose tables are short: two sizes, and how many parts have each."""
    variance = trials * probability * (1 - probability)
    parts = max(1, math.ceil(variance / _WIDEST**2))
    smaller, larger = divmod(int(trials), parts)
    return (smaller + 1, larger), (smaller, parts - larger)


def _draw(
    trials: int, probability: float, count: int, source: SecretGenerator
) -> npt.NDArray[np.int64]:
    """Draws so many binomial numbers from one table."""
    first, high, low, guide = _table(trials, probability)
    drawn, largest = np.empty(count, dtype=np.int64), min(count, _BLOCK)
    room, looked_up = room_for(-(-largest // 4)), np.empty(largest, dtype=guide.dtype)
    for block in np.split(drawn, range(_BLOCK, count, _BLOCK)):
        begins = source.words(-(-len(block) // 4), room).view(np.uint16)[: len(block)]
        # Sixteen bits are a place in the guide: it need not be looked at whether there is one.
        passed = np.take(guide, begins, mode="wrap", out=looked_up[: len(block)])
        within = np.flatnonzero(passed == _STEP_WITHIN)
        upper, lower = source.words(2 * len(within)).reshape(2, len(within))
        upper = (begins[within].astype(np.uint64) << np.uint64(48)) | (upper >> np.uint64(16))
        before = np.searchsorted(high, upper, side="left")
        # Where the upper halves are equal, the lower halves decide.
        for tied in np.flatnonzero(high.take(before, mode="clip") == upper):
            until = np.searchsorted(high, upper[tied], side="right")
            before[tied] += np.count_nonzero(low[before[tied] : until] <= lower[tied])
        passed[within] = before
        np.add(passed, np.int64(first), out=block)
    return drawn


@functools.lru_cache(maxsize=8)
def _table(trials: int, probability: float) -> tuple[int, Words, Words, npt.NDArray[np.int32]]:
    """Returns the distribution function's steps, and a guide to them.

    Returns:
        The least number that occurs. The chances to be at most that number, the next, …: their
        upper and lower 64 bits. For every 16 bits that 128 can begin with, how many steps are not
        above them; −1 where a step begins with these bits, too.
    """
    share = Fraction(probability)
    up, down = share.numerator, share.denominator - share.numerator
    mode = min(trials, math.floor((trials + 1) * share))
    # Weights in proportion to the chances, from the likeliest number outwards, until they vanish.
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
    total, reached, steps = sum(below) + sum(above), 0, []
    for weight in (below[::-1] + above)[:-1]:
        reached += weight
        steps.append((reached << _BITS) // total)
    high = np.array([step >> 64 for step in steps], dtype=np.uint64)
    low = np.array([step & ((1 << 64) - 1) for step in steps], dtype=np.uint64)
    begins = np.arange(2**16 + 1, dtype=np.uint64)
    ends = np.searchsorted(high >> np.uint64(48), begins, side="left")
    guide = np.where(ends[:-1] == ends[1:], ends[:-1], _STEP_WITHIN).astype(np.int32)
    return mode - len(below), high, low, guide
