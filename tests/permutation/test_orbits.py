"""An orbit is the places that an entry can get to."""

from __future__ import annotations

import math

import torch
from torch import nn

from opacus_shuffle.permutation import find_permutations


def test_the_smallest_orbit_is_one_where_some_entry_stays():
    spec = find_permutations(
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), torch.zeros(2, 8)
    )
    assert {name: spec.smallest_orbit(name) for name in spec.shapes} == dict.fromkeys(
        spec.shapes, 6
    )
    assert spec.smallest_orbit("no such tensor") == 1


def test_the_smallest_orbit_is_one_where_a_part_of_a_tensor_stays():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = nn.Linear(4, 6), nn.Linear(10, 2)

        def forward(self, x):
            return self.out(torch.cat([self.hidden(x).relu(), x], 1))

    spec = find_permutations(Skipping(), torch.zeros(2, 4))
    assert spec.smallest_orbit("out.weight") == 1
    assert spec.moved_fraction("out.weight") == 0.6


class Residual(nn.Module):
    """One weight that the same permutation moves by rows and by columns."""

    def __init__(self):
        super().__init__()
        self.a, self.w, self.b = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.a(x)
        return self.b(x + torch.relu(self.w(x)))


def test_orbits_are_those_of_sampled_permutations_where_one_factor_moves_both_axes():
    network = Residual()
    spec = find_permutations(network, torch.zeros(2, 4))
    generator = torch.Generator().manual_seed(0)
    reached = {
        name: [{place} for place in range(math.prod(shape))] for name, shape in spec.shapes.items()
    }
    for _ in range(200):
        other = Residual()
        with torch.no_grad():
            for tensor in spec.tensors(other).values():
                tensor.copy_(torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape))
        spec.apply_(other, spec.sample(generator))
        for name, tensor in spec.tensors(other).items():
            for place, origin in enumerate(tensor.flatten().int().tolist()):
                reached[name][origin].add(place)
    for name, places in reached.items():
        sizes = [len(reachable) for reachable in places]
        assert spec.smallest_orbit(name) == min(sizes)
    assert spec.smallest_orbit("w.weight") == 6
