"""Networks are moved with all that belongs to them, or refused before anything moves."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from helpers.model_zoo import another, build, entry_moves, gradients, run
from helpers.zoo import (
    DOUBLE,
    VARIED,
    ZOO,
    distance,
    draw,
    entry,
    same,
    spec_of,
    tiered,
)
from opacus import GradSampleModule

from opacus_shuffle.permutation import find_permutations


@pytest.mark.parametrize(
    "name", [*tiered(name for name in ZOO if name != "batch_norm"), "batch_norm"]
)
def test_named_axes_and_entries_that_count_as_movable_move_and_no_others(name):
    """What one swap moves stays put in all 20 draws with chance 1e-6."""
    module, spec = entry(name)[0], spec_of(name)
    names = spec.axes_to_perm
    ever: Counter[tuple[str, int]] = Counter()
    moved = {key: torch.zeros(p.shape, dtype=torch.bool) for key, p in module.named_parameters()}
    for seed in range(20):
        for key, origin in entry_moves(spec, module, draw(spec, seed)).items():
            places = torch.arange(origin.numel()).view(origin.shape)
            moved[key] |= origin != places
            assert torch.equal(origin.flatten().sort().values, places.flatten())
            for axis, old in enumerate(torch.unravel_index(origin, origin.shape)):
                size = origin.shape[axis]
                here = torch.arange(size).view(
                    [size if i == axis else 1 for i in range(origin.dim())]
                )
                ever[key, axis] += not torch.equal(old, here.expand_as(old))
    for (key, axis), times in ever.items():
        assert bool(names[key][axis] if key in names else ()) == (times > 0), (key, axis)
    for key, entries in moved.items():
        share = float(entries.double().mean())
        assert spec.moved_fraction(key) == pytest.approx(share, abs=1e-12), key
    moving = torch.cat([entries.flatten() for entries in moved.values()])
    ratio = float(moving.double().mean())
    assert spec.shuffle_ratio(module) == pytest.approx(ratio, abs=1e-12)


@pytest.mark.parametrize("name", [*VARIED, "batch_norm", "nano_gpt"])
def test_a_specification_serves_every_instance_of_the_architecture(name):
    spec = spec_of(name)
    module, sample = build(ZOO[name], seed=9)
    shuffled = copy.deepcopy(module)
    spec.apply_(shuffled, draw(spec, 0))
    with torch.no_grad():
        assert distance(run(module, sample), run(shuffled, sample)) <= DOUBLE


# WS Section VI-B prints ‖ΔW‖ = 1063.02 of a ViT, whose weights then have a norm of about 752.
def test_a_shuffle_moves_weights_by_the_root_of_two_of_their_norm():
    network = torch.nn.Sequential(
        torch.nn.Linear(60, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 60)
    )
    before = torch.nn.utils.parameters_to_vector(network.parameters()).clone()
    spec = find_permutations(network, torch.zeros(1, 60))
    spec.apply_(network, spec.sample(torch.Generator().manual_seed(0)))
    after = torch.nn.utils.parameters_to_vector(network.parameters())
    # 240,000 products of independent entries: their sum is 0.002 of the norm's square; one in 2000
    # units stays where it is, and so do the 60 outputs' biases.
    assert float(((after - before).norm() / before.norm()).detach()) == pytest.approx(
        2**0.5, abs=0.005
    )


def test_memory_layout_does_not_matter():
    (module, sample), spec = entry("conv_net"), spec_of("conv_net")
    shuffled = copy.deepcopy(module).to(memory_format=torch.channels_last)
    spec.apply_(shuffled, draw(spec, 0))
    with torch.no_grad():
        assert distance(run(module, sample), run(shuffled, sample)) <= DOUBLE


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-2
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, centered=False, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, eps=1e-4),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "name", ["resnet", "mixture_of_experts", pytest.param("timm_vit", marks=pytest.mark.zoo)]
)
def test_training_a_shuffled_network_and_undoing_it_is_training(name, optimizer):
    """Rounding reaches weights times lr/eps, at most 10: five steps stay far below 1e-12."""
    (module, sample), spec = entry(name), spec_of(name)

    def train(plan=None):
        network = copy.deepcopy(module)
        method = OPTIMIZERS[optimizer](network.parameters())
        for step in range(5):
            if step == 2 and plan is not None:
                spec.apply_(network, plan, method)
            gradients(network, another(sample, seed=step))
            method.step()
        if plan is not None:
            spec.apply_(network, spec.invert(plan), method)
        state = [
            value
            for p in network.parameters()
            for value in method.state[p].values()
            if torch.is_tensor(value)
        ]
        return (
            list(network.parameters()),
            [p.grad for p in network.parameters()],
            [*state, torch.ones(1)],
        )

    for plain, undone in zip(train(), train(draw(spec, 5)), strict=True):
        assert distance(plain, undone) <= DOUBLE


def test_state_that_cannot_follow_is_refused_before_anything_moves():
    (module, sample), spec = entry("mlp"), spec_of("mlp")
    module = copy.deepcopy(module)
    optimizer = torch.optim.Adafactor(module.parameters())
    gradients(module, sample)
    optimizer.step()
    before = copy.deepcopy(module)
    with pytest.raises(ValueError, match=r"Adafactor.*row_var"):
        spec.apply_(module, draw(spec, 0), optimizer)
    assert same(before, module)


def test_names_of_wrappers_are_seen_through():
    (module, sample), spec = entry("resnet"), spec_of("resnet")
    wrapped = GradSampleModule(copy.deepcopy(module))
    spec.apply_(wrapped, draw(spec, 0))
    with torch.no_grad():
        assert distance(run(module, sample), run(wrapped, sample)) <= DOUBLE
    assert spec.shuffle_ratio(wrapped) == spec.shuffle_ratio(module)


@pytest.mark.parametrize("other", ["gated_linear_units", "conv_net"])
def test_networks_that_do_not_fit_are_refused_by_parameter(other):
    with pytest.raises(ValueError, match=r"0\.weight"):
        spec_of("mlp").apply_(copy.deepcopy(entry(other)[0]), draw(spec_of("mlp"), 0))


@pytest.mark.parametrize("entry", [-1, 6])
def test_a_plan_that_leads_out_of_a_tensor_is_refused_before_it_moves_memory(entry):
    network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    spec = find_permutations(network)
    plan = spec.sample()
    next(table for table in plan.tables if table is not None)[..., 3] = entry
    with pytest.raises(ValueError, match=r"outside of \[0, 6\)"):
        spec.apply_(network, plan)
