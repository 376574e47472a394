"""Draws binomial numbers by inversion of integer tables: for participation and noise bits.

Each draw compares 128 random bits with the steps of the distribution function, which are summed in
integers of 192 bits. So the distribution is exact except for the rounding of the steps to 2⁻¹²⁸,
and no floating-point number is involved whose last bits could reveal anything. Sixteen of the bits
are decisive if no step begins with them; the other 112 are drawn only if one does. If the table
would be too long, the trials are split into several parts, whose numbers are added up.

>>> draws = exact_binomials(1000, 0.25, 10_000, SecretGenerator())
>>> round(float(draws.mean()), -1)
250.0
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from opacus_shuffle.core.randomness import SecretGenerator, for_pytorch, room_for, stream_of

Words = npt.NDArray[np.uint64]

_PRECISION, _BITS = 192, 128
_MAX_DEVIATION = 20_000.0
"""The largest standard deviation of one table's numbers; the table has some thirty times as many
steps.
"""
_BLOCK = 2**17
_BLOCK_ON_GPU = 2**23
_UNDECIDED = -1


def draw_binomials(
    trials: int, probability: float, count: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Draws binomial numbers on the device of a caller's generator: int64, shape (count,).

    Raises:
        ValueError: If it is not a generator.
    """
    if isinstance(generator, torch.Generator | SecretGenerator) and generator.device.type != "cpu":
        return binomials_on_gpu(trials, probability, count, generator)
    return torch.from_numpy(exact_binomials(trials, probability, count, stream_of(generator)))


def exact_binomials(
    trials: int, probability: float, count: int, source: SecretGenerator
) -> npt.NDArray[np.int64]:
    """Draws independent binomial numbers: int64, shape (count,)."""
    totals: npt.NDArray[np.int64] = functools.reduce(
        np.add, _draw_parts(trials, probability, count, source)
    )
    return totals


def _draw_parts(
    trials: int, probability: float, count: int, source: SecretGenerator
) -> Iterator[npt.NDArray[np.int64]]:
    """Yields arrays of shape (count,) whose sum is binomial; a single one if the trials are few."""
    # Parts of one size share a table, and are drawn together as far as memory allows.
    together = max(1, _BLOCK // max(1, count))
    for size, number in _split(trials, probability):
        for begin in range(0, number, together):
            rows = min(together, number - begin)
            drawn = _draw(size, float(probability), rows * count, source).reshape(rows, count)
            yield drawn[0] if rows == 1 else drawn.sum(0)


def binomials_on_gpu(
    trials: int, probability: float, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Draws binomial numbers on a generator's device, from its random bits: int64, shape (count,).

    Of each number's 128 bits 63 are compared with the steps. The other 65 are drawn only if a step
    begins with the same 63 bits, which hardly ever happens.
    """
    totals = torch.zeros(count, dtype=torch.int64, device=generator.device)
    for size, number in _split(trials, probability):
        first, high, low, _ = _table(size, float(probability))
        begins = high >> np.uint64(1)
        steps = torch.from_numpy(begins.view(np.int64)).to(generator.device)
        for block in torch.split(totals, _BLOCK_ON_GPU) if len(steps) else ():
            for _ in range(number):
                bits = torch.empty_like(block).random_(generator=for_pytorch(generator))
                passed = torch.searchsorted(steps, bits, right=True)
                tied = steps[(passed - 1).clamp_(min=0)] == bits
                for index in tied.nonzero().flatten().tolist():
                    equal = np.flatnonzero(begins == np.uint64(bits[index].item()))
                    passed[index] -= _steps_above(high[equal] & np.uint64(1), low[equal], generator)
                block += passed
        totals += number * first
    return totals


def _steps_above(odd: Words, low: Words, generator: torch.Generator) -> int:
    """Draws 65 bits, and returns the number of steps whose last 65 bits are above them."""
    words = torch.randint(
        2**13, (5,), generator=for_pytorch(generator), device=generator.device
    ).tolist()
    drawn = sum(word << (13 * position) for position, word in enumerate(words))
    rests = ((int(bit) << 64) | int(rest) for bit, rest in zip(odd, low, strict=True))
    return sum(rest > drawn for rest in rests)


def _split(trials: int, probability: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Splits trials into parts with short tables: two sizes, and the number of parts of each."""
    variance = trials * probability * (1 - probability)
    parts = max(1, math.ceil(variance / _MAX_DEVIATION**2))
    smaller, larger = divmod(int(trials), parts)
    return (smaller + 1, larger), (smaller, parts - larger)


def _draw(
    trials: int, probability: float, count: int, source: SecretGenerator
) -> npt.NDArray[np.int64]:
    """Draws binomial numbers from one table."""
    first, high, low, guide = _table(trials, probability)
    drawn, largest = np.empty(count, dtype=np.int64), min(count, _BLOCK)
    room, looked_up = room_for(-(-largest // 4)), np.empty(largest, dtype=guide.dtype)
    for block in np.split(drawn, range(_BLOCK, count, _BLOCK)):
        begins = source.words(-(-len(block) // 4), room).view(np.uint16)[: len(block)]
        # Any 16 bits are an index of the guide, so the bounds need no check: "wrap" skips it.
        passed = np.take(guide, begins, mode="wrap", out=looked_up[: len(block)])
        undecided = np.flatnonzero(passed == _UNDECIDED)
        upper, lower = source.words(2 * len(undecided)).reshape(2, len(undecided))
        upper = (begins[undecided].astype(np.uint64) << np.uint64(48)) | (upper >> np.uint64(16))
        before = np.searchsorted(high, upper, side="left")
        # Where the upper halves are equal, the lower halves decide.
        for tied in np.flatnonzero(high.take(before, mode="clip") == upper):
            until = np.searchsorted(high, upper[tied], side="right")
            before[tied] += np.count_nonzero(low[before[tied] : until] <= lower[tied])
        passed[undecided] = before
        np.add(passed, np.int64(first), out=block)
    return drawn


@functools.lru_cache(maxsize=8)
def _table(trials: int, probability: float) -> tuple[int, Words, Words, npt.NDArray[np.int32]]:
    """Returns the steps of the distribution function, and a guide to them.

    Returns:
        The smallest number that occurs. The probabilities to be at most that number, the next, …:
        their upper and lower 64 bits. For every 16 bits with which 128 can begin, the number of
        steps that are not above them; −1 if a step begins with these bits as well.
    """
    share = Fraction(probability)
    up, down = share.numerator, share.denominator - share.numerator
    mode = min(trials, math.floor((trials + 1) * share))
    # Weights proportional to the probabilities, from the mode outwards.
    above = _weights(((trials - k) * up, (k + 1) * down) for k in range(mode, trials))
    below = _weights((k * down, (trials - k + 1) * up) for k in range(mode, 0, -1))
    weights = [*reversed(below), 1 << _PRECISION, *above]
    total = sum(weights)
    steps = [(reached << _BITS) // total for reached in itertools.accumulate(weights[:-1])]
    high = np.array([step >> 64 for step in steps], dtype=np.uint64)
    low = np.array([step & ((1 << 64) - 1) for step in steps], dtype=np.uint64)
    begins = np.arange(2**16 + 1, dtype=np.uint64)
    ends = np.searchsorted(high >> np.uint64(48), begins, side="left")
    guide = np.where(ends[:-1] == ends[1:], ends[:-1], _UNDECIDED).astype(np.int32)
    return mode - len(below), high, low, guide


def _weights(ratios: Iterable[tuple[int, int]]) -> list[int]:
    """Multiplies the weight of the mode by ratios of integers, until it vanishes."""
    weight, weights = 1 << _PRECISION, list[int]()
    for numerator, denominator in ratios:
        weight = weight * numerator // denominator
        if not weight:
            break
        weights.append(weight)
    return weights
