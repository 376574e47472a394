"""Moving a network by a group of permutations: which tensors move, by which factors, and with what belongs to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import nn

from opacus_shuffle.core.validation import instance_of
from opacus_shuffle.networks.running import plain_name
from opacus_shuffle.permutation.group import PermutationGroup, PermutationPlan
from opacus_shuffle.permutation.moving.gather import gather_
from opacus_shuffle.permutation.moving.layout import Block, Blocks, IndexVectors, plan_movement
from opacus_shuffle.permutation.moving.moves import Move


@dataclasses.dataclass(frozen=True)
class GroupAction(PermutationGroup):
    """A group of permutations and the tensors of a network that it moves.

    Attributes:
        factors: What is permuted.
        blocks: Per tensor that moves, by its name in the network (tied ones once), the axes made of
            factors that move.
        shapes: Shapes of these tensors.
        buffers: Those of them that are buffers.
        aliases: Other names of tied parameters, by the one used here.
    """

    blocks: Mapping[str, tuple[Block, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    buffers: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def apply_(
        self,
        module: nn.Module,
        plan: PermutationPlan,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Moves the network's parameters, buffers and gradients, and the optimizer's state, in place.

        Args:
            module: The network, or a wrapper of it (Opacus's, ``DistributedDataParallel``,
                ``torch.compile``).
            plan: From this specification.
            optimizer: Whose state for these parameters moves too; Opacus's optimizers are fine.

        Raises:
            ValueError: If the network has other parameters than the specification, or the
                optimizer's state for one of them has another shape, so that it cannot follow;
                nothing has moved then.
        """
        self.move(self.followers(self.tensors(module), optimizer), plan)

    def tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the tensors of this network that move, by name.

        Raises:
            ValueError: If the network does not fit.
        """
        instance_of("module", module, (nn.Module,))
        present: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        present.update(module.named_buffers(remove_duplicate=False))
        if any(name not in present for name in self.blocks):
            present = {plain_name(name): tensor for name, tensor in present.items()}
        found = {}
        for name, shape in self.shapes.items():
            if name not in present or tuple(present[name].shape) != shape:
                have = (
                    f"has shape {tuple(present[name].shape)}"
                    if name in present
                    else "does not exist"
                )
                raise ValueError(
                    f"module does not fit the PermutationSpec: {name} should have shape {shape}, "
                    f"but {have}"
                )
            found[name] = present[name]
            for alias in self.aliases.get(name, ()):
                if present.get(alias) is not found[name]:
                    raise ValueError(
                        f"module does not fit the PermutationSpec: {alias} should be the same "
                        f"tensor as {name}"
                    )
        return found

    def followers(
        self, tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
    ) -> dict[str, list[torch.Tensor]]:
        """Returns per name the tensor itself, its gradient, and the optimizer's state of the same shape.

        Raises:
            ValueError: If one of them cannot follow a permutation.
        """
        found = {}
        for name, tensor in tensors.items():
            found[name] = [tensor]
            if tensor.grad is not None:
                if tensor.grad.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of {name} is sparse, which cannot follow a permutation: use "
                        "dense gradients"
                    )
                found[name].append(tensor.grad)
            for key, value in (
                optimizer.state.get(tensor, {}) if optimizer is not None else {}
            ).items():
                is_tensor = isinstance(value, torch.Tensor)
                if is_tensor and (value.dim() == 0 or value.shape == tensor.shape):
                    found[name] += [value] if value.dim() else []
                elif is_tensor or isinstance(value, list | tuple | dict):
                    form = (
                        f"of shape {tuple(value.shape)}"
                        if is_tensor
                        else f"as a {type(value).__name__}"
                    )
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {key!r} {form} for {name} of "
                        f"shape {tuple(tensor.shape)}, "
                        "which cannot follow a permutation: use one with state of the same shape, "
                        "such as SGD, Adam, AdamW or "
                        "RMSprop"
                    )
        return found

    def move(self, tensors: Mapping[str, Iterable[torch.Tensor]], plan: PermutationPlan) -> None:
        """Moves tensors of the shapes of the named ones, all in as few launches as possible."""
        self.check_plan(plan)
        movements, layouts = self._movements
        wanted = {
            number: layouts[number]
            for name in tensors
            for number in movements[name][1:]
            if number is not None
        }
        indices = IndexVectors(wanted, self.factors, plan.tables)
        moves = []
        for name, group in tensors.items():
            sizes, rows, columns = movements[name]
            for tensor in group:
                here = indices.on(tensor.device)
                moves.append(Move(tensor, *sizes, here[rows], here[columns]))
        gather_(moves)

    @cached_property
    def _movements(
        self,
    ) -> tuple[dict[str, tuple[tuple[int, int, int], int | None, int | None]], list[Blocks]]:
        """Per tensor its sizes for one pass and the numbers of its rows' and columns' layouts; and these layouts, each once."""
        movements = {}
        layouts: dict[Blocks, int] = {}

        def number(blocks: Blocks) -> int | None:
            anywhere = tuple(
                each if isinstance(each, int) else dataclasses.replace(each, start=0, stop=1)
                for each in blocks
            )
            return layouts.setdefault(anywhere, len(layouts)) if anywhere else None

        for name, blocks in self.blocks.items():
            sizes, rows, columns = plan_movement(self.shapes[name], blocks)
            movements[name] = (sizes, number(rows), number(columns))
        return movements, list(layouts)

    @cached_property
    def perm_to_axes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Per free factor the (tensor, axis) pairs that it moves."""
        found: dict[str, list[tuple[str, int]]] = {
            factor.name: [] for factor in self.factors if factor.free
        }
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
                steps = [
                    math.prod(shape[axis + 1 : block.stop])
                    for axis in range(block.start, block.stop)
                ]
                for term in block.terms:
                    for number, stride in term.grid:
                        if self.factors[number].free:
                            axis = next(i for i, step in enumerate(steps) if stride >= step)
                            axes[block.start + axis][self.factors[number].name] = None
            found[name] = tuple(tuple(each) for each in axes)
        return found
