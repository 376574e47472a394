"""``PermutationSpec``: which entries of a network's parameters may be permuted together without changing its function.

It is data: factors (what is permuted, inside of what) and blocks (which axes of which tensors are made of them). It says how to
draw a permutation, and moves parameters, buffers, gradients and optimizer state by it.

>>> import torch
>>> from opacus_shuffle.permutation import find_permutations
>>> network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> spec = find_permutations(network, torch.zeros(1, 4))
>>> before = network(torch.ones(1, 4))
>>> spec.apply_(network, spec.sample())
>>> bool(torch.allclose(network(torch.ones(1, 4)), before))
True
>>> round(2 ** spec.log2_size())
720
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from opacus_shuffle.core.opacus_compat import WRAPPER_NAMES
from opacus_shuffle.core.randomness import check_generator, secret_generator
from opacus_shuffle.permutation.moving.gather import Move, gather_
from opacus_shuffle.permutation.moving.layout import Block, Factor, IndexVectors, Term, plan_movement

WRAPPERS = re.compile(rf"^(?:(?:{'|'.join(WRAPPER_NAMES)})\.)+")
"""What Opacus, distributed training and ``torch.compile`` put before the names of parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class PermutationPlan:
    """One element of the group: per free factor a table ``(*sizes of inside, size)`` from new coordinates to old ones."""

    tables: tuple[torch.Tensor | None, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PermutationPlan) or len(self.tables) != len(other.tables):
            return NotImplemented if not isinstance(other, PermutationPlan) else False
        pairs = zip(self.tables, other.tables, strict=True)
        return all((a is None) == (b is None) and (a is None or b is None or torch.equal(a, b)) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class PermutationSpec:
    """The group of permutations of a network's parameters under which its function stays as it is.

    Attributes:
        factors: What is permuted.
        blocks: Per tensor that moves, by its name in the network (tied ones once), the axes made of factors that move.
        shapes: Shapes of these tensors.
        buffers: Those of them that are buffers.
        unmoved: Names of the parameters that stay, with their sizes.
        aliases: Other names of tied parameters, by the one used here.
        unknown: Operations without a rule that were met, with their numbers of calls: what they touched stays.
        level: ``"paper"``, ``"heads"`` or ``"residual"``; or what its maker calls it.

    Formal Guarantees:
        Whatever is drawn by :meth:`sample`, the network's function stays as it is, and so does training with an optimizer that
        treats the entries of a tensor alike. Nothing here says anything about privacy: no ε gets smaller for every data set
        by permuting weights, and whoever knows the weights before an update can undo the permutation after it by matching.
    """

    factors: tuple[Factor, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    buffers: tuple[str, ...] = ()
    unmoved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)
    level: str = "residual"

    # The group ----------------------------------------------------------------------------------------------------------------

    def sample(self, generator: torch.Generator | None = None) -> PermutationPlan:
        """A permutation drawn uniformly from the group.

        Args:
            generator: On the CPU; by default a fresh one, seeded by the operating system.
        """
        check_generator("generator", generator)
        generator = secret_generator("cpu") if generator is None else generator
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for number, factor in enumerate(self.factors):
            if factor.free:
                by_size[factor.size].append(number)
        tables: list[torch.Tensor | None] = [None] * len(self.factors)
        for size, numbers in by_size.items():
            shapes = [self._outer_shape(number) for number in numbers]
            counts = [math.prod(shape) for shape in shapes]
            # Sorting 63-bit keys: exactly uniform but for ties, which have a chance below size²·count/2⁶⁴.
            keys = torch.empty((sum(counts), size), dtype=torch.int64).random_(generator=generator)
            drawn = keys.argsort(dim=1)
            for number, shape, rows in zip(numbers, shapes, torch.split(drawn, counts), strict=True):
                tables[number] = rows.reshape(*shape, size)
        return PermutationPlan(tuple(tables))

    def identity(self) -> PermutationPlan:
        """The permutation that moves nothing."""
        return PermutationPlan(
            tuple(
                torch.arange(factor.size).expand(*self._outer_shape(number), factor.size).contiguous() if factor.free else None
                for number, factor in enumerate(self.factors)
            )
        )

    def invert(self, plan: PermutationPlan) -> PermutationPlan:
        """The permutation that undoes ``plan``."""
        tables: list[torch.Tensor | None] = [None] * len(self.factors)
        for number, table in self._tables(plan):
            result = torch.empty_like(table)
            place = (*self._old_coordinates(number, plan), table)
            result[place] = torch.arange(table.shape[-1]).expand_as(table)
            tables[number] = result
        return PermutationPlan(tuple(tables))

    def compose(self, first: PermutationPlan, second: PermutationPlan) -> PermutationPlan:
        """The permutation that does what ``first`` and then ``second`` do."""
        tables: list[torch.Tensor | None] = [None] * len(self.factors)
        before = dict(self._tables(first))
        for number, table in self._tables(second):
            place = (*self._old_coordinates(number, second), table)
            tables[number] = before[number][place]
        return PermutationPlan(tuple(tables))

    def log2_size(self) -> float:
        """The binary logarithm of the number of permutations in the group."""
        return math.fsum(
            math.prod(self._outer_shape(number)) * math.lgamma(factor.size + 1) / math.log(2)
            for number, factor in enumerate(self.factors)
            if factor.free
        )

    # Moving -------------------------------------------------------------------------------------------------------------------

    def apply_(
        self,
        module: nn.Module,
        plan: PermutationPlan,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        executor: str = "auto",
        storage: str = "in_place",
    ) -> None:
        """Moves the network's parameters, buffers and gradients, and the optimizer's state, in place.

        Args:
            module: The network, or a wrapper of it (Opacus's, ``DistributedDataParallel``, ``torch.compile``).
            plan: From this specification.
            optimizer: Whose state for these parameters moves too; Opacus's optimizers are fine.
            executor: See :func:`opacus_shuffle.permutation.moving.gather.gather_`.
            storage: See there.

        Raises:
            ValueError: If the network has other parameters than the specification, or the optimizer's state for one of them has
                another shape, so that it cannot follow; nothing has moved then.
        """
        self.move(self.followers(self.tensors(module), optimizer), plan, executor=executor, storage=storage)

    def tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of this network that move, by name."""
        present: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        present.update(module.named_buffers(remove_duplicate=False))
        if any(name not in present for name in self.blocks):
            present = {WRAPPERS.sub("", name): tensor for name, tensor in present.items()}
        found = {}
        for name, shape in self.shapes.items():
            if name not in present or tuple(present[name].shape) != shape:
                have = f"has shape {tuple(present[name].shape)}" if name in present else "does not exist"
                raise ValueError(f"module does not fit the PermutationSpec: {name} should have shape {shape}, but {have}")
            found[name] = present[name]
            for alias in self.aliases.get(name, ()):
                if present.get(alias) is not found[name]:
                    raise ValueError(f"module does not fit the PermutationSpec: {alias} should be the same tensor as {name}")
        return found

    def followers(
        self, tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
    ) -> dict[str, list[torch.Tensor]]:
        """Per name the tensor itself, its gradient, and the optimizer's state of the same shape."""
        found = {}
        for name, tensor in tensors.items():
            found[name] = [tensor]
            if tensor.grad is not None:
                if tensor.grad.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of {name} is sparse, which cannot follow a permutation: use dense gradients"
                    )
                found[name].append(tensor.grad)
            for key, value in (optimizer.state.get(tensor, {}) if optimizer is not None else {}).items():
                if (isinstance(value, torch.Tensor) and value.numel() > 1) or (isinstance(value, torch.Tensor) and value.dim()):
                    if value.shape != tensor.shape:
                        raise ValueError(
                            f"optimizer {type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name} of "
                            f"shape "
                            f"{tuple(tensor.shape)}, which cannot follow a permutation: use one with state of the same shape, "
                            f"such "
                            "as SGD, Adam, AdamW or RMSprop"
                        )
                    found[name].append(value)
                elif isinstance(value, list | tuple | dict):
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {key!r} for {name} as a {type(value).__name__}, which "
                        f"cannot "
                        "follow a permutation: use SGD, Adam, AdamW or RMSprop"
                    )
        return found

    def move(
        self,
        tensors: Mapping[str, Iterable[torch.Tensor]],
        plan: PermutationPlan,
        *,
        executor: str = "auto",
        storage: str = "in_place",
    ) -> None:
        """Moves tensors of the shapes of the named ones, all in as few launches as possible."""
        indices = IndexVectors(self.factors, [table for _, table in self._all_tables(plan)])
        moves = []
        for name, group in tensors.items():
            movement = plan_movement(self.shapes[name], self.blocks[name])
            for tensor in group:
                rows, columns = indices.on(tensor.device, movement.row_blocks, movement.column_block)
                moves.append(Move(tensor, movement.rows, movement.columns, movement.inner, rows, columns))
        gather_(moves, executor=executor, storage=storage)

    # What it is ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def perm_to_axes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Per free factor the (tensor, axis) pairs that it moves."""
        found: dict[str, list[tuple[str, int]]] = {factor.name: [] for factor in self.factors if factor.free}
        for name, axes in self.axes_to_perm.items():
            for axis, names in enumerate(axes):
                for each in names:
                    found[each].append((name, axis))
        return {name: tuple(axes) for name, axes in found.items()}

    @cached_property
    def axes_to_perm(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Per tensor and axis the free factors that move it."""
        found = {}
        for name, blocks in self.blocks.items():
            shape = self.shapes[name]
            axes: list[dict[str, None]] = [{} for _ in shape]
            for block in blocks:
                steps = [math.prod(shape[axis + 1 : block.stop]) for axis in range(block.start, block.stop)]
                for term in block.terms:
                    for number, stride in term.grid:
                        if self.factors[number].free:
                            axis = next(i for i, step in enumerate(steps) if stride >= step)
                            axes[block.start + axis][self.factors[number].name] = None
            found[name] = tuple(tuple(each) for each in axes)
        return found

    def shuffle_ratio(self, module: nn.Module) -> float:
        """The fraction of the network's parameter entries that some permutation moves (tied tensors counted once)."""
        self.tensors(module)
        total = sum(parameter.numel() for parameter in module.parameters())
        moved = sum(
            round(self.moved_fraction(name) * math.prod(shape))
            for name, shape in self.shapes.items()
            if name not in self.buffers
        )
        return moved / total if total else 0.0

    def moved_fraction(self, name: str) -> float:
        """The fraction of a tensor's entries that some permutation moves."""
        stay = 1.0
        for block in self.blocks.get(name, ()):
            moved = sum(
                math.prod(self.factors[number].size for number, _ in term.grid)
                for term in block.terms
                if any(self.factors[number].free for number, _ in term.grid)
            )
            stay *= 1 - moved / block.size
        return 1 - stay

    def smallest_orbit(self, name: str) -> int:
        """To how many places an entry of the tensor can get, at least; 1 if some entry stays."""
        return min(math.prod(self.factors[number].size for number in moved) for moved in self._movers(name))

    def largest_orbit(self, name: str) -> int:
        """To how many places an entry of the tensor can get, at most."""
        return max(
            math.prod(self.factors[number].size - again for number, times in moved.items() for again in range(times))
            for moved in self._movers(name)
        )

    def _movers(self, name: str) -> list[Counter[int]]:
        """For each kind of entry the free factors that move it, with the number of axes in which they do.

        Entries on the diagonal of a factor that moves two axes stay there; others never get to it.
        """
        kinds = [Counter[int]()]
        for block in self.blocks.get(name, ()):
            terms = [Counter(number for number, _ in term.grid if self.factors[number].free) for term in block.terms]
            covered = sum(math.prod(self.factors[number].size for number, _ in term.grid) for term in block.terms)
            if covered < block.size:
                terms.append(Counter())
            kinds = [kind + term for kind in kinds for term in terms]
        return kinds

    def describe(self) -> str:
        """The groups and the parameters, as two tables in plain words."""
        from opacus_shuffle.permutation.description import describe

        return describe(self)

    def check(self, module: nn.Module, sample_input: Any = None) -> None:
        """Runs the network in double precision with perturbed and permuted weights: its outputs must stay as they are.

        Args:
            module: The network; it is not changed.
            sample_input: As for :func:`~opacus_shuffle.permutation.find_permutations`.

        Raises:
            ValueError: If they do not; it names the group and the parameters concerned.
        """
        from opacus_shuffle.permutation.self_check import check_invariance

        check_invariance(self, module, sample_input)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "level": self.level,
            "factors": [dataclasses.asdict(factor) for factor in self.factors],
            "blocks": {name: [dataclasses.asdict(block) for block in blocks] for name, blocks in self.blocks.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "buffers": list(self.buffers),
            "unmoved": dict(self.unmoved),
            "aliases": {name: list(names) for name, names in self.aliases.items()},
            "unknown": dict(self.unknown),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PermutationSpec:
        """The specification that :meth:`to_dict` described.

        Raises:
            ValueError: If the data are not such a description.
        """
        try:
            return cls(
                factors=tuple(
                    Factor(str(each["name"]), int(each["size"]), tuple(each["inside"]), bool(each["free"]))
                    for each in data["factors"]
                ),
                blocks={
                    name: tuple(
                        Block(
                            int(block["start"]),
                            int(block["stop"]),
                            int(block["size"]),
                            tuple(
                                Term(int(term["offset"]), tuple((int(number), int(stride)) for number, stride in term["grid"]))
                                for term in block["terms"]
                            ),
                        )
                        for block in blocks
                    )
                    for name, blocks in data["blocks"].items()
                },
                shapes={name: tuple(int(size) for size in shape) for name, shape in data["shapes"].items()},
                buffers=tuple(data["buffers"]),
                unmoved={name: int(size) for name, size in data["unmoved"].items()},
                aliases={name: tuple(names) for name, names in data["aliases"].items()},
                unknown={name: int(count) for name, count in data["unknown"].items()},
                level=str(data["level"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"data is no description of a PermutationSpec (see to_dict): {error!r}") from error

    # Internals ----------------------------------------------------------------------------------------------------------------

    def _outer_shape(self, number: int) -> tuple[int, ...]:
        """Sizes of the factors that this one is inside of."""
        return tuple(self.factors[outer].size for outer in self.factors[number].inside)

    def _all_tables(self, plan: PermutationPlan) -> list[tuple[int, torch.Tensor | None]]:
        """Every factor's table, checked to be of the right shape."""
        if not isinstance(plan, PermutationPlan) or len(plan.tables) != len(self.factors):
            raise ValueError("plan is not from this PermutationSpec: draw it with spec.sample()")
        for number, (factor, table) in enumerate(zip(self.factors, plan.tables, strict=True)):
            shape = (*self._outer_shape(number), factor.size)
            if (table is not None) != factor.free or (table is not None and tuple(table.shape) != shape):
                raise ValueError("plan is not from this PermutationSpec: draw it with spec.sample()")
        return list(enumerate(plan.tables))

    def _tables(self, plan: PermutationPlan) -> list[tuple[int, torch.Tensor]]:
        """The free factors' tables."""
        return [(number, table) for number, table in self._all_tables(plan) if table is not None]

    def _old_coordinates(self, number: int, plan: PermutationPlan) -> list[torch.Tensor]:
        """Of the factors that this one is inside of: old coordinates on the grid of all their new ones and its own."""
        inside = self.factors[number].inside
        rank = len(inside) + 1
        found = []
        for outer in inside:
            table = plan.tables[outer]
            own, carried = inside.index(outer), [inside.index(each) for each in self.factors[outer].inside]
            if table is None:
                table, carried = torch.arange(self.factors[outer].size), []
            carried = [*carried, own]
            order = sorted(range(len(carried)), key=carried.__getitem__)
            sizes = [self.factors[inside[i]].size if i in carried else 1 for i in range(rank - 1)]
            found.append(table.permute(order).reshape(*sizes, 1))
        return found
