r"""Counts equal rounds together, and joins different ones.

Many different ones become few, each counted as the worst of those that it stands for.

>>> merge([("loud", 2), ("quiet", 1), ("loud", 3)])
(('loud', 5), ('quiet', 1))
>>> noises = np.array([[-4.0], [-3.9], [-1.0], [-0.9]])  # the larger, the more it costs
>>> def size(worst):
...     return worst[:, 0] ** -2
>>> [members.tolist() for _, members, _ in joined(noises, np.ones(4), size, most=2)]
[[0, 1], [2, 3]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from opacus_shuffle.core.validation import integer

Vector = npt.NDArray[np.float64]
_Kind = TypeVar("_Kind")

_MANY = 1000
"""More kinds than these are rounded before they are compared, as every pair of them is."""
_FINE = 64.0
"""How many values a number may then have per doubling (1.1 % apart), or half as many, and so on."""


def merge(rounds: Iterable[tuple[_Kind, int]]) -> tuple[tuple[_Kind, int], ...]:
    """Counts equal rounds together, in one order whatever theirs was, as roundings follow it.

    Args:
        rounds: Rounds, each with its number of repetitions.

    Raises:
        ValueError: If a number of repetitions is none.
    """
    counts: dict[_Kind, int] = {}
    for kind, count in rounds:
        counts[kind] = counts.get(kind, 0) + integer("repetitions", count)
    return tuple(sorted(counts.items(), key=repr))


def joined(
    rows: Vector,
    counts: Sequence[int] | npt.NDArray[Any],
    size: Callable[[Vector], Vector],
    *,
    most: int,
    whole: slice = slice(0),
) -> Iterator[tuple[Vector, npt.NDArray[Any], int]]:
    """Joins the two classes of rounds that cost least together, until few are left.

    Args:
        rows: What describes each kind of round, shape (kinds, numbers): a larger number costs more.
        counts: How many rounds of each kind there are, shape (kinds,).
        size: Maps such rows to what one round of each costs.
        most: How many classes may be left.
        whole: Which of the numbers are whole numbers.

    Yields:
        For each class the largest of its members' numbers, the members' places in ``rows``, and how
        many rounds they are together.
    """
    worst, class_of = np.unique(_rounded_up(rows, whole), axis=0, return_inverse=True)
    number = np.bincount(class_of, counts)
    prices = np.full((len(worst), len(worst)), np.inf)
    left = np.ones(len(worst), bool)

    def look(index: int) -> None:
        """Finds what it costs to join a class to each of the others."""
        together = size(np.maximum(worst, worst[index])) * (number + number[index])
        apart = size(worst) * number
        price = np.where(left, together - apart - apart[index], np.inf)
        price[index] = np.inf
        prices[index] = prices[:, index] = price

    for index in range(len(worst)):
        look(index)
    for _ in range(len(worst) - most):
        one, other = divmod(int(np.argmin(prices)), len(worst))
        worst[one] = np.maximum(worst[one], worst[other])
        number[one] += number[other]
        class_of[class_of == other] = one
        left[other] = False
        prices[other] = prices[:, other] = np.inf
        look(one)
    for remaining in np.flatnonzero(left):
        yield worst[remaining], np.flatnonzero(class_of == remaining), int(number[remaining])


def _rounded_up(rows: Vector, whole: slice) -> Vector:
    """Rounds numbers up to a grid of powers until few rows are different.

    No number rises above the largest one.
    """
    rounded, fine = rows, _FINE
    while len(np.unique(rounded, axis=0)) > _MANY:
        with np.errstate(divide="ignore"):  # of a number that is 0, and stays so
            powers = np.log2(np.abs(rows)) * fine
        exponents = np.where(rows < 0, np.floor(powers), np.ceil(powers)) / fine
        rounded = np.sign(rows) * 2**exponents
        rounded[:, whole] = np.ceil(rounded[:, whole])
        rounded, fine = np.clip(rounded, rows, rows.max(axis=0)), fine / 2
    return rounded
