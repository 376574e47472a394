"""The check of a PermutationSpec has teeth: every mistake shows, at initialisation too, and nothing is left behind."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import hand_written_groups as by_hand
from helpers.model_zoo import run
from helpers.perceptron import X, mlp
from helpers.zoo import DOUBLE, TRANSFORMERS, distance, entry, found, same
from torch import nn
from torch.nn import functional

from opacus_shuffle.permutation import PermutationSpec, find_permutations


def forget(*names: str) -> Callable[[dict], None]:
    """These tensors stay in place though their group moves."""

    def edit(data: dict) -> None:
        for name in names:
            del data["blocks"][name], data["shapes"][name]
        data["buffers"] = [name for name in data["buffers"] if name not in names]

    return edit


def free(name: str, size: int) -> Callable[[dict], None]:
    """What was fixed along a tensor's first axis, of this size, moves."""

    def edit(data: dict) -> None:
        numbers = {
            number
            for block in data["blocks"][name]
            for term in block["terms"]
            for number, _ in term["grid"]
        }
        for number in numbers:
            factor = data["factors"][number]
            if not factor["free"] and factor["size"] == size:
                factor.update(free=True, name=f"freed {number}")

    return edit


def alone(*names: str) -> Callable[[dict], None]:
    """The rows of these tensors move by a permutation of their own."""

    def edit(data: dict) -> None:
        data["factors"].append(
            {"name": "alone", "size": data["shapes"][names[0]][0], "inside": (), "free": True}
        )
        for name in names:
            data["blocks"][name][0]["terms"] = [
                {"offset": 0, "grid": [(len(data["factors"]) - 1, 1)]}
            ]

    return edit


def without_groups(*names: str) -> Callable[[dict], None]:
    """Channels move as if their normalisation knew no groups."""

    def edit(data: dict) -> None:
        channels = data["shapes"][names[0]][0]
        data["factors"].append(
            {"name": "all channels", "size": channels, "inside": (), "free": True}
        )
        for name in names:
            block = next(each for each in data["blocks"][name] if each["size"] == channels)
            block["terms"] = [{"offset": 0, "grid": [(len(data["factors"]) - 1, 1)]}]

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
        without_groups("0.weight", "0.bias", "1.weight", "1.bias", "3.weight"),
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
        pytest.param(name, marks=[pytest.mark.zoo] * (number % 2))
        for number, name in enumerate(MISTAKES)
    ],
)
def test_the_check_finds_the_mistake_and_says_where(mistake):
    name, edit = MISTAKES[mistake]
    (module, sample), spec = entry(name), found(name)
    data = copy.deepcopy(spec.to_dict())
    edit(data)
    wrong = PermutationSpec.from_dict(data)
    assert wrong != spec
    spec.check(module, sample)
    with pytest.raises(ValueError, match="changes what") as caught:
        wrong.check(module, sample)
    assert any(f"{group!r}" in str(caught.value) for group in wrong.perm_to_axes)
    assert any(key in str(caught.value) for key in spec.shapes)


@pytest.mark.parametrize(
    "forgotten",
    ["norm.weight", "norm.bias", "encoder.layers.0.norm1.weight", "encoder.layers.0.linear1.bias"],
)
def test_the_check_is_not_blind_at_initialisation(forgotten):
    """Norms start at 1 and 0, so that forgetting one changes nothing yet."""
    sample, spec = entry("opacus_encoder")[1], found("opacus_encoder")
    fresh = TRANSFORMERS["opacus_encoder"]()[0]
    for name, parameter in fresh.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    data = copy.deepcopy(spec.to_dict())
    forget(forgotten)(data)
    spec.check(fresh, sample)
    with pytest.raises(ValueError, match="changes what"):
        PermutationSpec.from_dict(data).check(fresh, sample)


def test_the_check_leaves_the_network_as_it_was():
    (module, sample), spec = entry("batch_norm"), found("batch_norm")
    module = copy.deepcopy(module).train()
    before, random = copy.deepcopy(module), torch.get_rng_state()
    spec.check(module, sample)
    assert same(before, module)
    assert all(each.training for each in module.modules())
    assert torch.equal(random, torch.get_rng_state())


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
            by_hand.apply({each: axes for each, axes in moves.items() if each != key}, wrong)
            if not key.endswith(
                "key.bias"
            ):  # a shift of all scores of a query, which softmax does not see
                assert distance(right, run(wrong, sample)) >= 1e6 * DOUBLE, key


# What hides a mistake, and what does not
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [torch.finfo(torch.float32).min, -1e9, 1e12])
def test_huge_outputs_do_not_hide_a_wrong_permutation(huge):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            y = self.net(x)
            return y.masked_fill(torch.eye(3, 2, dtype=torch.bool), huge), y.new_full((2,), huge)

    data = find_permutations(Masked(), X).to_dict()
    del data["blocks"]["net.2.weight"], data["shapes"]["net.2.weight"]
    with pytest.raises(ValueError, match="changes what Masked computes"):
        PermutationSpec.from_dict(data).check(Masked(), X)


@pytest.mark.parametrize("buffer", ["running_mean", "running_var"])
def test_a_forgotten_running_statistic_shows_at_initialisation(buffer):
    network = mlp(nn.BatchNorm1d(6), nn.Tanh())
    data = find_permutations(network, X).to_dict()
    del data["blocks"][f"1.{buffer}"], data["shapes"][f"1.{buffer}"]
    data["buffers"].remove(f"1.{buffer}")
    with pytest.raises(ValueError, match="changes what Sequential computes"):
        PermutationSpec.from_dict(data).check(network, X)


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


def test_single_precision_complex_networks_are_checked_in_double():
    class Turning(nn.Module):
        def forward(self, x):
            return torch.polar(x.abs() + 1, x).real

    assert round(2 ** find_permutations(mlp(Turning(), nn.ReLU()), X).log2_size()) == 720


class FusedDropout(nn.Module):
    """Dropout as it is dispatched on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.5, self.training)[0] if self.training else x


def test_fused_dropout_is_noise_too():
    network = nn.Sequential(nn.Linear(4, 6), FusedDropout(), nn.Linear(6, 3))
    assert find_permutations(network, torch.randn(5, 4)).log2_size() == pytest.approx(
        9.49, abs=0.01
    )


@pytest.mark.parametrize(
    "hide",
    [
        lambda scores, mask: torch.where(
            mask, scores, torch.full((), torch.finfo(scores.dtype).min)
        ),
        lambda scores, mask: (
            scores + torch.zeros(scores.shape).masked_fill_(~mask, torch.finfo(scores.dtype).min)
        ),
        lambda scores, mask: (
            torch.empty(scores.shape)
            .copy_(scores)
            .masked_fill_(~mask, torch.finfo(scores.dtype).min)
        ),
        lambda scores, mask: torch.ones(scores.shape).index_add_(
            0, torch.arange(len(scores)), scores * mask
        ),
    ],
    ids=["full", "zeros", "empty", "ones"],
)
def test_constants_made_in_single_precision_are_no_reason_to_refuse(hide):
    class Hiding(nn.Module):
        def forward(self, x):
            return hide(x, torch.tensor([True, True, False, True, True, True])).softmax(-1)

    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), Hiding(), nn.Linear(6, 3))
    assert find_permutations(network, X).log2_size() == pytest.approx(by_hand.symmetric(5))


def test_constants_that_python_keeps_by_length_stay_in_single_precision():
    kept = {}

    class Net(nn.Sequential):
        def forward(self, x):
            if x.shape[1] not in kept:
                kept[x.shape[1]] = torch.ones(x.shape[1], 1)
            return super().forward(x * kept[x.shape[1]])

    module = Net(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    spec = find_permutations(module, torch.ones(2, 5, 4))
    kept.clear()
    spec.check(module, torch.ones(2, 5, 4))
    assert kept[5].dtype == torch.float32


class SlopesByPlace(torch.autograd.Function):
    """Does nothing forward; backward, each unit has a slope of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return slope * torch.arange(1, slope.shape[-1] + 1).to(slope)


class SlopesTurned(SlopesByPlace):
    """Turns gradients around, each like all others."""

    @staticmethod
    def backward(ctx, slope):
        return -slope


def through(function):
    class Through(nn.Module):
        def forward(self, x):
            return function.apply(x)

    return mlp(nn.Tanh(), Through())


def test_a_backward_of_its_own_that_knows_positions_is_refused():
    with pytest.raises(ValueError, match=r"outputs or gradients by .* in a backward of its own"):
        find_permutations(through(SlopesByPlace), X)


def test_a_backward_of_its_own_that_treats_entries_alike_is_not():
    assert round(2 ** find_permutations(through(SlopesTurned), X).log2_size()) == 720
