"""Other ways are followed as long as they cost about what the network does, and each of them once."""

from __future__ import annotations

import pytest
import torch
from helpers.perceptron import X, mlp
from torch import nn

from opacus_shuffle.permutation import find_permutations
from opacus_shuffle.permutation.discover import find_on_calls
from opacus_shuffle.permutation.finding import exploring
from opacus_shuffle.permutation.finding.trace import Tracer


class Sized(nn.Module):
    """Makes a tensor as long as a number says that it reads from the data; and counts its runs."""

    def __init__(self, read, make):
        super().__init__()
        self.net, self.read, self.make = mlp(), read, make
        self.sizes = set()

    def forward(self, x):
        made = self.make(x, max(1, int(self.read(x))))
        type(self).largest = max(type(self).largest, made.numel())
        return self.net(x) + made.flatten()[:2].sum()


MAKES = {
    "zeros": lambda x, n: torch.zeros(n, 1000),
    "like": lambda x, n: x.new_ones(n, 1000),
    "repeated": lambda x, n: x.repeat(n, 100),
    "range": lambda x, n: torch.arange(1000 * n),
    "padded": lambda x, n: nn.functional.pad(x, (0, 1000 * n)),
    "product": lambda x, n: torch.ones(1000, 1) @ torch.ones(1, n),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_number_from_the_data_makes_no_tensor_that_would_fill_the_memory(name, monkeypatch):
    monkeypatch.setattr(exploring, "MOST_ENTRIES", 10**6)
    monkeypatch.setattr(Sized, "largest", 0, raising=False)
    network = Sized(lambda x: x.abs().sum().item(), MAKES[name])
    spec = find_permutations(network, X)
    assert 1000 * int(X.abs().sum()) <= Sized.largest <= 10**6
    assert round(2 ** spec.log2_size()) == 720
    assert not spec.unreached


def test_samples_may_be_as_large_as_they_are(monkeypatch):
    monkeypatch.setattr(exploring, "MOST_ENTRIES", 10)
    monkeypatch.setattr(Sized, "largest", 0, raising=False)
    network = Sized(lambda x: len(x) + x[0, 0].item(), MAKES["zeros"])
    larger = X.repeat(100, 1)
    assert round(2 ** find_permutations(network, X, more_samples=[larger]).log2_size()) == 720
    assert Sized.largest >= 100 * 1000 * len(X)


def test_a_run_of_which_nothing_depends_on_values_is_traced_once(monkeypatch):
    traced = []
    watch = Tracer.watch
    monkeypatch.setattr(Tracer, "watch", lambda self, *args, **kwargs: (traced.append(args), watch(self, *args, **kwargs))[1])
    find_permutations(mlp(), X)
    alone = len(traced)
    find_permutations(mlp(), X, more_samples=[X + 1, 2 * X])
    assert len(traced) == 2 * alone
    find_permutations(mlp(), X, more_samples=[X[:2]])
    assert len(traced) > 3 * alone


class Turned(nn.Module):
    """Turns what it has computed in place where values say so, and then may fail."""

    def __init__(self, fails):
        super().__init__()
        self.net, self.fails = mlp(), fails

    def forward(self, x):
        h = self.net[0](x)
        if x.sum() > 1e6:
            turned = h.clone().t_()
            h = turned.cumsum(0).t() @ torch.ones(7, 1) if self.fails else turned.t()
        return self.net[2](self.net[1](h))


def test_what_turns_tensors_in_place_on_another_way_is_followed_if_it_can_be():
    assert round(2 ** find_permutations(Turned(fails=False), X).log2_size()) == 720
    with pytest.raises(ValueError, match="decides by values"):
        find_permutations(Turned(fails=True), X)


class Gated(nn.Module):
    """Goes through one more layer where a value says so, or where none does."""

    def __init__(self, by_values):
        super().__init__()
        self.net, self.more, self.by_values = mlp(), nn.Linear(4, 4), by_values

    def forward(self, x):
        return self.net(self.more(x) if self.by_values and x[0, 0] > 2 else x)


@pytest.mark.parametrize("by_values", [False, True])
def test_other_records_are_traced_where_values_decide_and_only_there(by_values, monkeypatch):
    traced = []
    watch = Tracer.watch
    monkeypatch.setattr(Tracer, "watch", lambda self, *args, **kwargs: (traced.append(args), watch(self, *args, **kwargs))[1])
    find_on_calls(Gated(by_values), [((X,), {})], "residual")
    alone = len(traced)
    find_on_calls(Gated(by_values), [((X,), {})], "residual", others=[((torch.cat([3 + X, X]),), {})])
    assert (len(traced) > 2 * alone) == by_values


class Counting(nn.Module):
    """Moves its units apart from its second call on."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += 1
        hidden = self.net[1](self.net[0](x))
        return self.net[2](hidden.cumsum(1) if self.calls > 1 else hidden)


def test_what_a_network_does_in_later_calls_alone_is_traced_though_its_first_call_depends_on_nothing():
    with pytest.raises(ValueError, match="cumsum"):
        find_on_calls(Counting(), [((X,), {})], "residual", others=[((X + 1,), {})])
