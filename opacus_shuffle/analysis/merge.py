r"""Few kinds for many different rounds: those are joined that cost least together, each kind counted as its worst round.

>>> noises = np.array([[-4.0], [-3.9], [-1.0], [-0.9]])  # the larger, the more it costs
>>> merged_kinds(noises, np.ones(4), lambda worst: worst[:, 0] ** -2, most=2)
[[0, 1], [2, 3]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def merged_kinds(
    kinds: Vector, counts: npt.NDArray[Any], size: Callable[[Vector], Vector], *, most: int
) -> list[list[int]]:
    """Returns which kinds of rounds are to be joined, so that ``most`` are left at most.

    Args:
        kinds: What describes each kind, shape (k, c), every number such that a larger one costs
            more.
        counts: How many rounds of each kind there are.
        size: What a round of each of these kinds costs: a class costs what the largest of its
            numbers do together.
        most: How many may be left.
    """
    worst, number, own = kinds.copy(), counts.astype(np.float64), size(kinds)
    members = [[index] for index in range(len(kinds))]
    left = np.ones(len(kinds), bool)

    def prices(index: int) -> Vector:
        """Returns what joining a class to each of the others costs."""
        joined = size(np.maximum(worst, worst[index])) * (number + number[index])
        price = np.where(left, joined - own * number - own[index] * number[index], np.inf)
        price[index] = np.inf
        return price

    nearest, cheapest = np.zeros(len(kinds), np.int64), np.full(len(kinds), np.inf)

    def look(index: int) -> None:
        """Finds the class that is the cheapest to join to this one, and those that this one is the cheapest for."""
        price = prices(index)
        nearest[index], cheapest[index] = np.argmin(price), np.min(price)
        nearest[price < cheapest], cheapest[:] = index, np.minimum(price, cheapest)

    for index in range(len(kinds) if len(kinds) > most else 0):
        look(index)
    for _ in range(len(kinds) - most):
        one = int(np.argmin(cheapest))
        other = int(nearest[one])
        worst[one] = np.maximum(worst[one], worst[other])
        own[one], number[one] = size(worst[one : one + 1])[0], number[one] + number[other]
        members[one] += members[other]
        left[other], cheapest[other] = False, np.inf
        for again in np.flatnonzero(left & np.isin(nearest, (one, other))):
            look(int(again))
        look(one)
    return [
        sorted(kind_members) for kind_members, is_left in zip(members, left, strict=True) if is_left
    ]
