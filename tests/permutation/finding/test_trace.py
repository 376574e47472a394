"""Values that leave PyTorch keep their axes in place, and say so."""

from __future__ import annotations

import torch
from helpers.perceptron import X, mlp
from torch import nn

from opacus_shuffle.permutation import find_permutations


def test_values_that_leave_pytorch_keep_their_axes_in_place_and_the_others_move():
    class Leaving(nn.Module):
        def forward(self, x):
            return torch.tensor(x.tolist(), dtype=x.dtype)

    spec = find_permutations(nn.Sequential(*mlp(Leaving(), nn.ReLU())[:-1], nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), X)
    assert round(2 ** spec.log2_size()) == 120
    assert "Tensor.tolist" in spec.describe()
