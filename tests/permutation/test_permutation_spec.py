"""PermutationSpec: uniform draws, the laws of a group, and moving a network with its optimizer."""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from helpers.attention_zoo import TRANSFORMERS
from helpers.convolution_zoo import CONVOLUTIONS
from helpers.hugging_face_zoo import HUGGING_FACE
from helpers.model_zoo import NETWORKS, Wired, another, build, entry_moves, gradients, run
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from scipy.stats import chi2
from torch import nn

from opacus_shuffle.permutation import PermutationSpec, find_permutations

ZOO = NETWORKS | CONVOLUTIONS | TRANSFORMERS | HUGGING_FACE
DOUBLE = 1e-12  # see test_find_permutations

VARIED = ["mlp", "maxout", "mixture_of_experts", "conv_net", "grouped_conv", "timm_vit", "llama_by_hand", "einsum_attention"]


@functools.cache
def entry(name: str, level: str = "residual") -> tuple[nn.Module, object, PermutationSpec]:
    """A network of the zoo in double precision, its input and its permutations; shared, so not to be changed."""
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    module, sample = build(ZOO[name])
    return module, sample, find_permutations(module, sample, groups=level)


def draw(spec: PermutationSpec, seed: int):
    return spec.sample(torch.Generator().manual_seed(seed))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters and buffers are equal, bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def distance(ones, others):
    """Largest difference relative to the largest entry, over all tensors."""
    scale = max(float(one.detach().abs().max()) for one in ones)
    return max(float((one - other).detach().abs().max()) for one, other in zip(ones, others, strict=True)) / scale


# Draws ------------------------------------------------------------------------------------------------------------------------


def two_heads(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q, k, v = m.qkv(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
    return m.out((torch.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).flatten(2))


def grouped_queries(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (layer(x).view(*x.shape[:2], h, -1).transpose(1, 2) for layer, h in ((m.q, 4), (m.k, 2), (m.v, 2)))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return m.out((torch.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).flatten(2))


def one_step(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = m.into(x)
    return m.out(x + torch.relu(m.step(x)))


SENTENCE, IMAGE, VECTOR = (2, 3, 5), (2, 1, 4, 4), (2, 5)
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, int]] = {
    "three units": (lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)), VECTOR, "paper", 6),
    "two layers": (
        lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)),
        VECTOR,
        "residual",
        6 * 2,
    ),
    "two groups of three channels": (
        lambda: nn.Sequential(nn.Conv2d(1, 6, 1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2)),
        IMAGE,
        "heads",
        6**2 * 2,
    ),
    "three units of two pieces": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (3, 2)), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(3, 2)),
        VECTOR,
        "residual",
        6,
    ),
    "two heads": (lambda: Wired(two_heads, qkv=nn.Linear(5, 12), out=nn.Linear(4, 2)), SENTENCE, "heads", 2**4 * 2),
    "two heads as the paper": (lambda: Wired(two_heads, qkv=nn.Linear(5, 12), out=nn.Linear(4, 2)), SENTENCE, "paper", 2**3),
    "four heads on two": (
        lambda: Wired(grouped_queries, q=nn.Linear(5, 4), k=nn.Linear(5, 2), v=nn.Linear(5, 4), out=nn.Linear(8, 2)),
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


@pytest.mark.parametrize("name", SMALL)
def test_every_element_of_a_small_group_is_drawn_equally_often(name):
    make, shape, level, order = SMALL[name]
    module = make().double()
    spec = find_permutations(module, torch.randn(shape).double(), groups=level)
    assert 2 ** spec.log2_size() == pytest.approx(order)
    numbers = [torch.arange(p.numel(), dtype=torch.float64).view(p.shape) for p in module.parameters()]
    generator, times = torch.Generator().manual_seed(11), 40
    drawn: Counter[tuple[float, ...]] = Counter()
    with torch.no_grad():
        for _ in range(times * order):
            for parameter, number in zip(module.parameters(), numbers, strict=True):
                parameter.copy_(number)
            spec.apply_(module, spec.sample(generator))
            drawn[tuple(torch.cat([p.flatten() for p in module.parameters()]).tolist())] += 1
    assert len(drawn) == order  # one is missed by chance with probability below 72·exp(-40)
    statistic = sum((count - times) ** 2 / times for count in drawn.values())
    assert chi2.sf(statistic, order - 1) > 1e-4


def test_draws_differ_and_take_nothing_from_the_global_generator():
    module, _, spec = entry("timm_vit")
    before = torch.get_rng_state()
    ones, others = (entry_moves(spec, module, spec.sample()) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(not torch.equal(ones[name], others[name]) for name in spec.shapes)


def test_one_generator_state_gives_one_permutation():
    spec = entry("timm_vit")[2]
    assert draw(spec, 3) == draw(spec, 3) != draw(spec, 4)


# Group laws -------------------------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**32)
networks = st.sampled_from(VARIED)


@settings(deadline=None, max_examples=40)
@given(name=networks, first=seeds, second=seeds)
def test_one_after_the_other_is_their_composition(name, first, second):
    module, _, spec = entry(name)
    one, other = draw(spec, first), draw(spec, second)
    stepwise, at_once = copy.deepcopy(module), copy.deepcopy(module)
    spec.apply_(stepwise, one)
    spec.apply_(stepwise, other)
    spec.apply_(at_once, spec.compose(one, other))
    assert same(stepwise, at_once)


@settings(deadline=None, max_examples=40)
@given(name=networks, seed=seeds)
def test_the_inverse_undoes_and_the_identity_does_nothing(name, seed):
    module, _, spec = entry(name)
    plan, moved = draw(spec, seed), copy.deepcopy(module)
    spec.apply_(moved, plan)
    assert not same(module, moved)
    spec.apply_(moved, spec.invert(plan))
    assert same(module, moved)
    spec.apply_(moved, spec.identity())
    assert same(module, moved)


@settings(deadline=None, max_examples=40)
@given(name=networks, first=seeds, second=seeds, third=seeds)
def test_plans_obey_the_laws_of_a_group(name, first, second, third):
    spec = entry(name)[2]
    a, b, c = draw(spec, first), draw(spec, second), draw(spec, third)
    assert spec.compose(spec.compose(a, b), c) == spec.compose(a, spec.compose(b, c))
    assert spec.compose(a, spec.invert(a)) == spec.compose(spec.invert(a), a) == spec.identity()
    assert spec.compose(a, spec.identity()) == spec.compose(spec.identity(), a) == a
    assert spec.invert(spec.compose(a, b)) == spec.compose(spec.invert(b), spec.invert(a))


def test_plans_of_another_specification_are_refused():
    with pytest.raises(ValueError, match="plan"):
        entry("mlp")[2].invert(draw(entry("conv_net")[2], 0))


# What it says about itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["paper", "heads", "residual"])
@pytest.mark.parametrize("name", [*VARIED, "lstm", "nano_gpt", "BertForMaskedLM"])
def test_json_keeps_everything(name, level):
    module, _, spec = entry(name, level)
    again = PermutationSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert (again.log2_size(), again.shuffle_ratio(module)) == (spec.log2_size(), spec.shuffle_ratio(module))
    assert again.perm_to_axes == spec.perm_to_axes
    assert draw(again, 1) == draw(spec, 1)


@pytest.mark.parametrize("data", [{}, [], None, {"factors": 3}, {"factors": [], "blocks": {"w": [{}]}}])
def test_other_data_are_no_specification(data):
    with pytest.raises(ValueError, match="PermutationSpec"):
        PermutationSpec.from_dict(data)


@pytest.mark.parametrize("name", [*NETWORKS, *CONVOLUTIONS, *TRANSFORMERS])
def test_axes_without_a_name_stay_and_named_ones_move(name):
    module, _, spec = entry(name)
    names = spec.axes_to_perm
    ever: Counter[tuple[str, int]] = Counter()
    for seed in range(30):
        for key, origin in entry_moves(spec, module, draw(spec, seed)).items():
            for axis, old in enumerate(torch.unravel_index(origin, origin.shape)):
                size = origin.shape[axis]
                here = torch.arange(size).view([size if i == axis else 1 for i in range(origin.dim())])
                ever[key, axis] += not torch.equal(old, here.expand_as(old))
    for (key, axis), times in ever.items():
        assert bool(names[key][axis] if key in names else ()) == (times > 0), (key, axis)


@pytest.mark.parametrize("name", VARIED)
def test_the_two_tables_say_the_same_and_the_description_names_every_group(name):
    spec = entry(name)[2]
    forth = {(group, key, axis) for group, axes in spec.perm_to_axes.items() for key, axis in axes}
    back = {
        (group, key, axis) for key, axes in spec.axes_to_perm.items() for axis, groups in enumerate(axes) for group in groups
    }
    assert forth == back
    assert all(group in spec.describe() for group in spec.perm_to_axes)


# Moving -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*VARIED, "batch_norm", "nano_gpt"])
def test_a_specification_serves_every_instance_of_the_architecture(name):
    spec = entry(name)[2]
    module, sample = build(ZOO[name], seed=9)
    shuffled = copy.deepcopy(module)
    spec.apply_(shuffled, draw(spec, 0))
    with torch.no_grad():
        assert distance(run(module, sample), run(shuffled, sample)) <= DOUBLE


def test_memory_layout_does_not_matter():
    module, sample, spec = entry("conv_net")
    shuffled = copy.deepcopy(module).to(memory_format=torch.channels_last)
    spec.apply_(shuffled, draw(spec, 0))
    with torch.no_grad():
        assert distance(run(module, sample), run(shuffled, sample)) <= DOUBLE


def test_tensors_stay_the_same_objects_in_the_same_memory():
    module, _, spec = entry("timm_vit")
    module = copy.deepcopy(module)
    before = [(id(p), p.data_ptr()) for p in module.parameters()]
    spec.apply_(module, draw(spec, 0))
    assert [(id(p), p.data_ptr()) for p in module.parameters()] == before


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, centered=False, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, eps=1e-4),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["resnet", "mixture_of_experts", "timm_vit"])
def test_training_a_shuffled_network_and_undoing_it_is_training(name, optimizer):
    """Rounding reaches weights times lr/eps, 10 at most: five steps of some 10 units each stay far below 1e-12."""
    module, sample, spec = entry(name)

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
        state = [value for p in network.parameters() for value in method.state[p].values() if torch.is_tensor(value)]
        return list(network.parameters()), [p.grad for p in network.parameters()], [*state, torch.ones(1)]

    for plain, undone in zip(train(), train(draw(spec, 5)), strict=True):
        assert distance(plain, undone) <= DOUBLE


def test_state_that_cannot_follow_is_refused_before_anything_moves():
    module, sample, spec = entry("mlp")
    module = copy.deepcopy(module)
    optimizer = torch.optim.Adafactor(module.parameters())
    gradients(module, sample)
    optimizer.step()
    before = copy.deepcopy(module)
    with pytest.raises(ValueError, match=r"Adafactor.*row_var"):
        spec.apply_(module, draw(spec, 0), optimizer)
    assert same(before, module)


def test_names_of_wrappers_are_seen_through():
    module, sample, spec = entry("resnet")
    wrapped = GradSampleModule(copy.deepcopy(module))
    spec.apply_(wrapped, draw(spec, 0))
    with torch.no_grad():
        assert distance(run(module, sample), run(wrapped, sample)) <= DOUBLE
    assert spec.shuffle_ratio(wrapped) == spec.shuffle_ratio(module)


@pytest.mark.parametrize("other", ["mlp_without_biases", "conv_net"])
def test_networks_that_do_not_fit_are_refused_by_parameter(other):
    with pytest.raises(ValueError, match=r"0\.weight"):
        entry("mlp")[2].apply_(copy.deepcopy(entry(other)[0]), draw(entry("mlp")[2], 0))
