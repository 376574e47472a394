"""What adversaries read off a run whose weights are shuffled: of each step its permuted gradient, or the weights around it."""

from __future__ import annotations

import dataclasses

import torch
from opacus.optimizers import DPOptimizer
from torch import nn

from opacus_shuffle.audit.alignment import Aligner
from opacus_shuffle.engine.weights.optimizers import innermost
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec


@dataclasses.dataclass(eq=False)
class ReleasedWeights:
    """Reads off shuffled weights what an adversary can, step after step, and how much of it is right."""

    network: nn.Module
    optimizer: DPOptimizer
    shuffler: WeightShuffler
    name: str
    parameter: torch.Tensor
    place: tuple[int, ...]

    def __post_init__(self) -> None:
        self._align = Aligner(self.shuffler.spec)
        self.orbit = orbit(self.shuffler.spec, self.name, self.parameter, self.place)
        groups = innermost(self.optimizer).param_groups
        self._group = next(group for group in groups if any(each is self.parameter for each in group["params"]))
        self._before = self._weights()
        self._drawn: PermutationPlan | None = None
        self.largest: list[float] = []
        self.differences: list[float] = []
        self.recovered: list[float] = []

    def __enter__(self) -> ReleasedWeights:
        # Notes the permutations from now on: the auditor needs the truth, the adversary does not get it.
        draw = self.shuffler._draw

        def noted() -> PermutationPlan:
            self._drawn = draw()
            return self._drawn

        self.shuffler._draw = noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self.shuffler.__dict__.pop("_draw", None)

    def look(self, background: float) -> None:
        """Notes one step's scores."""
        assert self._drawn is not None
        assert self.parameter.grad is not None
        optimizer = self.optimizer
        mean = optimizer.loss_reduction == "mean"
        scale = float(optimizer.expected_batch_size * optimizer.accumulated_iterations) if mean else 1.0
        # The shuffler has permuted the gradient with the weights; among all places it may have got to the largest stays.
        self.largest.append(float(self.parameter.grad[self.orbit].max()) * scale)
        after = self._weights()
        alignment = self._align(self._before, after)
        undone = alignment.undo({self.name: after[self.name]})[self.name]
        step = float(self._before[self.name][self.place] - undone[self.place])
        self.differences.append(step / self._group["lr"] * scale - background)
        self.recovered.append(alignment.recovered(self._drawn))
        self._before = after

    def _weights(self) -> dict[str, torch.Tensor]:
        """What is released: a copy."""
        tensors = dict(self.shuffler.spec.tensors(self.network))
        tensors.setdefault(self.name, self.parameter)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def orbit(spec: PermutationSpec, name: str, tensor: torch.Tensor, place: tuple[int, ...]) -> torch.Tensor:
    """Returns the places that a tensor's entry can get to under the group, as a mask."""
    reached = torch.zeros(tensor.shape)
    reached[place] = 1
    generator = torch.Generator().manual_seed(0)  # any permutations will do
    for _ in range(64 if name in spec.blocks else 0):  # then it is complete but for a chance of 2^-64
        moved = reached.clone()
        spec.move({name: [moved]}, spec.sample(generator))
        reached = torch.maximum(reached, moved)
    return reached.bool().to(tensor.device)
