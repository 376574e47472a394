"""The permutation between two releases of shuffled weights is recovered from the weights."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import attention_zoo, convolution_zoo, model_zoo
from helpers.model_zoo import build
from realignment import align
from torch import nn

from opacus_shuffle.permutation import find_permutations

ZOO = {**model_zoo.NETWORKS, **convolution_zoo.CONVOLUTIONS, **attention_zoo.TRANSFORMERS}
# Plain layers, one factor twice in a tensor, channels inside groups, residual streams, packed and
# separate heads.
ARCHITECTURES = (
    "mlp",
    "mlp_without_biases",
    "symmetric_matrix",
    "mixture_of_experts",
    "conv_net",
    "grouped_conv",
    "resnet",
    "torch_encoder_post_norm",
    "opacus_encoder",
    "torch_encoder_decoder",
)
LEVELS = ("paper", "heads", "residual")
DISPLACEMENTS = (0.0, 0.01, 0.1, 0.3)


def spec_of(name, level="residual", **options):
    module, sample = build(ZOO[name], **options)
    return module, find_permutations(module, sample, groups=level)


def copies(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def released(spec, before, displacement, seed):
    """A later release, displaced by a fraction of each tensor's root mean square, and its plan."""
    generator = torch.Generator().manual_seed(seed)
    after = {
        name: value
        + displacement
        * value.double().square().mean().sqrt()
        * torch.randn(value.shape, generator=generator)
        for name, value in before.items()
    }
    after = {name: value.to(before[name].dtype) for name, value in after.items()}
    for name, aliases in spec.aliases.items():
        after |= {alias: after[name] for alias in aliases}
    displaced = {name: value.clone() for name, value in after.items()}
    plan = spec.sample(generator)
    spec.move({name: [after[name]] for name in spec.blocks}, plan)
    return after, plan, displaced


def two_layers(hidden=6, inputs=4, outputs=3):
    network = nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    ).double()
    model_zoo.randomise(network, 3)
    return network, find_permutations(network)


@pytest.mark.parametrize(
    ("name", "level", "options"),
    [
        ("mlp", "residual", {}),
        ("torch_encoder_post_norm", "residual", {}),
        pytest.param(
            "torch_encoder_post_norm", "residual", {"dtype": torch.float32}, marks=pytest.mark.zoo
        ),
        ("torch_encoder_post_norm", "residual", {"dtype": torch.bfloat16}),
        *(
            pytest.param(name, level, {}, marks=pytest.mark.zoo)
            for name in ARCHITECTURES
            for level in LEVELS
        ),
    ],
)
def test_every_row_is_put_back_after_steps_of_up_to_30_percent(name, level, options):
    module, spec = spec_of(name, level, **options)
    before = copies(module)
    for seed, displacement in enumerate(DISPLACEMENTS):
        after, plan, displaced = released(spec, before, displacement, seed)
        alignment = align(spec, before, after)
        assert alignment.recovered(plan) == 1.0
        assert alignment.plan == plan
        undone = alignment.undo(after)
        assert all(torch.equal(undone[key], displaced[key]) for key in displaced)
        assert all(undone[key].dtype == before[key].dtype for key in before)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        self.out.weight = self.embed.weight
        self.fixed = nn.Parameter(torch.ones(2))

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1)) * self.fixed[0]


def test_names_may_be_wrapped_tensors_may_be_tied_and_others_are_ignored():
    module = Tied().double()
    spec = find_permutations(module, torch.randint(7, (3, 5)))
    before = copies(module)
    after, plan, displaced = released(spec, before, 0.1, 0)
    after |= {alias: after[name] for name, aliases in spec.aliases.items() for alias in aliases}
    wrapped = {f"_module.{name}": value for name, value in after.items()}
    alignment = align(spec, before, wrapped)
    assert spec.aliases
    assert alignment.plan == plan
    undone = alignment.undo(wrapped)
    assert all(torch.equal(undone[f"_module.{name}"], value) for name, value in displaced.items())
    assert undone["_module.fixed"] is wrapped["_module.fixed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.weight": None}, "after must contain every tensor that moves, but 0.weight is missing"),
        (
            {"0.bias": torch.zeros(5)},
            r"after does not fit.*0.bias should have shape \(6,\), got \(5,\)",
        ),
        ({"0.bias": [0.0]}, "after does not fit.*0.bias.*got list"),
        ({"2.weight": torch.full((3, 6), math.nan)}, r"after\['2.weight'\] must be finite"),
    ],
)
def test_releases_of_another_network_are_refused(changes, message):
    network, spec = two_layers()
    after = {
        name: value for name, value in {**copies(network), **changes}.items() if value is not None
    }
    with pytest.raises(ValueError, match=message):
        align(spec, copies(network), after)
    with pytest.raises(ValueError, match="plan is not from this PermutationSpec"):
        align(spec, copies(network), copies(network)).recovered(two_layers(7)[1].identity())
