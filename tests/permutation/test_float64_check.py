"""The check of a PermutationSpec has teeth: every mistake shows, at initialisation too."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from helpers.model_zoo import Apply, Wired
from helpers.perceptron import X, mlp
from helpers.zoo import TRANSFORMERS, entry, spec_of
from torch import nn
from torch.nn import functional

from opacus_shuffle.permutation import PermutationSpec, find_permutations
from opacus_shuffle.permutation.moving.layout import Factor, Term

Edit = Callable[[PermutationSpec], PermutationSpec]


def forget(*names: str) -> Edit:
    """These tensors stay in place though their group moves."""

    def edit(spec: PermutationSpec) -> PermutationSpec:
        return dataclasses.replace(
            spec,
            blocks={name: blocks for name, blocks in spec.blocks.items() if name not in names},
            shapes={name: shape for name, shape in spec.shapes.items() if name not in names},
            buffers=tuple(name for name in spec.buffers if name not in names),
        )

    return edit


def free(name: str, size: int) -> Edit:
    """What was fixed in a tensor's axes, of this size, moves."""

    def edit(spec: PermutationSpec) -> PermutationSpec:
        grids = [term.grid for block in spec.blocks[name] for term in block.terms]
        numbers = {number for grid in grids for number, _ in grid}
        factors = [
            dataclasses.replace(factor, free=True, name=f"freed {number}")
            if number in numbers and not factor.free and factor.size == size
            else factor
            for number, factor in enumerate(spec.factors)
        ]
        return dataclasses.replace(spec, factors=tuple(factors))

    return edit


def alone(*names: str) -> Edit:
    """The rows of these tensors, the blocks of their size, move by a permutation of their own."""

    def edit(spec: PermutationSpec) -> PermutationSpec:
        rows = spec.shapes[names[0]][0]
        terms = (Term(0, ((len(spec.factors), 1),)),)
        blocks = dict(spec.blocks)
        for name in names:
            place = next(n for n, block in enumerate(blocks[name]) if block.size == rows)
            changed = list(blocks[name])
            changed[place] = dataclasses.replace(changed[place], terms=terms)
            blocks[name] = tuple(changed)
        factors = (*spec.factors, Factor("alone", rows))
        return dataclasses.replace(spec, factors=factors, blocks=blocks)

    return edit


MLM = "cls.predictions.transform"
MISTAKES = {
    "bias of the queries forgotten": (
        "opacus_encoder",
        forget("encoder.layers.0.self_attn.qlinear.bias"),
    ),
    "position embeddings forgotten": ("opacus_encoder", forget("positions")),
    "scale of a norm forgotten": ("opacus_encoder", forget("encoder.layers.1.norm1.weight")),
    "shift of a norm forgotten": ("opacus_encoder", forget("norm.bias")),
    "reader of hidden units forgotten": ("mlp", forget("2.weight")),
    "bias of hidden units forgotten": ("mlp", forget("0.bias")),
    "position buffer forgotten": ("sinusoidal_positions", forget("positions")),
    "running mean forgotten": ("batch_norm", forget("1.running_mean")),
    "running variance forgotten": ("batch_norm", forget("4.running_var")),
    "groups of a norm ignored": (
        "conv_net",
        alone("0.weight", "0.bias", "1.weight", "1.bias", "3.weight"),
    ),
    "rotated dimensions freed": ("llama_by_hand", free("blocks.0.attention.q.weight", 2)),
    "heads told apart by slopes freed": ("alibi", free("blocks.0.attention.q.weight", 4)),
    "rows of a tied head moved alone": (
        "BertForMaskedLM",
        alone(
            f"{MLM}.dense.weight",
            f"{MLM}.dense.bias",
            f"{MLM}.LayerNorm.weight",
            f"{MLM}.LayerNorm.bias",
        ),
    ),
    "a stream that splits": (
        "resnet",
        alone("blocks.0.conv2.weight", "blocks.0.norm2.weight", "blocks.0.norm2.bias"),
    ),
}


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(name, marks=[pytest.mark.zoo] * (number % 5 > 0))
        for number, name in enumerate(MISTAKES)
    ],
)
def test_the_check_finds_the_mistake_and_says_where(mistake):
    name, edit = MISTAKES[mistake]
    (module, sample), spec = entry(name), spec_of(name)
    wrong = edit(spec)
    assert wrong != spec
    spec.check(module, sample)
    with pytest.raises(ValueError, match="changes what") as caught:
        wrong.check(module, sample)
    assert any(f"{group!r}" in str(caught.value) for group in wrong.perm_to_axes)
    assert any(key in str(caught.value) for key in spec.shapes)


@pytest.mark.parametrize(
    "forgotten",
    [
        "norm.weight",
        *(
            pytest.param(name, marks=pytest.mark.zoo)
            for name in (
                "norm.bias",
                "encoder.layers.0.norm1.weight",
                "encoder.layers.0.linear1.bias",
            )
        ),
    ],
)
def test_the_check_is_not_blind_at_initialisation(forgotten):
    """Norms start at 1 and 0, so that forgetting one changes nothing yet."""
    sample, spec = entry("opacus_encoder")[1], spec_of("opacus_encoder")
    fresh = TRANSFORMERS["opacus_encoder"]()[0]
    for name, parameter in fresh.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    spec.check(fresh, sample)
    with pytest.raises(ValueError, match="changes what"):
        forget(forgotten)(spec).check(fresh, sample)


# What hides a mistake, and what does not
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).min, -1e9])
def test_huge_outputs_do_not_hide_a_wrong_permutation(huge):
    def way(net, x):
        masked = net.net(x).masked_fill(torch.eye(3, 2, dtype=torch.bool), huge)
        return masked, masked.new_full((2,), huge)

    network = Wired(way, net=mlp())
    wrong = forget("net.2.weight")(find_permutations(network, X))
    with pytest.raises(ValueError, match="changes what Wired computes"):
        wrong.check(network, X)


@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
def test_a_forgotten_running_statistic_shows_at_initialisation(buffer):
    network = mlp(nn.BatchNorm1d(6), nn.Tanh())
    wrong = forget(f"1.{buffer}")(find_permutations(network, X))
    with pytest.raises(ValueError, match="changes what Sequential computes"):
        wrong.check(network, X)


def test_dropout_does_not_hide_a_mistake_of_the_training_path():
    def way(net, x):
        return torch.from_numpy(x.detach().numpy() * range(6)).to(x.dtype) if net.training else x

    with pytest.raises(ValueError, match=r"Tensor\.numpy"):
        find_permutations(mlp(Wired(way), nn.Dropout(0.1)), X)


@pytest.mark.parametrize(
    "noise", [lambda h: functional.dropout(h, 0.3, True), lambda h: h + torch.randn_like(h)]
)
def test_noise_in_evaluation_mode_is_no_reason_to_refuse(noise):
    assert round(2 ** find_permutations(mlp(Apply(noise), nn.ReLU()), X).log2_size()) == 720


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (
            torch.triu(torch.ones(3, 3), 1),
            lambda h, mask: torch.zeros(3, 3).masked_fill(mask.bool(), -torch.inf).softmax(-1) @ h,
        ),
        (torch.tensor([0.0, 1.0, 2.0]), lambda h, index: h[index.long()]),
        (torch.tensor([0.99, 0.999]), lambda h, share: h * (1 - share[0]).sqrt()),
        (torch.tensor([0.99]), lambda h, chance: h + torch.logit(chance)),
    ],
    ids=["mask", "index", "share", "chance"],
)
def test_buffers_that_mean_nothing_perturbed_are_no_reason_to_refuse(value, use):
    layer = Wired(lambda net, h: use(h, net.value))
    layer.register_buffer("value", value)
    assert round(2 ** find_permutations(mlp(layer, nn.ReLU()), X).log2_size()) == 720


class SlopesByPosition(torch.autograd.Function):
    """Copies its input; in the backward pass each unit has another slope."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return slope * torch.arange(1, slope.shape[-1] + 1).to(slope)


def test_a_custom_backward_that_depends_on_positions_is_refused():
    with pytest.raises(ValueError, match=r"outputs or gradients by .* in a custom backward pass"):
        find_permutations(mlp(nn.Tanh(), Apply(SlopesByPosition.apply)), X)


def test_statistics_of_groups_that_a_network_reads_are_refused():
    def way(net, x):
        h, mean, _ = torch.native_group_norm(net.one(x), None, None, len(x), 6, 1, 2, 1e-5)
        return net.two(h) * mean.detach()

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="changes what Wired computes"):
        find_permutations(Wired(way, one=nn.Linear(4, 6), two=nn.Linear(6, 2)), X)
