"""What a PermutationSpec says about itself: orbits, fractions that move, tables."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.model_zoo import Wired, entry_moves
from helpers.zoo import VARIED, draw, spec_of
from torch import nn

from opacus_shuffle.permutation import find_permutations


@pytest.mark.parametrize("name", VARIED)
def test_the_two_tables_say_the_same_and_the_description_names_every_group(name):
    spec = spec_of(name)
    forth = {(group, key, axis) for group, axes in spec.perm_to_axes.items() for key, axis in axes}
    back = {
        (group, key, axis)
        for key, axes in spec.axes_to_perm.items()
        for axis, groups in enumerate(axes)
        for group in groups
    }
    assert forth == back
    assert all(group in spec.describe() for group in spec.perm_to_axes)


def test_the_smallest_orbit_is_one_where_a_part_of_a_tensor_stays():
    def skipping(net, x):
        return net.out(torch.cat([net.hidden(x).relu(), x], 1))

    network = Wired(skipping, hidden=nn.Linear(4, 6), out=nn.Linear(10, 2))
    spec = find_permutations(network, torch.zeros(2, 4))
    assert (spec.smallest_orbit("out.weight"), spec.moved_fraction("out.weight")) == (1, 0.6)
    assert (spec.smallest_orbit("hidden.weight"), spec.smallest_orbit("no such tensor")) == (6, 1)


def test_orbits_are_those_of_sampled_permutations_where_one_factor_moves_both_axes():
    def way(net, x):
        x = net.enter(x)
        return net.leave(x + torch.relu(net.square(x)))

    layers = {"enter": nn.Linear(4, 6), "square": nn.Linear(6, 6), "leave": nn.Linear(6, 2)}
    network = Wired(way, **layers)
    spec = find_permutations(network, torch.zeros(2, 4))
    reached = {
        name: [set() for _ in range(math.prod(shape))] for name, shape in spec.shapes.items()
    }
    for seed in range(200):
        moves = entry_moves(spec, network, draw(spec, seed))
        for name, positions in reached.items():
            for position, origin in enumerate(moves[name].flatten().tolist()):
                positions[origin].add(position)
    for name, positions in reached.items():
        assert spec.smallest_orbit(name) == min(map(len, positions))
    assert spec.smallest_orbit("square.weight") == 6
