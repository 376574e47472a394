"""What is found keeps the function at sizes, numbers and draws of Python's that no sample had."""

from __future__ import annotations

import builtins
import contextlib
import copy
import json
import math
import pickle
import random
import struct

import numpy as np
import pytest
import torch
from helpers.changing_paths import Net, ends, inputs, negative
from helpers.changing_sizes import BATCHES, SIZED, either
from helpers.model_zoo import build
from helpers.zoo import found_if_any, outputs_stay
from torch import nn

from opacus_shuffle import prepare_model
from opacus_shuffle.permutation import find_permutations
from opacus_shuffle.permutation.finding.comparisons import _lengths_noticed

FREE = 40320  # 8!


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.zoo) if name in [*BATCHES][4:] or name in [*SIZED][1::2] else name for name in SIZED],
)
def test_outputs_stay_at_sizes_and_numbers_that_no_sample_had(name):
    assert outputs_stay(SIZED[name])


@pytest.mark.parametrize(
    "name", ["layers_that_python_leaves_out", "as_many_layers_as_the_length_has", "positions_that_are_interpolated"]
)
def test_what_all_ways_treat_alike_still_moves(name):
    assert find_permutations(*build(lambda: SIZED[name]()[:2])).log2_size() > 15


def refuses_long_inputs(net, x):
    if x.shape[1] > 512:
        raise ValueError("too long")
    assert len(x) < 1000
    return net.leave(torch.relu(net.enter(x)).mean(1))


def pads(net, x):
    h = torch.relu(net.enter(x))
    h = torch.nn.functional.pad(h, (0, 0, 0, -h.shape[1] % 4))
    return net.leave(h.view(len(h), -1, 8).sum(1) if h.shape[1] > 1 else h.sum(1))


def compares_its_own_width(net, x):
    h = torch.relu(net.enter(x))
    return net.leave((h if h.shape[-1] == 8 else h.flip(-1)).mean(1))


@pytest.mark.parametrize("way", [refuses_long_inputs, pads, compares_its_own_width])
def test_sizes_that_change_nothing_pin_nothing(way):
    spec = find_permutations(*build(lambda: (Net(way, **ends()), inputs((2, 5, 4))[0])))
    assert round(2 ** spec.log2_size()) == FREE


def test_a_way_that_only_fits_its_own_size_is_met_at_that_size():
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.view(len(h), 7, 4, 2).flip(2).flatten(2).mean(1) if x.shape[1] == 7 else h.mean(1))

    spec = found_if_any(*build(lambda: (Net(way, **ends()), inputs((2, 5, 4))[0])))
    assert spec is None or round(2 ** spec.log2_size()) < FREE


def test_sizes_that_decide_are_listed_with_their_line():
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave((2 * h if x.shape[1] > 60 else h).mean(1))

    spec = find_permutations(*build(lambda: (Net(way, **ends()), inputs((2, 5, 4))[0])))
    ((place, ways),) = spec.decisions.items()
    assert place.startswith("test_changing_sizes.py:")
    assert place.endswith("(>)")
    assert ways == 2


def test_sizes_that_hooks_of_this_package_compare_are_no_decisions_of_the_network():
    def way(net, tokens):
        return net.leave(torch.relu(net.enter(tokens) + net.places(torch.arange(tokens.shape[1])[None])).mean(1))

    layers = {"enter": nn.Embedding(9, 8), "places": nn.Embedding(6, 8), "leave": nn.Linear(8, 3)}
    module, tokens = build(lambda: (prepare_model(Net(way, **layers)), torch.arange(10).view(2, 5) % 9))
    spec = find_permutations(module, tokens)
    assert round(2 ** spec.log2_size()) == FREE
    assert not spec.decisions


@pytest.mark.parametrize("make", [lambda: np.random.default_rng(1), lambda: random.Random(1), lambda: np.random.RandomState(1)])
def test_generators_of_python_and_numpy_stay_where_they_were(make):
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h * (1 + (net.generator.random() if hasattr(net.generator, "random") else net.generator.rand())))

    def builder():
        network = Net(way, **ends())
        network.generator = make()
        return network, negative()

    module, x = build(builder)
    before = random.getstate()
    assert find_permutations(module, x).blocks
    assert module.generator.random() == make().random()
    assert random.getstate() == before


def test_a_forward_that_asks_for_the_exact_type_of_a_size_is_told_what_to_ask_instead():
    def way(net, x):
        assert type(x.shape[1]) is int
        return net.leave(torch.relu(net.enter(x)).mean(1))

    module, x = build(lambda: (Net(way, **ends()), inputs((2, 5, 4))[0]))
    with pytest.raises(ValueError, match=r"(?s)AssertionError.*\. It runs where .* isinstance\(size, int\)$"):
        find_permutations(module, x)
    with pytest.raises(ValueError, match=r"in training mode: RuntimeError: .* shapes cannot be multiplied .*\d\)$"):
        find_permutations(nn.Linear(5, 3).double(), x)


SERVING = {
    "a text": lambda n: f"{n:3d} {n!r} {n!s:>4} %d" % n,
    "json": lambda n: json.dumps({"length": n, n: [n, n + 1]}),
    "bytes": lambda n: struct.pack("iq", n, n).hex(),
    "a key": lambda n: str({int(n): "seen"}[n]) + str(hash((n, 2))),
    "a range": lambda n: str([*range(n), *range(0, n, 2), *reversed(range(n))]),
    "an index": lambda n: str([*range(99)][n : 2 * n]) + "-" * n + str([0] * n),
    "mathematics": lambda n: str([math.isqrt(n), math.comb(n, 2), math.gcd(n, 4), divmod(n, 2), pow(3, n, 7), n & 4, ~n]),
    "numpy": lambda n: str(np.arange(n) * n) + str(np.array([n]).dtype),
    "tensors": lambda n: str([torch.tensor(n), torch.arange(n), torch.full((n,), n), torch.tensor(torch.zeros(n).shape)]),
    "a script": lambda n: str(torch.jit.script(doubled)(n)),
    "a copy": lambda n: str(pickle.loads(pickle.dumps(n)) + copy.deepcopy(n)),
}


def doubled(n: int) -> int:
    return 2 * n


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_sizes_serve_as_whole_numbers_do():
    def served(n):
        return tuple(f"{name}: {serve(n)}" for name, serve in SERVING.items())

    found = set()

    def way(net, x):
        if x.shape[1] == 5:
            found.add(served(x.shape[1]))
        return net.leave(torch.relu(net.enter(x)).mean(1))

    spec = find_permutations(*build(lambda: (Net(way, **ends()), inputs((2, 5, 4))[0])))
    assert found == {served(5)}
    assert round(2 ** spec.log2_size()) == FREE


def test_lengths_are_plain_again_in_the_end():
    find_permutations(*build(lambda: (Net(either(lambda x: len(x) > 100, lambda h: 2 * h), **ends()), negative())))
    assert type(len(torch.zeros(3))) is int
    assert type(torch.zeros(3).shape[0]) is int


def test_sizes_reach_functions_of_pytorch_as_any_number_does():
    def way(net, x):
        records, length, _ = x.shape
        h = torch.relu(net.enter(x)) + torch.zeros(records, length, 1) + torch.arange(length).view(1, length, 1)
        kernel = max(1, round(length / 2) - 1)
        h = torch.nn.functional.avg_pool1d(h.transpose(1, 2), kernel).transpose(1, 2)
        return net.leave(h.reshape(records * h.size(1), -1)).unflatten(0, (records, -1)).sum(1) / length**0.5

    spec = find_permutations(*build(lambda: (Net(way, **ends()), inputs((2, 5, 4))[0])))
    assert round(2 ** spec.log2_size()) == FREE


def test_compiled_parts_are_traced_as_before():
    def way(net, x):
        return net.leave(net.part(torch.relu(net.enter(x))))

    part = torch.compile(nn.Identity(), backend="eager")
    spec = find_permutations(*build(lambda: (Net(way, **ends(), part=part), negative())))
    assert round(2 ** spec.log2_size()) == FREE


def test_len_is_itself_again_however_the_threads_that_look_at_networks_overlap():
    before = builtins.len
    with contextlib.ExitStack() as later:
        with _lengths_noticed():
            later.enter_context(_lengths_noticed())
        assert builtins.len is not before
    assert builtins.len is before
