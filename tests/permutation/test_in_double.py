"""Weights kept in single precision compute, bit by bit, what they do in double precision, and take half the memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from opacus_shuffle.permutation import find_permutations
from opacus_shuffle.permutation.in_double import PerturbedWeights

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class Queries(nn.Module):
    """Attention of learned queries: PyTorch wants them of the same type as keys."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 8))
        self.keys = nn.Linear(8, 8)

    def forward(self, x):
        keys = self.keys(x)
        found = torch.zeros(len(x), 2, 8, dtype=self.queries.dtype)
        found[:] = functional.scaled_dot_product_attention(self.queries.expand(len(x), -1, -1), keys, keys)
        return found


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Signs(nn.Module):
    def forward(self, x):
        return (x > 0).long()


class Clamped(nn.Linear):
    """Writes to its own weight."""

    def forward(self, x):
        self.weight.data[0].clamp_(-0.1, 0.1)
        return super().forward(x)


NETWORKS = {
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "queries": Queries,
    "recurrent": lambda: Recurrent(8, 6, 2, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(5, 6, 3), nn.GroupNorm(2, 6), nn.PReLU()),
    "embedding": lambda: nn.Sequential(Signs(), nn.Embedding(2, 6), nn.Linear(6, 3)),
    "normalised weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
}


def perturbed(network):
    return PerturbedWeights(network, torch.Generator().manual_seed(1), buffers=True)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("training", [False, True])
def test_weights_in_single_precision_compute_what_they_do_in_double(name, training):
    torch.manual_seed(0)
    network = NETWORKS[name]()
    weights = perturbed(network)
    found = weights.run(((X,), {}), training=training)
    assert {weights.stored[key].dtype for key, _ in network.named_parameters()} == {torch.float32}
    assert weights.widen()
    assert {weights.stored[key].dtype for key, _ in network.named_parameters()} == {torch.float64}
    assert all(map(torch.equal, found, weights.run(((X,), {}), training=training)))


def test_weights_that_are_written_to_are_kept_in_double():
    network = Clamped(8, 4)
    before = network.weight.clone()
    weights = perturbed(network)
    (found,) = weights.run(((X,), {}), training=True)
    assert weights.stored["weight"].dtype == torch.float64
    assert weights.stored["weight"][0].abs().max() <= 0.1
    assert torch.equal(found, functional.linear(X.double(), weights.stored["weight"], weights.stored["bias"]))
    assert torch.equal(network.weight, before)


def test_weights_returned_as_they_are_come_in_double():
    class Kept(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    assert {each.dtype for each in perturbed(Kept(8, 4)).run(((X,), {}), training=False)} == {torch.float64}


def test_a_network_whose_rounding_is_large_is_not_refused():
    """What is left of numbers around 1e9 but for their whole part: rounding alone moves it by some 1e-7."""

    class Cancelling(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)

        def forward(self, x):
            y = self.second(self.first(x).relu() * 1e9 + 1e9)
            return y - y.round()

    assert round(2 ** find_permutations(Cancelling(), X).log2_size()) == 720
