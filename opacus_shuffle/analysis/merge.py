r"""Merges equal rounds, and replaces many different rounds by a few that cost no less.

>>> merge([("loud", 2), ("quiet", 1), ("loud", 3)])
(('loud', 5), ('quiet', 1))
>>> noises = np.array([[-4.0], [-3.9], [-1.0], [-0.9]])  # the larger, the more it costs
>>> def size(worst):
...     return worst[:, 0] ** -2
>>> [members.tolist() for _, members, _ in grouped(noises, np.ones(4), size, most=2)]
[[0, 1], [2, 3]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from opacus_shuffle.core.validation import integer

Vector = npt.NDArray[np.float64]
Indices = npt.NDArray[Any]
_Round = TypeVar("_Round")


def merge(rounds: Iterable[tuple[_Round, int]]) -> tuple[tuple[_Round, int], ...]:
    """Merges equal rounds, in an order that does not depend on theirs, as rounding errors do.

    Args:
        rounds: Rounds, each with its number of repetitions.

    Raises:
        ValueError: If a number of repetitions is not a whole number of at least 1.
    """
    counts: dict[_Round, int] = {}
    for round_, count in rounds:
        counts[round_] = counts.get(round_, 0) + integer("repetitions", count)
    return tuple(sorted(counts.items(), key=repr))


def grouped(
    rows: Vector,
    counts: Sequence[int] | Indices,
    size: Callable[[Vector], Vector],
    *,
    most: int,
) -> Iterator[tuple[Vector, Indices, int]]:
    """Splits different rounds into groups, each of which is computed as its worst member.

    The group with the largest excess cost is repeatedly split in two at the best position.

    Args:
        rows: The numbers of each round, shape (rounds, numbers). A larger number costs more.
        counts: The number of repetitions of each round, shape (rounds,).
        size: Returns the cost of one round for each of such rows.
        most: The largest number of groups.

    Yields:
        For each group the largest numbers of its members, the members' indices in ``rows``, and
        their total number of repetitions.
    """
    number = np.asarray(counts)

    def wasted(members: Indices) -> float:
        """Returns the cost of a group beyond that of its members."""
        worst = rows[members].max(axis=0, keepdims=True)
        return float((size(worst) - size(rows[members])) @ number[members])

    groups = [np.arange(len(rows))]
    while len(groups) < min(most, len(rows)):
        divisible = [index for index, members in enumerate(groups) if len(members) > 1]
        widest = max(divisible, key=lambda index: wasted(groups[index]))
        groups += _halves(rows, number, size, groups.pop(widest))
    for members in groups:
        yield rows[members].max(axis=0), members, int(number[members].sum())


def _halves(
    rows: Vector, number: Indices, size: Callable[[Vector], Vector], members: Indices
) -> tuple[Indices, Indices]:
    """Splits a group, sorted by one of the numbers, where its halves have the least total cost."""
    cheapest, halves = np.inf, (members[:1], members[1:])
    for column in rows.T:
        order = members[np.argsort(column[members], kind="stable")]
        before = np.maximum.accumulate(rows[order])[:-1]
        after = np.maximum.accumulate(rows[order][::-1])[::-1][1:]
        first = np.cumsum(number[order])[:-1]
        prices = size(before) * first + size(after) * (number[order].sum() - first)
        at = int(np.argmin(prices))
        if prices[at] < cheapest:
            cheapest, halves = prices[at], (order[: at + 1], order[at + 1 :])
    return halves
