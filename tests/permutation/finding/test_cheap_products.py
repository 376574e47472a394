"""Products are left out only of runs in which nobody asks for a value that comes of them."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.perceptron import X, mlp
from torch import nn

from opacus_shuffle.permutation import find_permutations
from opacus_shuffle.permutation.finding.cheap_products import Frugal, LeftOutProducts, ValuesMatterError, cheap_products
from opacus_shuffle.permutation.finding.exploring import Explorer


def swallowed(h):
    try:
        return h * float(h.sum())
    except ValuesMatterError:
        return h


def through_a_view(h):
    kept = torch.zeros(2, len(h))
    first, second = kept[0], kept[1]
    first.copy_(h.sum(1))
    return h * bool(kept[:, 0].any()) + second[:, None]


ASKING = {
    "item": lambda h: h * h.sum().item(),
    "decision": lambda h: h if h.max() > h.min() else -h,
    "mask": lambda h: h.clone().index_add(0, torch.arange(len(h))[h[:, 0] != 0], h[h[:, 0] != 0]),
    "array": lambda h: h + torch.from_numpy(h.detach().numpy().copy()),
    "list": lambda h: h * h[0].tolist()[0],
    "swallowed": swallowed,
    "through a view": through_a_view,
    "through a parameter": lambda h: h if bool((nn.Parameter(h.detach()) != 0).any()) else -h,
    "failing": lambda h: torch.linalg.inv(h.T @ h + 1e-3 * torch.diag(h[0] ** 2)),
}


class Asking(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.ask = ask
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        return self.ask(self.net(x)).contiguous()


@pytest.mark.parametrize("name", ASKING)
def test_a_run_that_asks_for_values_is_done_in_full(name):
    network = Asking(ASKING[name])
    with torch.no_grad():
        assert torch.equal(Frugal(network)(lambda: network(X)), network(X))


@pytest.mark.parametrize("name", [name for name in ASKING if name != "failing"])
def test_whoever_asks_for_values_is_told_that_they_matter(name):
    network = Asking(ASKING[name])
    with torch.no_grad(), pytest.raises(ValuesMatterError), cheap_products(LeftOutProducts(network.parameters())):
        network(X)


def test_products_that_nobody_reads_are_not_computed():
    network = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Unflatten(1, (3, 2)), nn.Conv1d(3, 5, 2))
    with torch.no_grad():
        left_out = Frugal(network)(lambda: network(X))
        assert left_out.shape == network(X).shape
        assert left_out.stride() == network(X).stride()
        assert not left_out.any()


@functools.cache
def angles(length):
    """A table that Python keeps for a length."""
    return torch.arange(length)[:, None].float() @ torch.ones(1, 3)


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.first(x) * angles(x.shape[1]).cos()).mean(1)


def test_products_without_weights_are_computed_for_python_may_keep_them():
    angles.cache_clear()
    find_permutations(Turning(), torch.randn(2, 12, 4))
    assert angles.cache_info().currsize > 1
    for length in range(100):
        assert torch.equal(angles(length), torch.arange(length)[:, None].float().expand(length, 3))


def test_products_with_what_is_made_of_weights_are_not_computed():
    network = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6, bias=False))
    with torch.no_grad():
        assert not Frugal(network)(lambda: network(X)).any()


def test_decisions_by_products_are_taken_both_ways_as_before():
    class Deciding(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.other = mlp(), mlp()

        def forward(self, x):
            return self.first(x) if self.first(x).sum() > self.first(-x).sum() else self.other(x).cumsum(1)

    spec = find_permutations(Deciding(), X)
    assert list(spec.decisions.values()) == [2]
    assert not spec.unreached
    assert round(2 ** spec.log2_size()) == 720**2


def test_masks_that_dropout_draws_are_learnt_before_other_ways_are_looked_for(monkeypatch):
    """They are filled after they are made, which every further run would have to learn anew."""
    explored = []
    explore = Explorer.explore
    monkeypatch.setattr(Explorer, "explore", lambda self, call: (explored.append(call), explore(self, call)))
    find_permutations(mlp(nn.Dropout(0.1)), X)
    assert len(explored) == 1


IMPOSSIBLE = {
    "channels": (nn.ConvTranspose1d(4, 6, 3), torch.zeros(2, 2, 8)),
    "channels of groups": (nn.Conv1d(4, 6, 3, groups=2), torch.zeros(2, 2, 8)),
    "type": (nn.Conv1d(4, 6, 3), torch.zeros(2, 4, 8, dtype=torch.float64)),
    "shape": (nn.Linear(4, 6), torch.zeros(2, 5)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_is_not_possible_stays_impossible(name):
    layer, x = IMPOSSIBLE[name]
    with torch.no_grad(), pytest.raises(RuntimeError), cheap_products(LeftOutProducts(layer.parameters())):
        layer(x)


def test_a_transposed_convolution_that_comes_first_is_no_reason_to_refuse():
    network = nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 2, 1))
    assert round(2 ** find_permutations(network, torch.randn(3, 4, 8)).log2_size()) == 720
