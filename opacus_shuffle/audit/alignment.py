"""The re-aligning adversary: it finds the permutation between two releases, and undoes it.

Weight shuffling releases W_t and W_{t+1} = P[W_t + a small update]. Whoever sees both finds, for
each row of the second, the row of the first that is nearest: shuffled weights hide little from an
adversary who follows a run.

>>> import torch
>>> from opacus_shuffle.permutation import find_permutations
>>> network = torch.nn.Sequential(torch.nn.Linear(9, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4))
>>> spec, secret = find_permutations(network), torch.Generator().manual_seed(0)
>>> def noise(state):
...     return {name: torch.randn(value.shape, generator=secret) for name, value in state.items()}
>>> before, change = noise(network.state_dict()), noise(network.state_dict())
>>> after = {name: value + 0.1 * change[name] for name, value in before.items()}
>>> plan = spec.sample(secret)
>>> spec.move({name: [after[name]] for name in spec.blocks}, plan)
>>> align(spec, before, after).recovered(plan)
1.0
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

import torch
from scipy.optimize import linear_sum_assignment

from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.networks.running import plain_name
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec
from opacus_shuffle.permutation.moving.layout import nearest, on_grid

StateDict = Mapping[str, torch.Tensor]
Tables = Mapping[int, torch.Tensor]
"""Per factor whose permutation is known (by number) its table: new coordinates to old ones."""

SWEEPS = 20
"""Rounds of matching every factor again, at most; a few are enough for related releases."""


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """What the adversary believes to have happened between two releases.

    Attributes:
        plan: The permutation, as :meth:`PermutationSpec.sample` draws them.
    """

    plan: PermutationPlan
    _spec: PermutationSpec = dataclasses.field(repr=False)

    def recovered(self, true_plan: PermutationPlan) -> float:
        """Returns the share of coordinates that were put back in place; 0 if none move.

        It is over all factors. A coordinate inside of another (a unit of a head, say) is right only
        if the other one is, too. Units whose weights were all equal before the step, such as zeros,
        nobody can tell apart: which of them is which is right by chance alone.

        Args:
            true_plan: What really happened, from the same specification.

        Raises:
            ValueError: If it is from another one.
        """
        right = total = 0
        for number, table in self._spec.free_tables(true_plan):
            truth = self._spec.old_coordinates(number, true_plan)
            guess = self._spec.old_coordinates(number, self.plan)
            same = torch.ones_like(table, dtype=torch.bool)
            for old, guessed in zip(truth, guess, strict=True):
                same &= old == guessed
            right += int(same.sum())
            total += table.numel()
        return right / total if total else 0.0

    def undo(self, tensors: StateDict) -> dict[str, torch.Tensor]:
        """Returns the second release in the first one's order.

        Args:
            tensors: ``after``, or anything of its names and shapes, such as gradients or optimizer
                state.

        Raises:
            ValueError: If a tensor has another shape.
        """
        names = _names(self._spec, "tensors", tensors)
        undone = dict(tensors)
        moving: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        for key, name in names.items():
            undone[key] = tensors[key].detach().clone()
            moving[name].append(undone[key])
        self._spec.move(moving, self._spec.invert(self.plan))
        return undone


def align(spec: PermutationSpec, before: StateDict, after: StateDict) -> Alignment:
    """Finds the permutation P with ``after`` ≈ P[``before``] from the weights alone.

    Slices are paired along one factor at a time, by the assignment of the smallest total squared
    distance (Jonker & Volgenant), tensors weighted by how much they changed. Axes permuted by
    factors not known yet are sorted, which no permutation changes; when every factor has a guess,
    each is matched again with the others undone, until nothing changes (as in the weight matching
    of Ainsworth et al. 2023). Factors inside of others (the units of a head, channels of a group)
    follow those. The cost of n slices grows as n³ at worst.

    It is a guess: no part of it is guaranteed, and :meth:`Alignment.recovered` measures it where
    the truth is known.

    Args:
        spec: The group, which is public: it follows from the architecture.
        before: W_t, by parameter name, with or without prefixes of Opacus's and PyTorch's
            wrappers: a state dict.
        after: W_{t+1}, with the same tensors.

    Raises:
        ValueError: If a tensor is missing, has another shape, or is not finite.
    """
    instance_of("spec", spec, (PermutationSpec,))
    old, new = _moving(spec, "before", before), _moving(spec, "after", after)
    grids = {cell: (cell.of(old[cell.name]), cell.of(new[cell.name])) for cell in cut(spec)}
    identity = dict(spec.free_tables(spec.identity()))
    tables: dict[int, torch.Tensor] = {}
    for _ in range(SWEEPS):
        earlier = dict(tables)
        left = {cell: _left(cell, *pair, tables) for cell, pair in grids.items()}
        for number in sorted(identity, key=lambda number: len(spec.factors[number].inside)):
            # What is inside of this factor was matched under its old table, so its order says
            # nothing now.
            inner = {other for other in identity if number in spec.factors[other].inside}
            unknown = inner | (identity.keys() - tables.keys())
            tables[number] = _match(number, grids, tables, unknown, left).reshape_as(
                identity[number]
            )
        if earlier and all(torch.equal(table, earlier[number]) for number, table in tables.items()):
            break
    return Alignment(
        PermutationPlan(tuple(tables.get(number) for number in range(len(spec.factors)))), spec
    )


@dataclasses.dataclass(frozen=True)
class Cell:
    """A grid inside one tensor, with a dimension for each factor and each axis that stays.

    The slices of a factor are read off by moving its dimension to the front.

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
        """Returns the cell of a tensor."""
        tensor = tensor.contiguous()
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)

    def moved(
        self, grid: torch.Tensor, tables: Tables, stay: int = -1, unknown: Set[int] = frozenset()
    ) -> torch.Tensor:
        """Returns the grid with every known factor permuted, except ``stay``."""
        for axis in sorted(range(len(self.sizes)), key=lambda axis: len(self.outer[axis])):
            number = self.factors[axis]
            if axis != stay and number not in unknown and number in tables:
                index = on_grid(tables[number], [*self.outer[axis], axis], self.sizes)
                grid = torch.take_along_dim(grid, index.to(grid.device), axis)
        return grid

    def slices(self, grid: torch.Tensor, axis: int, unknown: Set[int]) -> torch.Tensor:
        """Returns what is compared along a dimension, with the unknown dimensions sorted.

        Its shape is (coordinates of outer factors, its own, entries).
        """
        rest = [
            place
            for place in range(len(self.sizes))
            if place != axis and place not in self.outer[axis]
        ]
        known = [place for place in rest if self.factors[place] not in unknown]
        unordered = [place for place in rest if self.factors[place] in unknown]
        outer = math.prod(self.sizes[place] for place in self.outer[axis])
        grid = grid.permute(*self.outer[axis], axis, *known, *unordered)
        entries = math.prod(self.sizes[place] for place in known)
        return grid.reshape(outer, self.sizes[axis], entries, -1).sort(dim=3).values.flatten(2)


def cut(spec: PermutationSpec) -> Iterator[Cell]:
    """Yields the cells of all tensors that have a free factor.

    >>> from opacus_shuffle.permutation import find_permutations
    >>> layers = torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)
    >>> [cell.sizes for cell in cut(find_permutations(torch.nn.Sequential(*layers)))]
    [(4, 6), (6,), (2, 6)]
    """
    for name, blocks in spec.blocks.items():
        shape = spec.shapes[name]
        stay = set(range(len(shape))).difference(*(range(b.start, b.stop) for b in blocks))
        for terms in itertools.product(*(block.terms for block in blocks)):
            # As Cell has them: size, stride, factor, outer.
            dimensions: list[tuple[int, int, int, tuple[int, ...]]] = [
                (shape[axis], math.prod(shape[axis + 1 :]), -1, ()) for axis in stay
            ]
            offset = 0
            for block, term in zip(blocks, terms, strict=True):
                first, unit = len(dimensions), math.prod(shape[block.stop :])
                numbers = [number for number, _ in term.grid]
                offset += term.offset * unit
                for place, (number, stride) in enumerate(term.grid):
                    factor = spec.factors[number]
                    # A factor that is fixed only tells where others are.
                    known, inside = (number, factor.inside) if factor.free else (-1, ())
                    outer = tuple(first + nearest(numbers, other, place) for other in inside)
                    dimensions.append((factor.size, stride * unit, known, outer))
            sizes, strides, factors, outers = zip(*dimensions, strict=True)
            if max(factors) >= 0:
                yield Cell(name, sizes, strides, offset, factors, outers)


def _left(cell: Cell, old: torch.Tensor, new: torch.Tensor, tables: Tables) -> float:
    """Returns the mean square of a cell that the permutations found do not explain."""
    left = (new - cell.moved(old, tables)).square().sum(dtype=torch.float64)
    rounding = 1e-9 * new.square().sum(dtype=torch.float64)  # which is no displacement
    return max(float(left), float(rounding)) / max(new.numel(), 1)


def _match(
    number: int,
    grids: Mapping[Cell, tuple[torch.Tensor, torch.Tensor]],
    tables: Tables,
    unknown: Set[int],
    left: Mapping[Cell, float],
) -> torch.Tensor:
    """Returns the permutation of one factor, given those of the others."""
    ones, others = [], []
    for cell, (old, new) in grids.items():
        for axis in (axis for axis, factor in enumerate(cell.factors) if factor == number):
            one = cell.slices(new, axis, unknown)
            other = cell.slices(cell.moved(old, tables, axis, unknown), axis, unknown)
            # What all slices share says nothing, and would cost digits.
            middle = other.mean(1, keepdim=True)
            # Weighted least squares: each tensor is divided by the spread of what happened to it in
            # between.
            scale = left[cell] ** -0.5 if left[cell] > 0 else 0.0
            ones.append((one - middle) * scale)
            others.append(((other - middle) * scale).to(ones[0].device))
    # Squared norms are the same for every assignment, so products decide.
    products = (torch.cat(ones, 2) @ torch.cat(others, 2).mT).numpy(force=True)
    assigned = [
        torch.from_numpy(linear_sum_assignment(group, maximize=True)[1]) for group in products
    ]
    return torch.stack(assigned)


def _moving(spec: PermutationSpec, argument: str, tensors: StateDict) -> dict[str, torch.Tensor]:
    """Returns the tensors that move, by the specification's names, in single precision at least."""
    moving: dict[str, torch.Tensor] = {}
    for key, name in _names(spec, argument, tensors).items():
        tensor = tensors[key].detach()
        moving[name] = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        if not bool(torch.isfinite(moving[name]).all()):
            raise ValueError(
                f"{argument}[{key!r}] must be finite everywhere: a run that diverged cannot be "
                "aligned"
            )
    for name in spec.shapes:
        if name not in moving:
            raise ValueError(
                f"{argument} must hold every tensor that moves, {name} is missing: pass a "
                "state_dict"
            )
    return moving


def _names(spec: PermutationSpec, argument: str, tensors: StateDict) -> dict[str, str]:
    """Maps the keys of a state dict's tensors that move to their names; refuses other shapes."""
    canonical = {
        alias: name for name in spec.shapes for alias in (name, *spec.aliases.get(name, ()))
    }
    names = {}
    for key, tensor in instance_of(argument, tensors, (Mapping,)).items():
        name = canonical.get(key if key in canonical else plain_name(key))
        if name is None:
            continue
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if shape != spec.shapes[name]:
            raise ValueError(
                f"{argument} does not fit the PermutationSpec: {name} should have shape "
                f"{spec.shapes[name]}, got {shape}"
            )
        names[key] = name
    return names
