"""Where the entries of an axis lie, as data, and index vectors made from permutations of its factors.

An axis (or several neighbouring axes seen as one) is a list of terms that tile it; a term is a grid
of factors, each with a stride, from an offset on. Three matrices of two heads of width 4 laid end
to end are three terms of the same two factors.

>>> import torch
>>> heads = Block(0, 1, 8, (Term(0, ((0, 4), (1, 1))),))
>>> factors = (Factor("heads", 2), Factor("width", 4, inside=(0,)))
>>> tables = [torch.tensor([1, 0]), torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])]
>>> index_vector(heads, factors, tables).tolist()
[4, 5, 6, 7, 3, 2, 1, 0]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from opacus_shuffle.permutation.moving.moves import send


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
    """Returns how to see a tensor so that moving it takes one pass: the last block gives its columns, all before its rows.

    Returns:
        Its sizes (rows, columns, inner), what moves the rows, and what moves the columns; empty for
        what stays.
    """
    last = blocks[-1]
    inner = math.prod(shape[last.stop :])
    if len(blocks) == 1 and math.prod(shape[: last.start]) == 1 and inner > 1:
        return (last.size, inner, 1), (last,), ()
    rows: list[Block | int] = []
    place = 0
    for block in blocks[:-1]:
        rows += [math.prod(shape[place : block.start])] if block.start > place else []
        rows.append(block)
        place = block.stop
    rows += [math.prod(shape[place : last.start])] if rows and last.start > place else []
    return (math.prod(shape[: last.start]), last.size, inner), tuple(rows), (last,)


def index_vector(
    block: Block, factors: Sequence[Factor], tables: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Returns for every new position of the block the old one, int64 ``(size,)``.

    Args:
        block: The axes.
        factors: All factors of the specification.
        tables: Per factor its permutation, ``(*sizes of inside, size)``: new coordinate to old;
            None for fixed ones.
    """
    index = np.arange(block.size, dtype=np.int64)
    for term in block.terms:
        if not any(factors[number].free for number, _ in term.grid):
            continue
        numbers = [number for number, _ in term.grid]
        sizes = [factors[number].size for number in numbers]
        old: Any = term.offset
        for axis, (number, stride) in enumerate(term.grid):
            table = tables[number]
            if table is None:
                table, carried = torch.arange(sizes[axis]), [axis]
            else:
                carried = [nearest(numbers, outer, axis) for outer in factors[number].inside] + [
                    axis
                ]
            old = old + stride * on_grid(table, carried, sizes).numpy()
        strides = [stride * index.itemsize for _, stride in term.grid]
        np.ndarray(sizes, index.dtype, index, term.offset * index.itemsize, strides)[...] = old
    return torch.from_numpy(index)


def on_grid(table: torch.Tensor, places: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Lays a table over a grid of these sizes: its axes go to these places of the grid, and all others have size 1."""
    order = sorted(range(len(places)), key=places.__getitem__)
    return table.permute(order).reshape(
        [size if place in places else 1 for place, size in enumerate(sizes)]
    )


def joint_index(
    blocks: Blocks, factors: Sequence[Factor], tables: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Returns the :func:`index_vector` of neighbouring axes seen as one."""
    parts = [
        torch.arange(each) if isinstance(each, int) else index_vector(each, factors, tables)
        for each in blocks
    ]
    return functools.reduce(
        lambda index, part: (index[:, None] * len(part) + part).reshape(-1), parts
    )


class IndexVectors:
    """Index vectors of one permutation, each made once, and all of them sent to a device in one copy.

    Args:
        layouts: Neighbouring axes seen as one, by a number of the caller's.
        factors, tables: As of :func:`index_vector`.
    """

    def __init__(
        self,
        layouts: Mapping[int, Blocks],
        factors: Sequence[Factor],
        tables: Sequence[torch.Tensor | None],
    ) -> None:
        self._made = {
            number: joint_index(blocks, factors, tables) for number, blocks in layouts.items()
        }
        self._sent: dict[torch.device, dict[int | None, torch.Tensor | None]] = {}

    def on(self, device: torch.device) -> Mapping[int | None, torch.Tensor | None]:
        """Returns the vectors on a device by their numbers, int32 on a GPU; and None for None."""
        if device not in self._sent:
            made = list(self._made.values())
            if device.type != "cpu" and made:
                made = list(
                    torch.split(
                        send(torch.cat(made).to(torch.int32), device), [len(each) for each in made]
                    )
                )
            self._sent[device] = {None: None, **dict(zip(self._made, made, strict=True))}
        return self._sent[device]


def nearest(numbers: Sequence[int], outer: int, axis: int) -> int:
    """Returns where in a grid the outer factor of the factor at ``axis`` is; if there are several, the one of the same rank."""
    rank = numbers[:axis].count(numbers[axis])
    places = [place for place, number in enumerate(numbers) if number == outer]
    return places[min(rank, len(places) - 1)]
