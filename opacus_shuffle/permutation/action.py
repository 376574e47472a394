"""Moving a network by a group of permutations: which tensors move, and what goes with them."""

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
from opacus_shuffle.permutation.moving.layout import Block, Blocks, index_vector, plan_movement
from opacus_shuffle.permutation.moving.torch_moves import Move


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
        """Moves parameters, buffers and gradients, and the optimizer's state, in place.

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
        present |= module.named_buffers(remove_duplicate=False)
        if any(name not in present for name in self.blocks):
            present = {plain_name(name): tensor for name, tensor in present.items()}
        for name, shape in self.shapes.items():
            tensor = present.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
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
        """Returns by name the tensor, its gradient, and the optimizer's state of the same shape.

        Raises:
            ValueError: If one of them cannot follow a permutation.
        """
        followers = {}
        for name, tensor in tensors.items():
            followers[name] = [tensor]
            if tensor.grad is not None:
                if tensor.grad.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of {name} is sparse, which cannot follow a permutation: use "
                        "dense gradients"
                    )
                followers[name].append(tensor.grad)
            state = {} if optimizer is None else optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    form = f"of shape {tuple(value.shape)}"
                    fits = value.dim() == 0 or value.shape == tensor.shape
                    followers[name] += [value] if value.dim() else []
                else:
                    form = f"as a {type(value).__name__}"
                    fits = not isinstance(value, list | tuple | dict)
                if not fits:
                    raise ValueError(
                        f"optimizer {type(optimizer).__name__} keeps {key!r} {form} for {name} of "
                        f"shape {tuple(tensor.shape)}, "
                        "which cannot follow a permutation: use one with state of the same shape, "
                        "such as SGD, Adam, AdamW or "
                        "RMSprop"
                    )
        return followers

    def move(self, tensors: Mapping[str, Iterable[torch.Tensor]], plan: PermutationPlan) -> None:
        """Moves tensors of the shapes of the named ones, all in as few launches as possible."""
        self.check_plan(plan)
        named = [(name, tensor) for name, group in tensors.items() for tensor in group]
        wanted = {layout for name in tensors for layout in self._movements[name][1:] if layout}
        indices = {layout: index_vector(layout, self.factors, plan.tables) for layout in wanted}
        on_device: dict[torch.device, dict[Blocks, torch.Tensor]] = {torch.device("cpu"): indices}
        for device in {tensor.device for _, tensor in named} - on_device.keys():
            # One copy for all of them, out of pinned memory, so that the host does not wait.
            together = torch.cat([torch.empty(0, dtype=torch.int64), *indices.values()]).to(
                torch.int32
            )
            together = together.pin_memory() if device.type == "cuda" else together
            moved = together.to(device, non_blocking=True)
            parts = torch.split(moved, list(map(len, indices.values())))
            on_device[device] = dict(zip(indices, parts, strict=True))
        moves = []
        for name, tensor in named:
            sizes, rows, columns = self._movements[name]
            here = on_device[tensor.device]
            moves.append(Move(tensor, *sizes, here.get(rows), here.get(columns)))
        gather_(moves)

    @cached_property
    def _movements(self) -> dict[str, tuple[tuple[int, int, int], Blocks, Blocks]]:
        """Per tensor its sizes for one pass, and how its rows and columns are laid out."""
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
            movements[name] = (sizes, rows, columns)
        return movements

    @cached_property
    def perm_to_axes(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Per free factor the (tensor, axis) pairs that it moves."""
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
        """Per tensor and axis the free factors that move it."""
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
