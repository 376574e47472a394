"""Who takes part: every record by a coin of its own, or so many of all. Exact to 2⁻⁵³.

A number of 24 bits, which is what ``torch.rand`` draws, is below a rate of 10⁻⁹ with a chance of 2⁻²⁴, sixty times as often.

>>> heads(5, 1.0, None), heads(5, 0.0, None), sorted(subset(5, 5, None))
([0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4])
"""

from __future__ import annotations

import math

import numpy as np
import torch

from opacus_shuffle.core.system_randomness import SystemGenerator

_COARSE, _FINE = 2**24, 2**29


def heads(count: int, rate: float, generator: torch.Generator | None) -> list[int]:
    """Which of so many coins show heads; each does with a chance of at most ``rate``, and less than 2⁻⁵³ below it.

    The first 24 bits decide all coins but one in 16 million; the other 29 are drawn where they matter.
    """
    if isinstance(generator, SystemGenerator):
        limit = np.uint64(math.floor(rate * 2.0**53))  # exact, as all products with powers of two
        return np.flatnonzero((generator.words(count) >> np.uint64(11)) < limit).tolist()
    coarse = math.floor(rate * _COARSE)
    fine = math.floor((rate * _COARSE - coarse) * _FINE) / _FINE
    drawn = torch.rand(count, generator=generator, dtype=torch.float32)
    (shown,) = (drawn <= coarse / _COARSE).nonzero(as_tuple=True)
    tied = drawn[shown] == coarse / _COARSE
    rest = torch.rand(int(tied.sum()), generator=generator, dtype=torch.float64)
    tied[tied.clone()] = rest >= fine
    return shown[~tied].tolist()


def subset(count: int, size: int, generator: torch.Generator | None) -> list[int]:
    """So many of 0, …, ``count`` − 1 in random order, by the first steps of Fisher and Yates's shuffle.

    63 bits decide each step, where ``torch.randperm`` takes 32.
    """
    if isinstance(generator, SystemGenerator):
        keys = (generator.words(size) >> np.uint64(1)).astype(np.int64)
    else:
        keys = torch.empty(size, dtype=torch.int64).random_(generator=generator).numpy()
    steps = np.arange(size)
    moved: dict[int, int] = {}
    drawn = []
    for step, place in enumerate((steps + keys % (count - steps)).tolist()):
        drawn.append(moved.get(place, place))
        moved[place] = moved.get(step, step)
    return drawn
