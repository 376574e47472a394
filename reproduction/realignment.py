"""An adversary that finds the permutation between two releases of weights, and undoes it.

Weight shuffling releases W_t and W_{t+1} = P[W_t + a small update]. An adversary who sees both
matches each row of the second release with the nearest row of the first. Shuffled weights therefore
hide little from an adversary who observes a training run.

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
"""Maps the number of each matched factor to its table from new coordinates to old ones."""

SWEEPS = 20
"""The maximum number of rounds that match every factor again; related releases need a few."""


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """The permutation that the adversary infers between two releases.

    Attributes:
        plan: The permutation, in the form that :meth:`PermutationSpec.sample` returns.
    """

    plan: PermutationPlan
    _spec: PermutationSpec = dataclasses.field(repr=False)

    def recovered(self, true_plan: PermutationPlan) -> float:
        """Returns the fraction of coordinates whose permutation was recovered; 0 if none move.

        The fraction is over all factors. A coordinate inside another one, such as a unit of a head,
        counts as recovered only if the outer coordinate is recovered as well. Units with equal
        weights before the step, for example zeros, cannot be distinguished. They are matched
        correctly only by chance.

        Args:
            true_plan: The permutation that was applied, from the same specification.

        Raises:
            ValueError: If the plan is from another specification.
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
            tensors: ``after``, or tensors of the same names and shapes, such as gradients or
                optimizer state.

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

    The slices along one factor are matched at a time, by the assignment with the smallest total
    squared distance (Jonker & Volgenant). Tensors are weighted by how much they changed. Axes of
    factors that are not matched yet are sorted, which makes the distance independent of their
    permutation. Once every factor has a match, each factor is matched again with the others undone,
    until nothing changes (as in the weight matching of Ainsworth et al. 2023). Factors inside
    others, such as the units of a head or the channels of a group, are matched after these. The
    cost for n slices grows as n³ in the worst case.

    The result carries no guarantee. :meth:`Alignment.recovered` measures it if the true permutation
    is available.

    Args:
        spec: The permutation group. It is public, because it follows from the architecture.
        before: W_t as a state dict, with or without the prefixes of Opacus's and PyTorch's
            wrappers.
        after: W_{t+1} with the same tensors.

    Raises:
        ValueError: If a tensor is missing, has another shape, or is not finite.
    """
    instance_of("spec", spec, (PermutationSpec,))
    old, new = _moving(spec, "before", before), _moving(spec, "after", after)
    grids = {cell: (cell.of(old[cell.name]), cell.of(new[cell.name])) for cell in cells_of(spec)}
    identity = dict(spec.free_tables(spec.identity()))
    tables: dict[int, torch.Tensor] = {}
    for _ in range(SWEEPS):
        earlier = dict(tables)
        residuals = {cell: _residual(cell, *pair, tables) for cell, pair in grids.items()}
        for number in sorted(identity, key=lambda number: len(spec.factors[number].inside)):
            # Factors inside this one were matched under its previous table, which no longer holds.
            inner = {other for other in identity if number in spec.factors[other].inside}
            unknown = inner | (identity.keys() - tables.keys())
            match = _match(number, grids, tables, unknown, residuals)
            tables[number] = match.reshape_as(identity[number])
        if earlier and all(torch.equal(table, earlier[number]) for number, table in tables.items()):
            break
    return Alignment(
        PermutationPlan(tuple(tables.get(number) for number in range(len(spec.factors)))), spec
    )


@dataclasses.dataclass(frozen=True)
class Cell:
    """A strided view into one tensor with one dimension for each factor and each fixed axis.

    Moving the dimension of a factor to the front gives the slices of this factor.

    Attributes:
        name: The name of the tensor.
        sizes: The shape of the view.
        strides: The strides of the view in the (contiguous) tensor.
        offset: The index of its first entry in the tensor.
        factors: For each dimension, the number of its free factor, or -1 if the dimension is fixed.
        outer: For each dimension, the dimensions of the factors that contain its factor.
    """

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    factors: tuple[int, ...]
    outer: tuple[tuple[int, ...], ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view of this cell into a tensor."""
        tensor = tensor.contiguous()
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)

    def moved(
        self, grid: torch.Tensor, tables: Tables, stay: int = -1, unknown: Set[int] = frozenset()
    ) -> torch.Tensor:
        """Returns the grid with every matched factor permuted, except dimension ``stay``."""
        for axis in sorted(range(len(self.sizes)), key=lambda axis: len(self.outer[axis])):
            number = self.factors[axis]
            if axis != stay and number not in unknown and number in tables:
                index = on_grid(tables[number], [*self.outer[axis], axis], self.sizes)
                grid = torch.take_along_dim(grid, index.to(grid.device), axis)
        return grid

    def slices(self, grid: torch.Tensor, axis: int, unknown: Set[int]) -> torch.Tensor:
        """Returns the slices along a dimension, with all dimensions of unknown factors sorted.

        The shape is (coordinates of outer factors, coordinates of this dimension, entries).
        """
        rest = [
            other
            for other in range(len(self.sizes))
            if other != axis and other not in self.outer[axis]
        ]
        ordered = [other for other in rest if self.factors[other] not in unknown]
        unordered = [other for other in rest if self.factors[other] in unknown]
        outer = math.prod(self.sizes[other] for other in self.outer[axis])
        grid = grid.permute(*self.outer[axis], axis, *ordered, *unordered)
        entries = math.prod(self.sizes[other] for other in ordered)
        return grid.reshape(outer, self.sizes[axis], entries, -1).sort(dim=3).values.flatten(2)


def cells_of(spec: PermutationSpec) -> Iterator[Cell]:
    """Yields the cells of all tensors that have a free factor.

    >>> from opacus_shuffle.permutation import find_permutations
    >>> layers = torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)
    >>> [cell.sizes for cell in cells_of(find_permutations(torch.nn.Sequential(*layers)))]
    [(4, 6), (6,), (2, 6)]
    """
    for name, blocks in spec.blocks.items():
        shape = spec.shapes[name]
        fixed = set(range(len(shape))).difference(*(range(b.start, b.stop) for b in blocks))
        for terms in itertools.product(*(block.terms for block in blocks)):
            # Size, stride, factor and outer of each dimension, as in Cell.
            dimensions: list[tuple[int, int, int, tuple[int, ...]]] = [
                (shape[axis], math.prod(shape[axis + 1 :]), -1, ()) for axis in fixed
            ]
            offset = 0
            for block, term in zip(blocks, terms, strict=True):
                first, unit = len(dimensions), math.prod(shape[block.stop :])
                numbers = [number for number, _ in term.grid]
                offset += term.offset * unit
                for position, (number, stride) in enumerate(term.grid):
                    factor = spec.factors[number]
                    # A fixed factor has no permutation, but it locates the factors inside it.
                    free, inside = (number, factor.inside) if factor.free else (-1, ())
                    outer = tuple(first + nearest(numbers, other, position) for other in inside)
                    dimensions.append((factor.size, stride * unit, free, outer))
            sizes, strides, factors, outers = zip(*dimensions, strict=True)
            if max(factors) >= 0:
                yield Cell(name, sizes, strides, offset, factors, outers)


def _residual(cell: Cell, old: torch.Tensor, new: torch.Tensor, tables: Tables) -> float:
    """Returns the mean squared difference that remains after the permutations found so far."""
    residual = (new - cell.moved(old, tables)).square().sum(dtype=torch.float64)
    # Differences below the rounding error are no displacement.
    rounding = 1e-9 * new.square().sum(dtype=torch.float64)
    return max(float(residual), float(rounding)) / max(new.numel(), 1)


def _match(
    number: int,
    grids: Mapping[Cell, tuple[torch.Tensor, torch.Tensor]],
    tables: Tables,
    unknown: Set[int],
    residuals: Mapping[Cell, float],
) -> torch.Tensor:
    """Returns the permutation of one factor, given those of the others."""
    ones, others = [], []
    for cell, (old, new) in grids.items():
        for axis in (axis for axis, factor in enumerate(cell.factors) if factor == number):
            one = cell.slices(new, axis, unknown)
            other = cell.slices(cell.moved(old, tables, axis, unknown), axis, unknown)
            # The mean of the slices does not affect the assignment, but it would cost precision.
            middle = other.mean(1, keepdim=True)
            # Weighted least squares: each tensor is divided by the deviation of its change.
            scale = residuals[cell] ** -0.5 if residuals[cell] > 0 else 0.0
            ones.append((one - middle) * scale)
            others.append(((other - middle) * scale).to(ones[0].device))
    # The squared norms are the same for every assignment, so the products decide.
    products = (torch.cat(ones, 2) @ torch.cat(others, 2).mT).numpy(force=True)
    assigned = [
        torch.from_numpy(linear_sum_assignment(group, maximize=True)[1]) for group in products
    ]
    return torch.stack(assigned)


def _moving(spec: PermutationSpec, argument: str, tensors: StateDict) -> dict[str, torch.Tensor]:
    """Returns the tensors that move by the names of the specification, in float32 or float64."""
    moving: dict[str, torch.Tensor] = {}
    for key, name in _names(spec, argument, tensors).items():
        tensor = tensors[key].detach()
        moving[name] = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        if not bool(torch.isfinite(moving[name]).all()):
            raise ValueError(
                f"{argument}[{key!r}] must be finite: a run that diverged cannot be aligned"
            )
    for name in spec.shapes:
        if name not in moving:
            raise ValueError(
                f"{argument} must contain every tensor that moves, but {name} is missing: pass a "
                "state_dict"
            )
    return moving


def _names(spec: PermutationSpec, argument: str, tensors: StateDict) -> dict[str, str]:
    """Maps the keys of the tensors that move to their names, and checks their shapes."""
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
