"""What a PermutationSpec says about itself: fractions that move, tables."""

from __future__ import annotations

import pytest
import torch
from helpers.model_zoo import entry_moves
from helpers.zoo import (
    VARIED,
    entry,
    some_networks,
    spec_of,
)


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


@some_networks
def test_what_counts_as_movable_moves_and_nothing_else(name):
    module, spec = entry(name)[0], spec_of(name)
    ever = {
        key: torch.zeros(parameter.shape, dtype=torch.bool)
        for key, parameter in module.named_parameters()
    }
    for seed in range(
        30
    ):  # an entry that one swap moves stays put in all 30 draws with chance 1e-9
        moves = entry_moves(spec, module, spec.sample(torch.Generator().manual_seed(seed)))
        for key, origin in moves.items():
            ever[key] |= origin != torch.arange(origin.numel()).view(origin.shape)
    assert all(
        torch.equal(origin.flatten().sort().values, torch.arange(origin.numel()))
        for origin in moves.values()
    )
    for key, moved in ever.items():
        assert spec.moved_fraction(key) == pytest.approx(float(moved.double().mean()), abs=1e-12), (
            key
        )
    total = sum(moved.numel() for moved in ever.values())
    assert spec.shuffle_ratio(module) == pytest.approx(
        sum(int(moved.sum()) for moved in ever.values()) / total, abs=1e-12
    )
