"""Groups of permutations: sampling, inversion, size, and application to a network.

A group consists of factors, each a set of coordinates that is permuted. A factor may be nested in
others, such as the channels of a normalization group or the dimensions of a head. It then has a
permutation of its own for every combination of their coordinates. Two heads of width 4 have
2! · 4!² = 1152 permutations.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import nn

from opacus_shuffle.core.randomness import stream_of
from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.networks.running import plain_name
from opacus_shuffle.permutation.moving.gather import gather_
from opacus_shuffle.permutation.moving.layout import (
    Block,
    Blocks,
    Factor,
    IndexPlan,
    on_grid,
    plan_movement,
)
from opacus_shuffle.permutation.moving.torch_moves import Move

_Movement = tuple[tuple[int, int, int], int | None, int | None]
"""Sizes of a tensor viewed as rows and columns, and the numbers of their index vectors."""


@dataclasses.dataclass(frozen=True, eq=False)
class PermutationPlan:
    """One element of a group.

    Attributes:
        tables: For each factor a table of shape ``(*sizes of inside, size)`` from new coordinates
            to old ones; None if the factor is not free.
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
    """All permutations of some factors, and the tensors of a network that they move.

    Attributes:
        factors: The sets of coordinates that are permuted, and the factors that contain them.
        blocks: For each tensor that moves, by its name in the network (tied ones once), the axes
            that consist of factors that move.
        shapes: Shapes of these tensors.
        buffers: The names of the buffers among them.
        aliases: Other names of tied parameters, by the name used here.
    """

    factors: tuple[Factor, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    buffers: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def sample(self, generator: torch.Generator | None = None) -> PermutationPlan:
        """Draws a permutation uniformly from the group.

        Args:
            generator: A generator on the CPU. By default a fresh one, seeded by the operating
                system.
        """
        stream = stream_of(generator)
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for number, factor in enumerate(self.factors):
            if factor.free:
                by_size[factor.size].append(number)
        tables: dict[int, torch.Tensor] = {}
        for size, numbers in by_size.items():
            counts = [self.copies(number) for number in numbers]
            # The order of 64-bit keys is exactly uniform, except for ties, whose probability is
            # below size²·count/2⁶⁵.
            keys = stream.words(sum(counts) * size).reshape(-1, size)
            # NumPy takes a fifth of the time of PyTorch, for the same order.
            order = torch.from_numpy(np.argsort(keys, axis=1))
            for number, rows in zip(numbers, torch.split(order, counts), strict=True):
                tables[number] = rows.reshape(*self._outer_shape(number), size)
        return self._plan(tables)

    def identity(self) -> PermutationPlan:
        """Returns the permutation that moves nothing."""
        return self._plan(
            {
                number: torch.arange(factor.size, device="cpu").repeat(
                    *self._outer_shape(number), 1
                )
                for number, factor in enumerate(self.factors)
                if factor.free
            }
        )

    def invert(self, plan: PermutationPlan) -> PermutationPlan:
        """Returns the permutation that undoes ``plan``."""
        tables = {}
        for number, table in self.free_tables(plan):
            new = torch.arange(table.shape[-1], device="cpu").expand_as(table)
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
        """Returns how many permutations a factor has: one per position of its outer axes."""
        return math.prod(self._outer_shape(number))

    def check_plan(self, plan: PermutationPlan) -> None:
        """Refuses plans of another group.

        The code that moves memory relies on this check.

        Raises:
            ValueError: If the plan has other tables than this group, or an entry is out of range.
        """
        shapes = [
            (*self._outer_shape(number), factor.size) if factor.free else None
            for number, factor in enumerate(self.factors)
        ]
        if not isinstance(plan, PermutationPlan) or shapes != [
            None if table is None else tuple(table.shape) for table in plan.tables
        ]:
            raise ValueError("plan is not from this PermutationSpec: draw it with spec.sample()")
        for factor, table in zip(self.factors, plan.tables, strict=True):
            if table is not None and not 0 <= table.min() <= table.max() < factor.size:
                raise ValueError(
                    f"plan has an entry outside of [0, {factor.size}): draw it with spec.sample()"
                )

    def free_tables(self, plan: PermutationPlan) -> list[tuple[int, torch.Tensor]]:
        """Returns the number and the table of every free factor."""
        self.check_plan(plan)
        return [(number, table) for number, table in enumerate(plan.tables) if table is not None]

    def old_coordinates(self, number: int, plan: PermutationPlan) -> tuple[torch.Tensor, ...]:
        """Returns the old coordinates of the factors around a factor, and of its own entries."""
        inside = self.factors[number].inside
        sizes = [self.factors[outer].size for outer in inside]
        coordinates = []
        for axis, outer in enumerate(inside):
            table = plan.tables[outer]
            carried = [inside.index(further) for further in self.factors[outer].inside]
            if table is None:
                table, carried = torch.arange(sizes[axis], device="cpu"), []
            coordinates.append(on_grid(table, [*carried, axis], [*sizes, 1]))
        innermost = plan.tables[number]
        assert innermost is not None
        return (*coordinates, innermost)

    def apply_(
        self,
        module: nn.Module,
        plan: PermutationPlan,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Permutes parameters, buffers, gradients and the optimizer's state in place.

        Args:
            module: The network, or a wrapper of it (Opacus's, ``DistributedDataParallel``,
                ``torch.compile``).
            plan: A permutation drawn from this group.
            optimizer: The optimizer whose state moves too, plain or Opacus's.

        Raises:
            ValueError: If the network does not fit the specification, or the optimizer's state for
                a parameter has another shape. Nothing has moved then.
        """
        self.move(self.followers(self.tensors(module), optimizer), plan)

    def tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the tensors of this network that move, by name.

        Raises:
            ValueError: If the network does not fit the specification.
        """
        instance_of("module", module, (nn.Module,))
        present = {
            f"{prefix}.{key}" if prefix else key: tensor
            for prefix, part in module.named_modules(remove_duplicate=False)
            for key, tensor in (*part._parameters.items(), *part._buffers.items())
        }
        if any(name not in present for name in self.blocks):
            present = {plain_name(name): tensor for name, tensor in present.items()}
        for name, shape in self.shapes.items():
            tensor = present.get(name)
            if tensor is None or tensor.shape != shape:
                have = "does not exist" if tensor is None else f"has shape {tuple(tensor.shape)}"
                raise ValueError(
                    f"module does not fit the PermutationSpec: {name} should have shape {shape}, "
                    f"but {have}"
                )
            for alias in self.aliases.get(name, ()):
                if present.get(alias) is not tensor:
                    raise ValueError(
                        f"module does not fit the PermutationSpec: {alias} should be the same "
                        f"tensor as {name}"
                    )
        return {name: present[name] for name in self.shapes}

    def followers(
        self, tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
    ) -> dict[str, list[torch.Tensor]]:
        """Returns for each tensor itself, its gradient, and the optimizer's state of its shape.

        Raises:
            ValueError: If one of them cannot follow a permutation.
        """
        followers = {}
        for name, tensor in tensors.items():
            shape, gradient = tensor.shape, tensor.grad
            group = followers[name] = [tensor]
            if gradient is not None:
                if gradient.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of {name} is sparse, which cannot follow a permutation: use "
                        "dense gradients"
                    )
                group.append(gradient)
            state = {} if optimizer is None else optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    fits = not value.dim() or value.shape == shape
                    group += [value] if value.dim() else []
                else:
                    fits = not isinstance(value, list | tuple | dict)
                if not fits:
                    form = (
                        f"of shape {tuple(value.shape)}"
                        if isinstance(value, torch.Tensor)
                        else f"as a {type(value).__name__}"
                    )
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {key!r} {form} for {name} of "
                        f"shape {tuple(shape)}, "
                        "which cannot follow a permutation: use one with state of the same shape, "
                        "such as SGD, Adam, AdamW or "
                        "RMSprop"
                    )
        return followers

    def move(self, tensors: Mapping[str, Iterable[torch.Tensor]], plan: PermutationPlan) -> None:
        """Permutes tensors of the shapes of the named ones, in as few launches as possible."""
        self.check_plan(plan)
        index_plan, movements = self._movements
        # Executors send all index vectors to a device at once.
        index = torch.split(index_plan.index(plan.tables), index_plan.sizes)
        moves = []
        for name, group in tensors.items():
            sizes, rows, columns = movements[name]
            row_index = None if rows is None else index[rows]
            column_index = None if columns is None else index[columns]
            moves += [Move(tensor, *sizes, row_index, column_index) for tensor in group]
        gather_(moves)

    @cached_property
    def _movements(self) -> tuple[IndexPlan, dict[str, _Movement]]:
        """The plan of all index vectors, and how each tensor moves by them."""
        numbers: dict[Blocks, int] = {}  # tensors with the same layout share one
        movements = {}
        for name, blocks in self.blocks.items():
            sizes, *layouts = plan_movement(self.shapes[name], blocks)
            rows, columns = (
                tuple(
                    axes if isinstance(axes, int) else dataclasses.replace(axes, start=0, stop=1)
                    for axes in layout
                )
                for layout in layouts
            )
            movements[name] = (
                sizes,
                numbers.setdefault(rows, len(numbers)) if rows else None,
                numbers.setdefault(columns, len(numbers)) if columns else None,
            )
        return IndexPlan(list(numbers), self.factors), movements

    @cached_property
    def perm_to_axes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """For each free factor the (tensor, axis) pairs that it moves."""
        return {
            factor.name: tuple(
                (name, axis)
                for name, axes in self.axes_to_perm.items()
                for axis, movers in enumerate(axes)
                if factor.name in movers
            )
            for factor in self.factors
            if factor.free
        }

    @cached_property
    def axes_to_perm(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """For each tensor and axis the free factors that move it."""
        movers = {}
        for name, blocks in self.blocks.items():
            shape = self.shapes[name]
            axes: list[dict[str, None]] = [{} for _ in shape]
            for block in blocks:
                steps = [math.prod(shape[axis + 1 : block.stop]) for axis in range(block.stop)]
                for number, stride in (entry for term in block.terms for entry in term.grid):
                    if self.factors[number].free:
                        axis = next(
                            axis for axis in range(block.start, block.stop) if stride >= steps[axis]
                        )
                        axes[axis][self.factors[number].name] = None
            movers[name] = tuple(map(tuple, axes))
        return movers

    def _plan(self, tables: dict[int, torch.Tensor]) -> PermutationPlan:
        return PermutationPlan(tuple(tables.get(number) for number in range(len(self.factors))))

    def _outer_shape(self, number: int) -> tuple[int, ...]:
        return self._outer_shapes[number]

    @cached_property
    def _outer_shapes(self) -> list[tuple[int, ...]]:
        """For each factor the sizes of the factors that contain it."""
        return [tuple(self.factors[outer].size for outer in one.inside) for one in self.factors]
