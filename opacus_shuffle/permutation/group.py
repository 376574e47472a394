"""Groups of permutations: drawing one, undoing it, and counting them.

A group is made of factors, each a set of coordinates that is permuted. A factor may lie inside of
others: the channels of a normalisation group, the dimensions of a head. It then has a permutation
of its own for every combination of their coordinates: two heads of width 4 have 2! · 4!² = 1152
permutations.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import numpy as np
import torch

from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.permutation.moving.layout import Factor, on_grid


@dataclasses.dataclass(frozen=True, eq=False)
class PermutationPlan:
    """One element of a group.

    Attributes:
        tables: Per factor a table ``(*sizes of inside, size)`` from new coordinates to old ones;
            None if it is not free.
    """

    tables: tuple[torch.Tensor | None, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PermutationPlan) or len(self.tables) != len(other.tables):
            return False
        pairs = zip(self.tables, other.tables, strict=True)
        return all(
            a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
        )


@dataclasses.dataclass(frozen=True)
class PermutationGroup:
    """All permutations of some factors.

    Attributes:
        factors: What is permuted, and what that lies inside of.
    """

    factors: tuple[Factor, ...]

    def sample(self, generator: torch.Generator | None = None) -> PermutationPlan:
        """Draws a permutation uniformly from the group.

        Args:
            generator: On the CPU; by default a fresh one, seeded by the operating system.
        """
        stream = stream_of(generator)
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for number, factor in enumerate(self.factors):
            if factor.free:
                by_size[factor.size].append(number)
        tables: dict[int, torch.Tensor] = {}
        for size, numbers in by_size.items():
            counts = [self.copies(number) for number in numbers]
            # Sorting 64-bit keys: exactly uniform but for ties, which have a chance below
            # size²·count/2⁶⁵.
            keys = stream.words(sum(counts) * size).reshape(-1, size)
            # NumPy's order is PyTorch's, in a fifth of the time.
            order = torch.from_numpy(np.argsort(keys, axis=1))
            for number, rows in zip(numbers, torch.split(order, counts), strict=True):
                tables[number] = rows.reshape(*self._outer_shape(number), size)
        return self._plan(tables)

    def identity(self) -> PermutationPlan:
        """Returns the permutation that moves nothing."""
        return self._plan(
            {
                number: torch.arange(factor.size).repeat(*self._outer_shape(number), 1)
                for number, factor in enumerate(self.factors)
                if factor.free
            }
        )

    def invert(self, plan: PermutationPlan) -> PermutationPlan:
        """Returns the permutation that undoes ``plan``."""
        tables = {}
        for number, table in self.free_tables(plan):
            new = torch.arange(table.shape[-1]).expand_as(table)
            tables[number] = torch.empty_like(table)
            tables[number][self.old_coordinates(number, plan)] = new
        return self._plan(tables)

    def log2_size(self) -> float:
        """Returns the binary logarithm of the number of permutations in the group."""
        return math.fsum(
            self.log2_size_of(number) for number, factor in enumerate(self.factors) if factor.free
        )

    def log2_size_of(self, number: int) -> float:
        """Returns the binary logarithm of the number of permutations of one factor."""
        return self.copies(number) * math.lgamma(self.factors[number].size + 1) / math.log(2)

    def copies(self, number: int) -> int:
        """Returns how many permutations of a factor there are, one per place it is inside of."""
        return math.prod(self._outer_shape(number))

    def check_plan(self, plan: PermutationPlan) -> None:
        """Refuses plans of another group.

        Raises:
            ValueError: The plan has other tables than this group's.
        """
        shapes = [
            (*self._outer_shape(number), factor.size) if factor.free else None
            for number, factor in enumerate(self.factors)
        ]
        if not isinstance(plan, PermutationPlan) or shapes != [
            None if table is None else tuple(table.shape) for table in plan.tables
        ]:
            raise ValueError("plan is not from this PermutationSpec: draw it with spec.sample()")

    def free_tables(self, plan: PermutationPlan) -> list[tuple[int, torch.Tensor]]:
        """Returns the number and the table of every free factor."""
        self.check_plan(plan)
        return [(number, table) for number, table in enumerate(plan.tables) if table is not None]

    def old_coordinates(self, number: int, plan: PermutationPlan) -> tuple[torch.Tensor, ...]:
        """Returns where a factor's entries come from: old coordinates of outer factors, and own."""
        inside = self.factors[number].inside
        sizes = [self.factors[outer].size for outer in inside]
        coordinates = []
        for place, outer in enumerate(inside):
            table = plan.tables[outer]
            carried = [inside.index(further) for further in self.factors[outer].inside]
            if table is None:
                table, carried = torch.arange(sizes[place]), []
            coordinates.append(on_grid(table, [*carried, place], [*sizes, 1]))
        own = plan.tables[number]
        assert own is not None
        return (*coordinates, own)

    def _plan(self, tables: dict[int, torch.Tensor]) -> PermutationPlan:
        return PermutationPlan(tuple(tables.get(number) for number in range(len(self.factors))))

    def _outer_shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.factors[outer].size for outer in self.factors[number].inside)
