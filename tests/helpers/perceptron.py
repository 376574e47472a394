"""A small perceptron to put things into, and one with two results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.model_zoo import Wired
from opacus_shuffle.permutation import PermutationSpec

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *(middle or (nn.Tanh(),)), nn.Linear(6, 2))


def moving(spec: PermutationSpec) -> set[str]:
    return set(spec.blocks)


def two_heads(give: Callable[[torch.Tensor, torch.Tensor], Any]) -> nn.Module:
    """A network with two results, which ``give`` packs."""

    def way(net: Wired, x: torch.Tensor) -> Any:
        h = torch.tanh(net.body(x))
        return give(net.one(h), net.two(h))

    torch.manual_seed(0)
    return Wired(way, body=nn.Linear(4, 6), one=nn.Linear(6, 5), two=nn.Linear(6, 2))
