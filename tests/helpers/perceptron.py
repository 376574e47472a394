"""A small perceptron to put things into, and one with two results."""

from __future__ import annotations

import torch
from torch import nn

from opacus_shuffle.permutation import PermutationSpec

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *(middle or (nn.Tanh(),)), nn.Linear(6, 2))


def moving(spec: PermutationSpec) -> set[str]:
    return set(spec.blocks)


class Heads(nn.Module):
    """Two results; ``give`` says how they are returned."""

    def __init__(self, give):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.two, self.give = (
            nn.Linear(4, 6),
            nn.Linear(6, 5),
            nn.Linear(6, 2),
            give,
        )

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.give(self.one(h), self.two(h))


class Result:
    def __init__(self, logits, value):
        self.logits, self.value = logits, value
