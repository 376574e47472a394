"""Units have a permutation of their own for each class only where the class is known."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.changing_paths import inputs
from helpers.model_zoo import Wired, build, collect, run
from helpers.zoo import DOUBLE, distance
from torch import nn

from opacus_shuffle.permutation import find_permutations

CASES = {}
case = collect(CASES)


def factorials(*sizes):
    return sum(math.lgamma(size + 1) for size in sizes) / math.log(2)


def by_class(activation):
    """Seven hidden units for each of three classes, and their sums by class."""

    def way(net, x):
        hidden = activation(torch.einsum("bi,jdi->bjd", x, net.enter))
        return torch.einsum("bjd,jd->bj", hidden, net.leave)

    return Wired(way, enter=torch.randn(3, 7, 4), leave=torch.randn(3, 7)), inputs((2, 4))[0]


@case
def units_of_classes():
    return *by_class(torch.relu), factorials(7, 7, 7)


@case
def units_of_classes_that_are_mixed():
    return *by_class(lambda h: torch.relu(h + h.flip(1))), factorials(7)


@case
def two_layers_of_units_of_classes():
    def way(net, x):
        h = torch.relu(torch.einsum("bi,jdi->bjd", x, net.enter) + net.shift)
        h = torch.einsum("bjd,jde->bje", h, net.between).tanh()
        return torch.einsum("bje,je->bj", h, net.leave).log_softmax(-1)

    shapes = {"enter": (3, 7, 4), "shift": (3, 7), "between": (3, 7, 5), "leave": (3, 5)}
    network = Wired(way, **{name: torch.randn(shape) for name, shape in shapes.items()})
    return network, inputs((2, 4))[0], factorials(7, 7, 7, 5, 5, 5)


@case
def groups_of_channels_that_are_outputs():
    layers = [nn.Conv1d(2, 18, 3), nn.GroupNorm(3, 18), nn.ReLU(), nn.Conv1d(18, 3, 3, groups=3)]
    return nn.Sequential(*layers), inputs((2, 2, 9))[0], factorials(6, 6, 6)


@case
def depthwise_convolutions_of_inputs():
    layers = [nn.Conv1d(3, 15, 3, groups=3), nn.Tanh(), nn.Conv1d(15, 12, 1, groups=3)]
    layers += [nn.ReLU(), nn.Conv1d(12, 6, 1, groups=3)]
    return nn.Sequential(*layers), inputs((2, 3, 9))[0], factorials(5, 5, 5, 4, 4, 4)


@pytest.mark.parametrize("name", CASES)
def test_each_class_has_a_permutation_of_its_own_and_outputs_stay(name):
    module, sample = build(lambda: CASES[name]()[:2])
    spec, before = find_permutations(module, sample), run(module, 2 * sample)
    assert spec.log2_size() == pytest.approx(CASES[name]()[2], rel=1e-12)
    spec.apply_(module, spec.sample(torch.Generator().manual_seed(1)))
    assert distance(before, run(module, 2 * sample)) <= DOUBLE
