"""A PermutationSpec: uniform draws, the laws of a group, what moves, and its description.

Networks are moved together with their optimizers, or refused before anything moves.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from helpers.model_zoo import Wired, another, build, entry_moves, gradients, run
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
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from scipy.stats import chi2
from torch import nn

from opacus_shuffle.permutation import find_permutations

# Draws
# ------------------------------------------------------------------------------------------


def two_heads(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q, k, v = m.qkv(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
    return m.out((torch.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).flatten(2))


def grouped_queries(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (
        layer(x).view(*x.shape[:2], h, -1).transpose(1, 2)
        for layer, h in ((m.q, 4), (m.k, 2), (m.v, 2))
    )
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return m.out((torch.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).flatten(2))


def one_step(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = m.into(x)
    return m.out(x + torch.relu(m.step(x)))


SENTENCE, IMAGE, VECTOR = (2, 3, 5), (2, 1, 4, 4), (2, 5)
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, int]] = {
    "three units": (
        lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)),
        VECTOR,
        "paper",
        6,
    ),
    "two layers": (
        lambda: nn.Sequential(
            nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)
        ),
        VECTOR,
        "residual",
        6 * 2,
    ),
    "two groups of three channels": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2)
        ),
        IMAGE,
        "heads",
        6**2 * 2,
    ),
    "three units of two pieces": (
        lambda: nn.Sequential(
            nn.Linear(5, 6),
            nn.Unflatten(1, (3, 2)),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(3, 2),
        ),
        VECTOR,
        "residual",
        6,
    ),
    "two heads": (
        lambda: Wired(two_heads, qkv=nn.Linear(5, 12), out=nn.Linear(4, 2)),
        SENTENCE,
        "heads",
        2**4 * 2,
    ),
    "two heads as the paper": (
        lambda: Wired(two_heads, qkv=nn.Linear(5, 12), out=nn.Linear(4, 2)),
        SENTENCE,
        "paper",
        2**3,
    ),
    "four heads on two": (
        lambda: Wired(
            grouped_queries,
            q=nn.Linear(5, 4),
            k=nn.Linear(5, 2),
            v=nn.Linear(5, 4),
            out=nn.Linear(8, 2),
        ),
        SENTENCE,
        "heads",
        2 * 2**2 * 2**2,
    ),
    "residual stream": (
        lambda: Wired(one_step, into=nn.Linear(5, 3), step=nn.Linear(3, 3), out=nn.Linear(3, 2)),
        VECTOR,
        "residual",
        6,
    ),
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", SMALL)
def test_every_element_of_a_small_group_is_drawn_equally_often(name):
    make, shape, level, order = SMALL[name]
    module = make().double()
    spec = find_permutations(module, torch.randn(shape).double(), groups=level)
    assert 2 ** spec.log2_size() == pytest.approx(order)
    numbers = [
        torch.arange(p.numel(), dtype=torch.float64).view(p.shape) for p in module.parameters()
    ]
    generator, times = torch.Generator().manual_seed(11), 20
    drawn: Counter[tuple[float, ...]] = Counter()
    with torch.no_grad():
        for _ in range(times * order):
            for parameter, number in zip(module.parameters(), numbers, strict=True):
                parameter.copy_(number)
            spec.apply_(module, spec.sample(generator))
            drawn[tuple(torch.cat([p.flatten() for p in module.parameters()]).tolist())] += 1
    assert len(drawn) == order  # one is missed by chance with probability below 72·exp(-20)
    statistic = sum((count - times) ** 2 / times for count in drawn.values())
    assert chi2.sf(statistic, order - 1) > 1e-4


def test_draws_differ_and_take_nothing_from_the_global_generator():
    module, spec = entry("timm_vit")[0], spec_of("timm_vit")
    before = torch.get_rng_state()
    ones, others = (entry_moves(spec, module, spec.sample()) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(not torch.equal(ones[name], others[name]) for name in spec.shapes)


def test_one_generator_state_gives_one_permutation():
    spec = spec_of("timm_vit")
    assert draw(spec, 3) == draw(spec, 3) != draw(spec, 4)


# Laws
# ------------------------------------------------------------------------------------------


seeds = st.integers(0, 2**32)
networks = st.sampled_from(VARIED)


@settings(max_examples=40)
@given(name=networks, seed=seeds)
def test_the_inverse_undoes_and_the_identity_does_nothing(name, seed):
    module, spec = entry(name)[0], spec_of(name)
    plan, moved = draw(spec, seed), copy.deepcopy(module)
    spec.apply_(moved, plan)
    assert not same(module, moved)
    spec.apply_(moved, spec.invert(plan))
    assert same(module, moved)
    spec.apply_(moved, spec.identity())
    assert same(module, moved)


def test_plans_of_another_specification_are_refused():
    with pytest.raises(ValueError, match="plan"):
        spec_of("mlp").invert(draw(spec_of("conv_net"), 0))


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
