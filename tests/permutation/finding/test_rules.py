"""Operations are followed by their rules; those without one keep in place what they touch."""

from __future__ import annotations

import pytest
import torch
from helpers import hand_written_groups as by_hand
from helpers.model_zoo import Apply
from torch import nn

from opacus_shuffle.permutation import find_permutations


@torch.library.custom_op("opacus_shuffle_tests::leaky_running_sum", mutates_args=())
def leaky_running_sum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


OPAQUE = {
    "custom operator": leaky_running_sum,
    "sort and where from": lambda x: torch.add(*x.sort(-1)),
    "fourier transform": lambda x: torch.fft.rfft(x).real,
    "cumulative sum": lambda x: x.cumsum(-1),
    "flip": lambda x: x + x.flip(-1),
    "every third": lambda x: x[:, ::3],
    "gather": lambda x: x.gather(1, torch.tensor([[0, 3, 2]]).expand(len(x), -1)),
    "constant factors": lambda x: x * torch.arange(8, dtype=x.dtype),
    "own order": lambda x: x.take_along_dim(x.argsort(1), 1),
    "unfold": lambda x: x.unfold(1, 3, 1).flatten(1),
    "convolution over units": lambda x: torch.conv1d(
        x.unsqueeze(1), torch.ones(1, 1, 3).to(x)
    ).flatten(1),
    "written through a view": lambda x: x.clone().index_fill_(1, torch.tensor([0]), 0.0),
    "memory seen otherwise": lambda x: torch.as_strided(x.contiguous(), (len(x), 4), (8, 2)),
}


@pytest.mark.parametrize("operation", OPAQUE)
def test_operations_that_tell_units_apart_keep_them_in_place(operation):
    function = OPAQUE[operation]
    with torch.random.fork_rng(devices=[]):
        width = function(torch.randn(2, 8)).shape[1]
        front = [nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 8), nn.Tanh(), Apply(function)]
        module = nn.Sequential(*front, nn.Linear(width, 7), nn.GELU(), nn.Linear(7, 3))
    spec = find_permutations(module, torch.randn(4, 5))
    assert spec.log2_size() == pytest.approx(by_hand.symmetric(6) + by_hand.symmetric(7))
    assert spec.moved_fraction("2.bias") == 0
    assert set(spec.axes_to_perm) == {
        "0.weight",
        "0.bias",
        "2.weight",
        "5.weight",
        "5.bias",
        "7.weight",
    }


def test_experts_in_one_tensor_are_followed():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16, head_dim=8,
    )  # fmt: skip
    network = transformers.MixtralForCausalLM(config)
    spec = find_permutations(network, torch.randint(3, 40, (2, 6)))
    assert spec.shuffle_ratio(network) > 0.9


def test_attention_inside_of_pytorchs_own_encoder_is_seen_into():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    spec = find_permutations(
        nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 3)), torch.randn(2, 5, 4)
    )
    # In each layer: units, heads, and in each head queries with keys, and values. In all: the
    # residual stream.
    layer = by_hand.symmetric(16) + by_hand.symmetric(2) + 2 * 2 * by_hand.symmetric(4)
    assert spec.log2_size() == pytest.approx(by_hand.symmetric(8) + 2 * layer)
    assert not spec.unknown


class TextCNN(nn.Module):
    """Kim's: kernels over some words, each as wide as an embedding."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 6), nn.Linear(8, 2)
        self.kernels = nn.ModuleList(nn.Conv2d(1, 4, (count, 6)) for count in (2, 3))

    def forward(self, x):
        h = self.words(x)[:, None]
        return self.out(
            torch.cat([kernel(h).relu().squeeze(3).amax(2) for kernel in self.kernels], 1)
        )


class Mixer(nn.Module):
    """Mixes five tokens by convolutions over them, and then their features."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.tokens = nn.Sequential(nn.Conv1d(5, 7, 1), nn.GELU(), nn.Conv1d(7, 5, 1))

    def forward(self, x):
        h = self.enter(x)
        return self.leave((h + self.tokens(self.norm(h))).mean(1))


@pytest.mark.parametrize(
    ("network", "sample", "sizes"),
    [(TextCNN, torch.arange(18).view(2, 9), (6, 4, 4)), (Mixer, torch.randn(2, 5, 3), (6, 7))],
    ids=["a kernel that spans an axis", "a kernel of one tap"],
)
def test_a_convolution_that_is_a_matrix_product_moves_as_one(network, sample, sizes):
    torch.manual_seed(0)
    spec = find_permutations(network(), sample)
    assert spec.log2_size() == pytest.approx(sum(map(by_hand.symmetric, sizes)))


def test_a_kernel_that_spans_an_axis_of_the_sample_alone_stays():
    class Sliding(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.kernel = nn.Parameter(torch.randn(1, 4, 5)), nn.Conv1d(4, 2, 5)

        def forward(self, x):
            return self.kernel(
                x[:, None] * torch.cat([self.places, self.places], 2)[..., : x.shape[1]]
            ).amax(2)

    spec = find_permutations(Sliding(), torch.randn(2, 5))
    assert spec.log2_size() == pytest.approx(by_hand.symmetric(4))


class Joined(nn.Module):
    """Norms in groups what two layers give, laid end to end."""

    def __init__(self, one, other, groups):
        super().__init__()
        self.one, self.other = nn.Linear(5, one), nn.Linear(5, other)
        self.norm, self.out = nn.GroupNorm(groups, one + other), nn.Linear(one + other, 2)

    def forward(self, x):
        return self.out(self.norm(torch.cat([self.one(x), self.other(x)], -1)))


@pytest.mark.parametrize(
    ("one", "other", "groups", "size"),
    [
        (4, 4, 2, 24 * 24),  # each is a group
        (2, 6, 1, 2 * 720),  # both lie in one group
        (4, 8, 3, 24 * 2 * 24**2),  # one group, and two that change places
        (3, 5, 2, 6),  # the second begins inside of a group and ends behind it: it stays
    ],
)
def test_groups_of_a_norm_may_cut_a_concatenation(one, other, groups, size):
    spec = find_permutations(Joined(one, other, groups), torch.randn(3, 5))
    assert round(2 ** spec.log2_size()) == size
