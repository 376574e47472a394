"""The check of a PermutationSpec has teeth: every mistake shows, at initialisation too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from helpers import hand_written_groups as by_hand
from helpers.model_zoo import run
from helpers.perceptron import X, mlp
from helpers.zoo import DOUBLE, TRANSFORMERS, distance, entry, spec_of
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
        pytest.param(name, marks=[pytest.mark.zoo] * (number % 4 > 0))
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


@pytest.mark.parametrize("name", by_hand.ELEMENTS)
def test_forgetting_any_tensor_of_an_element_made_by_hand_shows(name):
    """The smallest mistake is at least a million times above the tolerance of the checks."""
    module, sample = entry(name)
    with torch.no_grad():
        right = run(module, sample)
        moves = by_hand.random_element(name, module, seed=1)
        present = [key for key, _ in module.named_parameters() if key in moves]
        for key in present:
            wrong = copy.deepcopy(module)
            by_hand.apply({other: axes for other, axes in moves.items() if other != key}, wrong)
            if not key.endswith(
                "key.bias"
            ):  # a shift of all scores of a query, which softmax does not see
                assert distance(right, run(wrong, sample)) >= 1e6 * DOUBLE, key


# What hides a mistake, and what does not
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).min, -1e9])
def test_huge_outputs_do_not_hide_a_wrong_permutation(huge):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            y = self.net(x)
            return y.masked_fill(torch.eye(3, 2, dtype=torch.bool), huge), y.new_full((2,), huge)

    wrong = forget("net.2.weight")(find_permutations(Masked(), X))
    with pytest.raises(ValueError, match="changes what Masked computes"):
        wrong.check(Masked(), X)


@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
def test_a_forgotten_running_statistic_shows_at_initialisation(buffer):
    network = mlp(nn.BatchNorm1d(6), nn.Tanh())
    wrong = forget(f"1.{buffer}")(find_permutations(network, X))
    with pytest.raises(ValueError, match="changes what Sequential computes"):
        wrong.check(network, X)


def test_dropout_does_not_hide_a_mistake_of_the_training_path():
    class Trained(nn.Module):
        def forward(self, x):
            return (
                torch.from_numpy(x.detach().numpy() * range(6)).to(x.dtype) if self.training else x
            )

    with pytest.raises(ValueError, match=r"Tensor\.numpy"):
        find_permutations(mlp(Trained(), nn.Dropout(0.1)), X)


@pytest.mark.parametrize(
    "noise", [lambda h: functional.dropout(h, 0.3, True), lambda h: h + torch.randn_like(h)]
)
def test_noise_in_evaluation_mode_is_no_reason_to_refuse(noise):
    class Noisy(nn.Module):
        def forward(self, x):
            return noise(x)

    assert round(2 ** find_permutations(mlp(Noisy(), nn.ReLU()), X).log2_size()) == 720


class Buffered(nn.Module):
    def __init__(self, value, use):
        super().__init__()
        self.use = use
        self.register_buffer("value", value)

    def forward(self, x):
        return self.use(x, self.value)


def attend(h, mask):
    return torch.zeros(3, 3).masked_fill(mask.bool(), -torch.inf).softmax(-1) @ h


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (torch.triu(torch.ones(3, 3), 1), attend),
        (torch.tensor([0.0, 1.0, 2.0]), lambda h, index: h[index.long()]),
        (torch.tensor([0.99, 0.999]), lambda h, share: h * (1 - share[0]).sqrt()),
        (torch.tensor([0.99]), lambda h, chance: h + torch.logit(chance)),
    ],
    ids=["mask", "index", "share", "chance"],
)
def test_buffers_that_mean_nothing_perturbed_are_no_reason_to_refuse(value, use):
    assert round(2 ** find_permutations(mlp(Buffered(value, use), nn.ReLU()), X).log2_size()) == 720


class SlopesByPlace(torch.autograd.Function):
    """Does nothing forward; backward, each unit has a slope of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return slope * torch.arange(1, slope.shape[-1] + 1).to(slope)


def through(function):
    class Through(nn.Module):
        def forward(self, x):
            return function.apply(x)

    return mlp(nn.Tanh(), Through())


def test_a_backward_of_its_own_that_knows_positions_is_refused():
    with pytest.raises(ValueError, match=r"outputs or gradients by .* in a backward of its own"):
        find_permutations(through(SlopesByPlace), X)
