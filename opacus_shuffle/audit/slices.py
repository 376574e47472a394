"""Slices of tensors along the factors of a ``PermutationSpec``, and how to pair those of two releases.

A tensor is cut into *cells*: grids with one dimension per factor (or per axis that stays), so that the slices of a factor are
read off by moving one dimension to the front. Dimensions whose order is not known are sorted.

>>> import torch
>>> from opacus_shuffle.permutation import find_permutations
>>> spec = find_permutations(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)))
>>> [cell.sizes for cell in cut(spec)]
[(6, 4), (6,), (2, 6)]
>>> rows = torch.tensor([[0.0, 1.0], [5.0, 5.0], [9.0, 2.0]])
>>> pair(rows[[2, 0, 1]] + 0.1, rows, limit=2048).tolist()
[2, 0, 1]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence, Set

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from opacus_shuffle.permutation.moving.layout import nearest, on_grid
from opacus_shuffle.permutation.spec import PermutationSpec

Tables = Mapping[int, torch.Tensor]
"""Per factor whose permutation is known (by number) its table: new coordinates to old ones."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A grid inside of one tensor.

    Attributes:
        name: Of the tensor.
        sizes: Of the grid.
        strides: In the (contiguous) tensor.
        offset: Of the first entry.
        factors: Per dimension the number of the free factor that it belongs to, -1 if it stays.
        outer: Per dimension the dimensions of the factors that this one's factor is inside of.
    """

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    factors: tuple[int, ...]
    outer: tuple[tuple[int, ...], ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The grid, a view where the tensor is contiguous."""
        tensor = tensor.contiguous()
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)

    def moved(self, grid: torch.Tensor, tables: Tables, stay: int = -1, unknown: Set[int] = frozenset()) -> torch.Tensor:
        """The grid with every dimension of a known factor permuted, but for dimension ``stay``; outer ones first."""
        for axis in sorted(range(len(self.sizes)), key=lambda each: len(self.outer[each])):
            number = self.factors[axis]
            if axis == stay or number in unknown or number not in tables:
                continue
            index = on_grid(tables[number], [*self.outer[axis], axis], self.sizes)
            grid = torch.take_along_dim(grid, index.to(grid.device), axis)
        return grid

    def slices(self, grid: torch.Tensor, axis: int, unknown: Set[int]) -> torch.Tensor:
        """What to compare along a dimension: (coordinates of outer factors, its own, entries), unknown dimensions sorted."""
        known, sort = self._others(axis, unknown)
        grid = grid.permute(*self.outer[axis], axis, *known, *sort)
        grid = grid.reshape(self._count(self.outer[axis]), self.sizes[axis], self._count(known), self._count(sort))
        return (grid.sort(dim=3).values if sort else grid).flatten(2)

    def known_entries(self, axis: int, unknown: Set[int]) -> int:
        """How many entries of a slice are told apart by where they are."""
        return self._count(self._others(axis, unknown)[0])

    def _others(self, axis: int, unknown: Set[int]) -> tuple[list[int], list[int]]:
        """The dimensions of a slice: those in known order, and the others."""
        rest = [each for each in range(len(self.sizes)) if each != axis and each not in self.outer[axis]]
        return [i for i in rest if self.factors[i] not in unknown], [i for i in rest if self.factors[i] in unknown]

    def _count(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def cut(spec: PermutationSpec) -> list[Cell]:
    """Returns the cells of all tensors, those without a free factor left out."""
    cells = []
    for name, blocks in spec.blocks.items():
        shape = spec.shapes[name]
        blocked = {axis: block for block in blocks for axis in range(block.start, block.stop)}
        pieces = [blocked.get(axis, axis) for axis in range(len(shape)) if axis not in blocked or axis == blocked[axis].start]
        for terms in itertools.product(*(block.terms for block in blocks)):
            waiting = iter(terms)
            dimensions: list[tuple[int, int, int, tuple[int, ...]]] = []  # as Cell has them: size, stride, factor, outer
            offset = 0
            for piece in pieces:
                if isinstance(piece, int):
                    dimensions.append((shape[piece], math.prod(shape[piece + 1 :]), -1, ()))
                    continue
                term, first, unit = next(waiting), len(dimensions), math.prod(shape[piece.stop :])
                numbers = [number for number, _ in term.grid]
                offset += term.offset * unit
                for axis, (number, stride) in enumerate(term.grid):
                    factor = spec.factors[number]
                    outer = tuple(first + nearest(numbers, each, axis) for each in factor.inside) if factor.free else ()
                    dimensions.append((factor.size, stride * unit, number if factor.free else -1, outer))
            sizes, strides, factors, outers = zip(*dimensions, strict=True)
            if max(factors) >= 0:
                cells.append(Cell(name, sizes, strides, offset, factors, outers))
    return cells


def pair(after: torch.Tensor, before: torch.Tensor, *, limit: int) -> torch.Tensor:
    """Returns, for each row of ``after``, the row of ``before`` that it is: a permutation.

    Up to ``limit`` rows, the assignment of the smallest total squared distance (Jonker & Volgenant); beyond, each row takes the
    nearest one, the closest first where several want the same.
    """
    rows, columns = np.arange(len(after)), np.arange(len(before))
    table = np.empty(len(after), dtype=np.int64)
    while len(rows) > limit:
        best, distance = _nearest(after[torch.from_numpy(rows)], before[torch.from_numpy(columns)])
        closest = np.argsort(distance, kind="stable")
        taken, first = np.unique(best[closest], return_index=True)
        winners = closest[first]
        table[rows[winners]] = columns[taken]
        rows, columns = np.delete(rows, winners), np.delete(columns, taken)
        if len(taken) < 0.01 * len(rows):  # nothing to go by
            table[rows] = columns
            return torch.from_numpy(table)
    # Squared norms are the same for every assignment, so products decide.
    products = after[torch.from_numpy(rows)] @ before[torch.from_numpy(columns)].T
    table[rows] = columns[linear_sum_assignment(products.numpy(force=True), maximize=True)[1]]
    return torch.from_numpy(table)


def _nearest(after: torch.Tensor, before: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each row of ``after``, the nearest row of ``before`` and its squared distance."""
    norms = before.square().sum(1)
    best, distance = [], []
    for part in torch.split(after, max(1, 2**24 // len(before))):  # distances held at a time
        found = torch.addmm(norms, part, before.T, alpha=-2).min(dim=1)
        best.append(found.indices)
        distance.append(found.values + part.square().sum(1))
    return torch.cat(best).numpy(force=True), torch.cat(distance).numpy(force=True)


def twins(rows: torch.Tensor) -> torch.Tensor:
    """Returns which rows of ``(groups, count, entries)`` equal another of their group in every entry."""
    equal = torch.empty(rows.shape[:2], dtype=torch.bool)
    for found, group in zip(equal, rows, strict=True):
        _, which, counts = torch.unique(group, dim=0, return_inverse=True, return_counts=True)
        found.copy_(counts[which] > 1)
    return equal
