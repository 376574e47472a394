"""Units have permutations of their own for each class that stays, only where it is known."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.changing_paths import Net, inputs
from helpers.model_zoo import build, collect, run
from helpers.zoo import DOUBLE, distance
from torch import nn

from opacus_shuffle.permutation import find_permutations

OWN, SHARED = {}, {}
own, shared = collect(OWN), collect(SHARED)


def weight(*shape):
    return nn.Parameter(torch.randn(shape))


def entered(net, x):
    """Of four inputs seven hidden units for each of three classes."""
    return torch.einsum("bi,jdi->bjd", x, net.enter)


def by_class(way):
    """A network between these units and a sum of them per class, with the bits of its group."""

    def forward(net, x):
        return torch.einsum("bjd,jd->bj", way(entered(net, x)), net.leave)

    return Net(forward, enter=weight(3, 7, 4), leave=weight(3, 7)), inputs((2, 4))[0]


def factorials(*sizes):
    return sum(math.lgamma(size + 1) for size in sizes) / math.log(2)


def along_classes(h):
    """Tells classes apart before anything else does."""
    return h * torch.tensor([1.0, 2, 3], dtype=h.dtype)[:, None]


@own
def units_of_classes():
    return *by_class(torch.relu), factorials(7, 7, 7)


@own
def two_layers_of_units_of_classes():
    def way(net, x):
        h = torch.relu(entered(net, x) + net.shift)
        h = torch.einsum("bjd,jde->bje", h, net.between).tanh()
        return torch.einsum("bje,je->bj", h, net.leave).log_softmax(-1)

    network = Net(
        way, enter=weight(3, 7, 4), shift=weight(3, 7), between=weight(3, 7, 5), leave=weight(3, 5)
    )
    return network, inputs((2, 4))[0], factorials(7, 7, 7, 5, 5, 5)


@own
def groups_of_channels_that_are_outputs():
    network = nn.Sequential(
        nn.Conv1d(2, 18, 3), nn.GroupNorm(3, 18), nn.ReLU(), nn.Conv1d(18, 3, 3, groups=3)
    )
    return network, inputs((2, 2, 9))[0], factorials(6, 6, 6)


@own
def depthwise_convolutions_of_inputs():
    network = nn.Sequential(
        nn.Conv1d(3, 15, 3, groups=3), nn.Tanh(), nn.Conv1d(15, 12, 1, groups=3), nn.ReLU()
    )
    return (
        nn.Sequential(*network, nn.Conv1d(12, 6, 1, groups=3)),
        inputs((2, 3, 9))[0],
        factorials(5, 5, 5, 4, 4, 4),
    )


@own
def capsules():
    def way(net, x):
        votes = torch.einsum("bic,ijcd->bijd", torch.tanh(x[..., None] * net.enter), net.votes)
        agreement = torch.zeros(votes.shape[:3], dtype=votes.dtype)
        for _ in range(3):
            sums = (torch.softmax(agreement, 2)[..., None] * votes).sum(1)
            sums = sums * sums.norm(dim=-1, keepdim=True) / (1 + (sums**2).sum(-1, keepdim=True))
            agreement = agreement + (votes * sums[:, None]).sum(-1)
        return sums.norm(dim=-1)

    return (
        Net(way, enter=weight(4, 6), votes=weight(4, 3, 6, 7)),
        inputs((2, 4))[0],
        factorials(6, 6, 6, 6, 7, 7, 7),
    )


@shared
def classes_reversed():
    return by_class(lambda h: torch.relu(h + h.flip(1)))


# Slices that are used one by one
# ------------------------------------------------------------------------------------------


def bank(way):
    """A network with three matrices of seven units and as many vectors, each in one parameter."""
    return Net(way, enter=weight(3, 7, 4), leave=weight(3, 7)), inputs((2, 4))[0]


def one(net, x, enter, leave):
    """Uses the units of one matrix and of one vector, by their numbers."""
    return torch.relu(x @ net.enter[enter].t()) @ net.leave[leave]


@shared
def experts_by_the_values_of_inputs():
    def way(net, x):
        return one(net, x, int(x.sum().abs()) % 3, int(x[0].sum().abs()) % 2)[:, None]

    return bank(way)


# Slices that an index chooses for each record
# ------------------------------------------------------------------------------------------


def routed(way):
    """The units of the expert that a gate chooses for each record, and a weighted sum.

    The way between may have the choice, the units, and the network.
    """

    def forward(net, x):
        choice = (x @ net.gate.t()).argmax(-1)
        h = torch.relu(torch.einsum("tdi,ti->td", net.enter[choice], x))
        return (way(choice, h, net) * net.leave[choice]).sum(-1, keepdim=True)

    network = Net(
        forward, enter=weight(3, 7, 4), leave=weight(3, 7), gate=weight(3, 4), shift=weight(3, 7)
    )
    return network, inputs((5, 4))[0]


@shared
def units_of_another_record():
    return routed(lambda choice, h, net: h.roll(1, 0) + net.shift[choice])


# What is found
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_each_position_has_permutations_of_its_own_where_it_is_known(name):
    module, sample = build(lambda: OWN[name]()[:2])
    assert find_permutations(module, sample).log2_size() == pytest.approx(OWN[name]()[2], rel=1e-12)


@pytest.mark.parametrize("name", SHARED)
def test_positions_share_a_permutation_where_an_operation_mixes_them(name):
    module, sample = build(SHARED[name])
    assert find_permutations(module, sample).log2_size() == pytest.approx(factorials(7), rel=1e-12)


@pytest.mark.parametrize("name", ["capsules", "two_layers_of_units_of_classes"])
def test_a_plan_for_each_class_keeps_the_outputs(name):
    module, sample = build(lambda: OWN[name]()[:2])
    spec, before = find_permutations(module, sample), run(module, 2 * sample)
    spec.apply_(module, spec.sample(torch.Generator().manual_seed(1)))
    assert distance(before, run(module, 2 * sample)) <= DOUBLE
