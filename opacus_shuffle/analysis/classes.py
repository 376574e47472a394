r"""Few classes for many different rounds: neighbours are joined where that costs least, each class counted as its worst round.

>>> few = classes(np.array([4.0, 3.9, 1.0, 0.9]), np.array([1, 1, 1, 1]), np.array([False] * 4), most=2)
>>> few
[slice(0, 2, None), slice(2, 4, None)]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def classes(sizes: Vector, counts: npt.NDArray[np.int64], apart: npt.NDArray[np.bool_], *, most: int) -> list[slice]:
    """Returns neighbours to be joined, in order, so that about ``most`` classes are left.

    Args:
        sizes: What a round of each kind costs, falling wherever two neighbours may be joined: a class counts as its first.
        counts: How many rounds of each kind there are.
        apart: Whether a kind must not be joined to the one before it.
        most: How many classes may be left; more are where too many kinds must stay apart.
    """
    starts, number = list(range(len(sizes))), [int(count) for count in counts]
    value, alone = [float(size) for size in sizes], [bool(one) for one in apart]

    def price(index: int) -> float:
        """What it costs to join a class to the one before it."""
        return np.inf if alone[index] else number[index] * (value[index - 1] - value[index])

    prices = np.array([np.inf, *(price(index) for index in range(1, len(starts)))])
    while len(starts) > most:
        joined = int(np.argmin(prices))
        if prices[joined] == np.inf:
            break
        number[joined - 1] += number[joined]
        for entries in (starts, number, value, alone):
            del entries[joined]  # type: ignore[attr-defined]
        prices = np.delete(prices, joined)
        for index in (joined - 1, joined):
            if 0 < index < len(starts):
                prices[index] = price(index)
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
