"""Layouts of axes as grids of factors, and index vectors from permutations of the factors.

An axis (or several neighbouring axes viewed as one) is a list of terms that tile it. A term is a
grid of factors, each with a stride, that begins at an offset. A concatenation of three matrices of
two heads of width 4 is three terms of the same two factors.

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
        name: A readable name, unique among the free factors of a specification.
        size: Number of coordinates.
        inside: The factors (by number) that contain it: every combination of their coordinates has
            its own permutation of this factor.
        free: Whether it is permuted. Fixed factors only contain others.
    """

    name: str
    size: int
    inside: tuple[int, ...] = ()
    free: bool = True


@dataclasses.dataclass(frozen=True)
class Term:
    """A grid inside an axis: ``(factor, stride)`` pairs that begin at ``offset``."""

    offset: int
    grid: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Axes ``start`` to ``stop`` (exclusive) of a tensor, viewed as one of ``size`` entries."""

    start: int
    stop: int
    size: int
    terms: tuple[Term, ...]


Blocks = tuple[Block | int, ...]
"""Neighbouring axes viewed as one: blocks, and the sizes of axes that stay, in order."""


def plan_movement(
    shape: tuple[int, ...], blocks: tuple[Block, ...]
) -> tuple[tuple[int, int, int], Blocks, Blocks]:
    """Returns how to view a tensor as rows and columns that one pass can move.

    The last block becomes the columns, and all blocks before it the rows.

    Returns:
        The sizes (rows, columns, inner), the layout of the rows and that of the columns; a layout
        is empty if nothing moves.
    """
    last = blocks[-1]
    inner = math.prod(shape[last.stop :])
    before = math.prod(shape[: last.start])
    if len(blocks) == 1 and before == 1 and inner > 1:
        return (last.size, inner, 1), blocks, ()
    rows: list[Block | int] = []
    position = 0
    for block in blocks[:-1]:
        rows += [math.prod(shape[position : block.start]), block]
        position = block.stop
    rows += [math.prod(shape[position : last.start])] if rows else []
    return (before, last.size, inner), tuple(rows), (last,)


class IndexPlan:
    """Computes the index vectors of several layouts from a permutation's tables, in one pass.

    An old position is the sum of a constant and, for each factor, a stride times an old coordinate
    from a table. The entries of the tables that are needed depend only on the layouts. They are
    determined once, so that a permutation costs a few operations on vectors.

    Args:
        layouts: Each is a list of neighbouring axes viewed as one.
        factors: All factors of the specification.

    Attributes:
        sizes: Number of entries of each layout.
    """

    def __init__(self, layouts: Sequence[Blocks], factors: Sequence[Factor]) -> None:
        # Positions in the vector of all tables, which begins with a 1 for the constants.
        shapes = [[*(factors[outer].size for outer in one.inside), one.size] for one in factors]
        counts = [math.prod(shape) * one.free for shape, one in zip(shapes, factors, strict=True)]
        positions = [
            torch.arange(1 + end - count, 1 + end, device="cpu").view(shape) if count else None
            for shape, count, end in zip(shapes, counts, np.cumsum(counts).tolist(), strict=True)
        ]
        sums = [_sum_of_layout(layout, factors, positions) for layout in layouts]
        self.sizes = [one.shape[-1] for one in sums]
        terms = max(map(len, sums), default=0)
        padded = [np.pad(one, ((0, terms - len(one)), (0, 0), (0, 0))) for one in sums]
        together = np.concatenate([np.empty((terms, 2, 0), np.int64), *padded], axis=2)
        # 32 bits halve the transfer to a device, unless an axis is too long.
        self._dtype = np.int32 if max(self.sizes, default=0) < 2**31 else np.int64
        self._strides, self._positions = together[:, 0].astype(self._dtype), together[:, 1].copy()

    def index(self, tables: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns the old position of every new one, for all layouts one after the other.

        Args:
            tables: For each factor its permutation, ``(*sizes of inside, size)``, from new
                coordinates to old ones; None for fixed factors.
        """
        free = [table.reshape(-1) for table in tables if table is not None]
        entries = (
            torch.cat([torch.ones(1, dtype=torch.int64, device="cpu"), *free])
            .numpy()
            .astype(self._dtype)
        )
        # No position is out of range; with "clip" NumPy does not check them first.
        old = entries.take(self._positions, mode="clip")
        return torch.from_numpy(np.einsum("ij,ij->j", self._strides, old))


def _sum_of_layout(
    layout: Blocks, factors: Sequence[Factor], positions: Sequence[torch.Tensor | None]
) -> npt.NDArray[np.int64]:
    """Returns the terms of the sum for every entry's old position: shape (terms, 2, size).

    A term is a stride and the position of the table entry that it multiplies. The first term is the
    constant.
    """
    terms = np.zeros((1, 2, 1), np.int64)
    for block in layout:
        if isinstance(block, int):
            added = np.zeros((1, 2, block), np.int64)
            added[0, 0] = np.arange(block)
        else:
            added = _sum_of_block(block, factors, positions)
        outer = terms * np.array([[added.shape[-1]], [1]])  # strides, but not positions
        outer, added = (
            outer.repeat(added.shape[-1], axis=2),
            np.tile(added, terms.shape[-1]),
        )
        terms = np.concatenate([outer[:1] + added[:1], outer[1:], added[1:]])
    return terms


def _sum_of_block(
    block: Block, factors: Sequence[Factor], positions: Sequence[torch.Tensor | None]
) -> npt.NDArray[np.int64]:
    longest = max((len(term.grid) for term in block.terms), default=0)
    sums = np.zeros((1 + longest, 2, block.size), np.int64)
    sums[0, 0] = np.arange(block.size)
    for term in block.terms:
        numbers = [number for number, _ in term.grid]
        sizes = [factors[number].size for number in numbers]
        # A view of the term's grid in each row of ``sums``.
        steps = [stride * sums.itemsize for _, stride in term.grid]
        grid = np.ndarray(
            (*sums.shape[:2], *sizes), sums.dtype, sums, term.offset * sums.itemsize,
            (*sums.strides[:2], *steps),
        )  # fmt: skip
        grid[0, 0] = term.offset
        for axis, (number, stride) in enumerate(term.grid):
            table = positions[number]
            if table is None:
                grid[0, 0] += (
                    stride * on_grid(torch.arange(sizes[axis], device="cpu"), [axis], sizes).numpy()
                )
                continue
            carried = [nearest(numbers, outer, axis) for outer in factors[number].inside]
            grid[1 + axis, 0] = stride
            grid[1 + axis, 1] = on_grid(table, [*carried, axis], sizes).numpy()
    return sums


def on_grid(table: torch.Tensor, positions: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Reshapes a table to a grid of these sizes, with its axes at these dimensions."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    return table.permute(order).reshape(
        [size if position in positions else 1 for position, size in enumerate(sizes)]
    )


def nearest(numbers: Sequence[int], outer: int, axis: int) -> int:
    """Returns the dimension of the factor ``outer`` in a grid that belongs to that at ``axis``."""
    rank = numbers[:axis].count(numbers[axis])
    positions = [position for position, number in enumerate(numbers) if number == outer]
    return positions[min(rank, len(positions) - 1)]
