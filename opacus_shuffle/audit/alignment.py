"""The re-aligning adversary: reads the permutation between two releases off them, and undoes it.

Weight shuffling releases W_t and W_{t+1} = P[W_t + a small update]. Whoever sees both finds, for each row of the second, the
row of the first that is nearest: shuffled weights hide little from an adversary who follows a run.

>>> import torch
>>> from opacus_shuffle.permutation import find_permutations
>>> network = torch.nn.Sequential(torch.nn.Linear(9, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4))
>>> spec, secret = find_permutations(network), torch.Generator().manual_seed(0)
>>> before = {name: torch.randn(value.shape, generator=secret) for name, value in network.state_dict().items()}
>>> after = {name: value + 0.1 * torch.randn(value.shape, generator=secret) for name, value in before.items()}
>>> plan = spec.sample(secret)
>>> spec.move({name: [after[name]] for name in spec.blocks}, plan)
>>> align(spec, before, after).recovered(plan)
1.0
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Set

import torch

from opacus_shuffle.audit.slices import Cell, Tables, cut, pair, twins
from opacus_shuffle.core.validation import instance_of, integer
from opacus_shuffle.networks.running import plain_name
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec
from opacus_shuffle.permutation.moving.layout import on_grid

StateDict = Mapping[str, torch.Tensor]
Axes = list[tuple[Cell, int]]
Grids = Mapping[Cell, tuple[torch.Tensor, torch.Tensor]]
"""Every cell of the two releases."""


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """What the adversary believes to have happened between two releases.

    Attributes:
        plan: The permutation, as :meth:`PermutationSpec.sample` draws them.
        residual: The distance of the two releases once it is undone, over the larger of their lengths (Euclidean, over all
            entries that move).
        slots: Coordinates that a permutation of the group moves, over all factors.
        untellable: How many of them nobody could put back but by luck: their slices of ``before`` have equal twins, such as
            hidden units whose weights are all zero.
    """

    plan: PermutationPlan = dataclasses.field(repr=False)
    residual: float
    slots: int
    untellable: int
    _spec: PermutationSpec = dataclasses.field(repr=False)
    _twins: Mapping[int, torch.Tensor] = dataclasses.field(repr=False)

    def recovered(self, true_plan: PermutationPlan) -> float:
        """Returns the share of slots that were put right, of those that can be told apart; 0 if none can.

        A slot inside of another (a unit of a head, say) is right only if the other one is, too.

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
            for one, other in zip(truth, guess, strict=True):
                same &= one == other
            tellable = ~self._twins[number][truth]
            right += int((same & tellable).sum())
            total += int(tellable.sum())
        return right / total if total else 0.0

    def undo(self, tensors: StateDict) -> dict[str, torch.Tensor]:
        """Returns the second release in the order of the first: permuted copies of what moves, the rest as it is.

        Args:
            tensors: ``after``, or anything of its names and shapes, such as gradients or optimizer state.

        Raises:
            ValueError: If a tensor has another shape.
        """
        names = _names(self._spec, "tensors", tensors)
        found = dict(tensors)
        moving: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        for key, name in names.items():
            found[key] = tensors[key].detach().clone()
            moving[name].append(found[key])
        self._spec.move(moving, self._spec.invert(self.plan))
        return found


class Aligner:
    """Finds the permutation between two releases of a network's weights, from the weights alone.

    Slices are paired along one factor at a time, by the assignment of the smallest total squared distance, tensors weighted by
    how much they changed. Axes permuted by factors not known yet are sorted, which no permutation changes; when every factor
    has a guess, each is matched again with the others undone, until nothing changes (as in the weight matching of Ainsworth et
    al. 2023). Factors inside of others (the units of a head, channels of a group) follow those.

    Args:
        spec: The group, which is public: it follows from the architecture.
        assignment_limit: Up to this many slices per factor the assignment is exact, at a cost that grows as their cube at
            worst; beyond, each takes its nearest neighbour.
        sweeps: Rounds of matching again, at most.
    """

    def __init__(self, spec: PermutationSpec, *, assignment_limit: int = 2048, sweeps: int = 20) -> None:
        self.spec = instance_of("spec", spec, (PermutationSpec,))
        self._limit = integer("assignment_limit", assignment_limit, minimum=0)
        self._sweeps = integer("sweeps", sweeps)
        self._cells = cut(spec)
        self._identity = dict(spec.free_tables(spec.identity()))
        self._inner = {n: frozenset(i for i, other in enumerate(spec.factors) if n in other.inside) for n in self._identity}

    def __call__(self, before: StateDict, after: StateDict) -> Alignment:
        """Returns the permutation P with ``after`` ≈ P[``before``], how well it fits, and how to undo it.

        It is a guess: no part of it is guaranteed, and :meth:`Alignment.recovered` measures it where the truth is known.

        Args:
            before: W_t, by parameter name, with or without prefixes of Opacus's and PyTorch's wrappers; buffers may be missing.
            after: W_{t+1}, with the same tensors.

        Raises:
            ValueError: If a tensor is missing, has another shape, or is not finite.
        """
        old, new = self._grids("before", before), self._grids("after", after)
        if old.keys() != new.keys():
            raise ValueError(f"before and after must hold the same tensors, only one has {sorted(old.keys() ^ new.keys())[0]}")
        grids = {cell: (cell.of(old[cell.name]), cell.of(new[cell.name])) for cell in self._cells if cell.name in old}
        axes = [(cell, axis) for cell in grids for axis in range(len(cell.sizes))]
        places = {number: [(cell, axis) for cell, axis in axes if cell.factors[axis] == number] for number in self._inner}
        tables = self._first_guess(places, grids)
        order = sorted(self._inner, key=lambda number: len(self.spec.factors[number].inside))
        unexplained, residual = self._fit(grids, tables)
        for _ in range(self._sweeps):
            changed = False
            for number in order:
                table = self._match(number, places[number], grids, tables, self._inner[number], unexplained)
                changed |= not torch.equal(table, tables[number])
                tables[number] = table
            if not changed:
                break
            unexplained, residual = self._fit(grids, tables)
        equal = {number: self._twins(number, places[number], grids) for number in order}
        for number in order:  # what is inside of something untellable is, too
            inside = self.spec.factors[number].inside
            for place, outer in enumerate(inside):
                if outer in equal:
                    carried = [*(inside.index(each) for each in self.spec.factors[outer].inside), place]
                    equal[number] = equal[number] | on_grid(equal[outer], carried, equal[number].shape)
        return Alignment(
            plan=PermutationPlan(tuple(tables.get(number) for number in range(len(self.spec.factors)))),
            residual=residual,
            slots=sum(table.numel() for table in equal.values()),
            untellable=sum(int(table.sum()) for table in equal.values()),
            _spec=self.spec,
            _twins=equal,
        )

    def _grids(self, argument: str, tensors: StateDict) -> dict[str, torch.Tensor]:
        """Returns the tensors that move, by their names in the specification, in at least single precision."""
        found: dict[str, torch.Tensor] = {}
        for key, name in _names(self.spec, argument, tensors).items():
            tensor = tensors[key]
            wide = tensor.detach() if tensor.dtype in (torch.float32, torch.float64) else tensor.detach().float()
            if not bool(torch.isfinite(wide).all()):
                raise ValueError(f"{argument}[{key!r}] must be finite everywhere: a run that diverged cannot be aligned")
            found[name] = wide
        for name in self.spec.shapes:
            if name not in found and name not in self.spec.buffers:
                raise ValueError(f"{argument} must hold every parameter that moves, {name} is missing: pass a state_dict")
        return found

    def _first_guess(self, places: Mapping[int, Axes], grids: Grids) -> dict[int, torch.Tensor]:
        """Matches one factor after the other, those first of whose entries most are told apart by what is known already."""
        tables: dict[int, torch.Tensor] = {}
        while len(tables) < len(places):
            unknown = frozenset(places) - frozenset(tables)
            ready = [n for n in sorted(unknown) if not unknown.intersection(self.spec.factors[n].inside)]
            best = max(ready, key=lambda n: sum(c.known_entries(axis, unknown) for c, axis in places[n]))
            tables[best] = self._match(best, places[best], grids, tables, unknown)
        return tables

    def _match(
        self,
        number: int,
        places: Axes,
        grids: Grids,
        tables: Tables,
        unknown: Set[int],
        unexplained: Mapping[Cell, float] | None = None,
    ) -> torch.Tensor:
        """Returns a factor's table, given those of others; whatever is unknown is sorted."""
        if self.spec.factors[number].size == 1 or not places:
            return self._identity[number].clone()
        ones, others = [], []
        for cell, axis in places:
            old, new = grids[cell]
            one, other = cell.slices(new, axis, unknown), cell.slices(cell.moved(old, tables, axis, unknown), axis, unknown)
            middle = other.mean(1, keepdim=True)  # what all slices share says nothing, and would cost digits
            one, other = one - middle, other - middle
            # Weighted least squares: divided by the spread of what happened in between; at first that of the slices, too.
            spread = float(one.square().mean()) if unexplained is None else unexplained[cell]
            scale = spread**-0.5 if spread > 0 else 0.0
            ones.append(one * scale)
            others.append(other * scale)
        after, before = torch.cat(ones, 2), torch.cat([each.to(ones[0].device) for each in others], 2)
        found = [pair(a, b, limit=self._limit) for a, b in zip(after, before, strict=True)]
        return torch.stack(found).reshape_as(self._identity[number])

    def _fit(self, grids: Grids, tables: Tables) -> tuple[dict[Cell, float], float]:
        """Returns, for every cell, the mean square that the permutation leaves, and the relative distance over all cells."""
        unexplained = {}
        distance = first = second = 0.0
        for cell, (old, seen) in grids.items():
            moved = cell.moved(old, tables)
            off, one, two = (float(x.square().sum(dtype=torch.float64)) for x in (seen - moved, moved, seen))
            distance, first, second = distance + off, first + one, second + two
            unexplained[cell] = max(off, 1e-9 * two) / max(moved.numel(), 1)  # rounding is no displacement
        length = max(first, second)
        return unexplained, math.sqrt(distance / length) if length > 0 else 0.0

    def _twins(self, number: int, places: Axes, grids: Grids) -> torch.Tensor:
        """Returns which old coordinates of a factor have an equal slice beside them."""
        unknown = self._inner[number] | {number}
        slices = [cell.slices(grids[cell][0], axis, unknown) for cell, axis in places]
        if not slices:
            return torch.full_like(self._identity[number], self.spec.factors[number].size > 1, dtype=torch.bool)
        return twins(torch.cat([each.to(slices[0].device) for each in slices], 2)).reshape_as(self._identity[number])


def align(
    spec: PermutationSpec, before: StateDict, after: StateDict, *, assignment_limit: int = 2048, sweeps: int = 20
) -> Alignment:
    """Finds the permutation between two releases; :class:`Aligner` explains it, and does many pairs of one network faster."""
    return Aligner(spec, assignment_limit=assignment_limit, sweeps=sweeps)(before, after)


def _names(spec: PermutationSpec, argument: str, tensors: StateDict) -> dict[str, str]:
    """Returns, for every key of a state dict whose tensor moves, its name in the specification; refuses other shapes."""
    canonical = {alias: name for name, aliases in spec.aliases.items() for alias in aliases}
    found = {}
    for key, tensor in instance_of(argument, tensors, (Mapping,)).items():
        name = key if key in spec.shapes or key in canonical else plain_name(key)
        name = canonical.get(name, name)
        if name not in spec.shapes:
            continue
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if shape != spec.shapes[name]:
            raise ValueError(
                f"{argument} does not fit the PermutationSpec: {name} should have shape {spec.shapes[name]}, got {shape}"
            )
        found[key] = name
    return found
