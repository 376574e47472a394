"""What is found around layers of six units, between one that makes them and one of seven."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from helpers.hand_written_groups import symmetric
from helpers.model_zoo import Apply
from helpers.zoo import DOUBLE
from opacus_shuffle.permutation import find_permutations

HIDDEN, NEXT = 6, 7
FREE, STAYS = symmetric(HIDDEN) + symmetric(NEXT), symmetric(NEXT)
"""Sizes of the group if the six units move, and if they stay."""


@torch.no_grad()
def bits_between(*middle: nn.Module | Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The size of what is found around these layers of six units, checked on other inputs."""
    torch.manual_seed(0)
    layers = [part if isinstance(part, nn.Module) else Apply(part) for part in middle]
    front = nn.Sequential(nn.Linear(5, HIDDEN), nn.Tanh(), *layers).double()
    inputs, others = torch.randn(4, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    network = nn.Sequential(
        front, nn.Linear(front(inputs).shape[-1], NEXT), nn.Tanh(), nn.Linear(NEXT, 3)
    ).double()
    spec = find_permutations(network, inputs)
    moved = copy.deepcopy(network)
    spec.apply_(moved, spec.sample(torch.Generator().manual_seed(1)))
    torch.testing.assert_close(moved(others), network(others), rtol=DOUBLE, atol=DOUBLE)
    return spec.log2_size()
