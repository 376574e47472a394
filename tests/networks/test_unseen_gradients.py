"""Ghost clipping refuses gradients that no layer sees; looking leaves no trace."""

from __future__ import annotations

import pytest
import torch
from helpers.toy import make_toy, run_epoch
from opacus.layers import DPLSTM
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine


class Tied(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.first, self.last, self.tie = nn.Linear(5, 5), nn.Linear(5, 3), tie

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(F.linear(hidden, self.first.weight) if self.tie else hidden)


def private(module, mode, **changes):
    toy = make_toy() | {"module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)} | changes
    engine = PrivacyEngine(accountant="subsampled_shuffle")
    made = engine.make_private(**toy, noise_multiplier=1.0, grad_sample_mode=mode)
    return engine, (made[0], made[1], made[-1], made[2] if mode == "ghost" else None)


def assert_trains(module, mode, **changes):
    """An epoch is accounted step by step, and moves every parameter that is to be trained, and no other."""
    engine, made = private(module, mode, **changes)
    before = [each.detach().clone() for each in module.parameters()]
    run_epoch(*made)
    assert len(engine.accountant) == 4
    for each, start in zip(module.parameters(), before, strict=True):
        assert torch.equal(each, start) != each.requires_grad
        assert each.isfinite().all()


def test_a_weight_used_beside_its_layer_is_refused_with_ghost_clipping_alone():
    with pytest.raises(ValueError, match=r"module uses first.weight beside the layer"):
        private(Tied(tie=True), "ghost")
    assert_trains(Tied(tie=True), "hooks")
    network = Tied(tie=True)
    network.first.weight.requires_grad_(False)
    assert_trains(network, "ghost")


def test_layers_that_see_all_are_trained():
    assert_trains(Tied(tie=False), "ghost")


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(9, 4, padding_idx=0), DPLSTM(4, 6, batch_first=True), nn.Linear(6, 3)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout()

    def forward(self, x):
        return self.head(self.drop(self.norm(self.cell(self.words(x))[0]))).softmax(-1).mean(1)


def test_padded_texts_are_trained():
    data = DataLoader(TensorDataset(torch.randint(0, 3, (24, 6)), torch.randint(3, (24,))), batch_size=6)
    assert_trains(Text(), "ghost", data_loader=data)
