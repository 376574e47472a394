"""Where the entries of an axis lie, and index vectors made from permutations of its factors.

An axis (or several neighbouring axes seen as one) is a list of terms that tile it; a term is a grid
of factors, each with a stride, from an offset on. Three matrices of two heads of width 4 laid end
to end are three terms of the same two factors.

>>> import torch
>>> heads = Block(0, 1, 8, (Term(0, ((0, 4), (1, 1))),))
>>> factors = (Factor("heads", 2), Factor("width", 4, inside=(0,)))
>>> tables = [torch.tensor([1, 0]), torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])]
>>> IndexPlan([(heads,)], factors).index(tables).tolist()
[4, 5, 6, 7, 3, 2, 1, 0]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


@dataclasses.dataclass(frozen=True)
class Factor:
    """A set of coordinates that appears in axes of one or more tensors.

    Attributes:
        name: In words; unique among the free ones of a specification.
        size: Number of coordinates.
        inside: Factors (by number) of which every combination has its own permutation of this one.
        free: Whether it is permuted at all; a fixed one only tells where others are.
    """

    name: str
    size: int
    inside: tuple[int, ...] = ()
    free: bool = True


@dataclasses.dataclass(frozen=True)
class Term:
    """A grid inside an axis: ``(factor, stride)`` pairs from ``offset`` on."""

    offset: int
    grid: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Axes ``start`` to ``stop`` (exclusive) of a tensor, seen as one of ``size`` entries."""

    start: int
    stop: int
    size: int
    terms: tuple[Term, ...]


Blocks = tuple[Block | int, ...]
"""Neighbouring axes seen as one: blocks, and the plain sizes of axes that stay, in order."""


def plan_movement(
    shape: tuple[int, ...], blocks: tuple[Block, ...]
) -> tuple[tuple[int, int, int], Blocks, Blocks]:
    """Returns how to see a tensor as rows and columns, so that moving it takes one pass.

    The last block gives its columns, all before it the rows.

    Returns:
        Its sizes (rows, columns, inner), what moves the rows, and what moves the columns; empty for
        what stays.
    """
    last = blocks[-1]
    inner = math.prod(shape[last.stop :])
    before = math.prod(shape[: last.start])
    if len(blocks) == 1 and before == 1 and inner > 1:
        return (last.size, inner, 1), blocks, ()
    rows: list[Block | int] = []
    place = 0
    for block in blocks[:-1]:
        rows += [math.prod(shape[place : block.start]), block]
        place = block.stop
    rows += [math.prod(shape[place : last.start])] if rows else []
    return (before, last.size, inner), tuple(rows), (last,)


class IndexPlan:
    """How to make the index vectors of several layouts from a permutation's tables, in one pass.

    An old position is a sum: a number of its own, and for each factor a stride times the old
    coordinate that a table gives. Which entries of which tables that takes depends on the layouts
    alone: it is looked up here once, and a permutation then costs a few operations on vectors.

    Args:
        layouts: Each is neighbouring axes seen as one.
        factors: All factors of the specification.

    Attributes:
        sizes: Entries of each layout.
    """

    def __init__(self, layouts: Sequence[Blocks], factors: Sequence[Factor]) -> None:
        # Of all tables, one after the other, behind a 1 that the plain numbers are multiples of.
        shapes = [[*(factors[outer].size for outer in one.inside), one.size] for one in factors]
        counts = [math.prod(shape) * one.free for shape, one in zip(shapes, factors, strict=True)]
        places = [
            torch.arange(1 + end - count, 1 + end, device="cpu").view(shape) if count else None
            for shape, count, end in zip(shapes, counts, np.cumsum(counts).tolist(), strict=True)
        ]
        sums = [_sum_of_layout(layout, factors, places) for layout in layouts]
        self.sizes = [one.shape[-1] for one in sums]
        terms = max(map(len, sums), default=0)
        padded = [np.pad(one, ((0, terms - len(one)), (0, 0), (0, 0))) for one in sums]
        together = np.concatenate([np.empty((terms, 2, 0), np.int64), *padded], axis=2)
        # Half as much to send to a device, but for axes that are too long.
        self._dtype = np.int32 if max(self.sizes, default=0) < 2**31 else np.int64
        self._strides, self._places = together[:, 0].astype(self._dtype), together[:, 1].copy()

    def index(self, tables: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns the old position for every new one, of all layouts one after the other.

        Args:
            tables: Per factor its permutation, ``(*sizes of inside, size)``: new coordinate to old;
                None for fixed ones.
        """
        free = [table.reshape(-1) for table in tables if table is not None]
        entries = (
            torch.cat([torch.ones(1, dtype=torch.int64, device="cpu"), *free])
            .numpy()
            .astype(self._dtype)
        )
        # No place is out of range: "clip" spares NumPy a look at all of them first.
        old = entries.take(self._places, mode="clip")
        return torch.from_numpy(np.einsum("ij,ij->j", self._strides, old))


def _sum_of_layout(
    layout: Blocks, factors: Sequence[Factor], places: Sequence[torch.Tensor | None]
) -> npt.NDArray[np.int64]:
    """Returns the terms of every entry's old position: shape (terms, 2, size).

    A term is a stride and the place of what it multiplies; the first one's is a plain number's.
    """
    terms = np.zeros((1, 2, 1), np.int64)
    for block in layout:
        if isinstance(block, int):
            own = np.zeros((1, 2, block), np.int64)
            own[0, 0] = np.arange(block)
        else:
            own = _sum_of_block(block, factors, places)
        outer = terms * np.array([[own.shape[-1]], [1]])  # strides, but not places
        outer, own = outer.repeat(own.shape[-1], axis=2), np.tile(own, terms.shape[-1])
        terms = np.concatenate([outer[:1] + own[:1], outer[1:], own[1:]])
    return terms


def _sum_of_block(
    block: Block, factors: Sequence[Factor], places: Sequence[torch.Tensor | None]
) -> npt.NDArray[np.int64]:
    longest = max((len(term.grid) for term in block.terms), default=0)
    sums = np.zeros((1 + longest, 2, block.size), np.int64)
    sums[0, 0] = np.arange(block.size)
    for term in block.terms:
        numbers = [number for number, _ in term.grid]
        sizes = [factors[number].size for number in numbers]
        # The term's grid in each of the rows of numbers above.
        steps = [stride * sums.itemsize for _, stride in term.grid]
        grid = np.ndarray(
            (*sums.shape[:2], *sizes), sums.dtype, sums, term.offset * sums.itemsize,
            (*sums.strides[:2], *steps),
        )  # fmt: skip
        grid[0, 0] = term.offset
        for axis, (number, stride) in enumerate(term.grid):
            table = places[number]
            if table is None:
                grid[0, 0] += (
                    stride * on_grid(torch.arange(sizes[axis], device="cpu"), [axis], sizes).numpy()
                )
                continue
            carried = [nearest(numbers, outer, axis) for outer in factors[number].inside]
            grid[1 + axis, 0] = stride
            grid[1 + axis, 1] = on_grid(table, [*carried, axis], sizes).numpy()
    return sums


def on_grid(table: torch.Tensor, places: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Lays a table over a grid of these sizes: its axes go to these places."""
    order = sorted(range(len(places)), key=places.__getitem__)
    return table.permute(order).reshape(
        [size if place in places else 1 for place, size in enumerate(sizes)]
    )


def nearest(numbers: Sequence[int], outer: int, axis: int) -> int:
    """Returns where in a grid the outer factor of that at ``axis`` is, of several the same one."""
    rank = numbers[:axis].count(numbers[axis])
    places = [place for place, number in enumerate(numbers) if number == outer]
    return places[min(rank, len(places) - 1)]
