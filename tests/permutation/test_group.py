"""Groups of permutations: uniform draws, the laws of a group."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from helpers.model_zoo import Wired, entry_moves
from helpers.zoo import (
    VARIED,
    draw,
    entry,
    same,
    spec_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
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
