"""Networks as they are: results and caches, shared memory, odd parts, computed weights."""

import math
import types
from collections import deque

import pytest
import torch
from helpers.model_zoo import Wired
from helpers.perceptron import X, mlp, moving, two_heads
from torch import nn

from opacus_shuffle.permutation import find_permutations


@pytest.mark.parametrize(
    "give",
    [
        lambda one, two: (torch.distributions.Categorical(logits=one), two),
        lambda one, two: (torch.distributions.Normal(one, 1.0, validate_args=False), two),
        lambda one, two: types.SimpleNamespace(logits=one, value=two),
        lambda one, two: {"out": types.SimpleNamespace(logits=one), "more": [two]},
        lambda one, two: {"y": two, "cached_features": one},
    ],
    ids=["categorical", "normal", "object", "nested", "cached features"],
)
def test_whatever_a_network_returns_stays_in_place(give):
    spec = find_permutations(two_heads(give), X)
    assert moving(spec) == {"body.weight", "body.bias", "one.weight", "two.weight"}
    assert not any(
        name == "one.weight" and axis == 0
        for axes in spec.perm_to_axes.values()
        for name, axis in axes
    )


@pytest.mark.parametrize(
    "give",
    [
        lambda one, two: (two, (two - two.mean(1, True)).mean(1)),
        lambda one, two: (two, (two[:, 0] > 1e9).long()),
        lambda one, two: (two, range(3), deque([two]), torch.device("cpu"), torch),
    ],
    ids=["zero up to rounding", "always class 0", "other things"],
)
def test_harmless_results_are_no_reason_to_refuse(give):
    assert find_permutations(two_heads(give), X).log2_size() >= math.log2(
        720
    )  # nobody reads the other head, which may move


@pytest.mark.zoo
def test_decoders_that_return_their_cache_in_a_tuple_keep_their_heads_free():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    network = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(3, 40, (2, 6))
    call = {"input_ids": tokens, "use_cache": True}
    sizes = [
        find_permutations(network, {**call, "return_dict": flag}).log2_size()
        for flag in (True, False)
    ]
    assert sizes[0] == sizes[1]


def test_memory_shared_by_tensors_that_move_is_refused_by_name():
    one, two, three = mlp(), mlp(), mlp(nn.Tanh(), Wired(lambda net, h: h * net.scale))
    three[2].register_buffer("scale", torch.ones(1).expand(6))
    one.register_buffer("part", one[0].weight.data[2:])
    two.register_buffer("whole", two[0].weight.data)
    for network, name in ((one, "part"), (two, "whole"), (three, "scale")):
        with pytest.raises(ValueError, match=f"{name}.*share memory|share memory.*{name}"):
            find_permutations(network, X)


def test_memory_shared_by_tensors_that_stay_is_nobodys_business():
    network, table = mlp(), torch.randn(5, 8)
    for name, value in {
        "cos": table[:, ::2],
        "sin": table[:, 1::2],
        "mask": torch.ones(1, 5).expand(3, 5),
    }.items():
        network.register_buffer(name, value)
    assert round(2 ** find_permutations(network, X).log2_size()) == 720


def test_networks_that_are_not_ready_are_refused_and_left_alone():
    lazy = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"0\.weight is not initialized"):
        find_permutations(lazy, X)
    assert isinstance(lazy[0], nn.LazyLinear)


def test_odd_parts_do_not_crash():
    sparse = mlp()
    sparse.register_buffer("adjacency", torch.eye(3).to_sparse())
    empty = mlp()
    empty.extra = nn.Parameter(torch.empty(0, 6))
    scripted = mlp(torch.jit.trace(nn.Tanh(), torch.ones(2)))
    for network in (sparse, scripted):
        assert round(2 ** find_permutations(network, X).log2_size()) == 720
    assert "extra" not in moving(find_permutations(nn.Sequential(empty[0], empty[1], empty[2]), X))
