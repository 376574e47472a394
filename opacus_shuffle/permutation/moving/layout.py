"""Where the entries of an axis lie, and index vectors made from permutations of its factors.

An axis (or several neighbouring axes seen as one) is a list of terms that tile it; a term is a grid
of factors, each with a stride, from an offset on. Three matrices of two heads of width 4 laid end
to end are three terms of the same two factors.

>>> import torch
>>> heads = Block(0, 1, 8, (Term(0, ((0, 4), (1, 1))),))
>>> factors = (Factor("heads", 2), Factor("width", 4, inside=(0,)))
>>> tables = [torch.tensor([1, 0]), torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])]
>>> index_vector((heads,), factors, tables).tolist()
[4, 5, 6, 7, 3, 2, 1, 0]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
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


def index_vector(
    blocks: Blocks, factors: Sequence[Factor], tables: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Returns the old position for every new one of neighbouring axes: int64, (size,).

    Args:
        blocks: The axes.
        factors: All factors of the specification.
        tables: Per factor its permutation, ``(*sizes of inside, size)``: new coordinate to old;
            None for fixed ones.
    """
    index = torch.zeros(1, dtype=torch.int64)
    for block in blocks:
        own = torch.arange(block) if isinstance(block, int) else _of_block(block, factors, tables)
        index = (index[:, None] * len(own) + own).reshape(-1)
    return index


def _of_block(
    block: Block, factors: Sequence[Factor], tables: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    index = np.arange(block.size, dtype=np.int64)
    for term in block.terms:
        numbers = [number for number, _ in term.grid]
        sizes = [factors[number].size for number in numbers]
        old: Any = term.offset
        for axis, (number, stride) in enumerate(term.grid):
            table, carried = tables[number], [axis]
            if table is None:
                table = torch.arange(sizes[axis])
            else:
                carried = [nearest(numbers, outer, axis) for outer in factors[number].inside]
                carried.append(axis)
            old = old + stride * on_grid(table, carried, sizes).numpy()
        strides = [stride * index.itemsize for _, stride in term.grid]
        np.ndarray(sizes, index.dtype, index, term.offset * index.itemsize, strides)[...] = old
    return torch.from_numpy(index)


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
