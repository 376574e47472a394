"""What is found keeps the function also where the network goes another way."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.changing_paths import CHANGING, Net, ends, negative, unit
from helpers.model_zoo import build
from helpers.zoo import outputs_stay
from torch import nn

from opacus_shuffle.permutation import find_permutations


@pytest.mark.parametrize("name", CHANGING)
def test_outputs_stay_on_inputs_that_go_another_way(name):
    assert outputs_stay(CHANGING[name])


def on_its_sample(name):
    return build(lambda: CHANGING[name]()[:2])


TOKENS = ["for_masked_places", "that_is_a_buffer"]


@pytest.mark.parametrize("token", TOKENS)
def test_what_is_never_reached_stays_with_every_axis_of_its_sizes_and_is_listed(token):
    module, sample = on_its_sample(f"a_token_{token}")
    spec = find_permutations(module, sample)
    assert spec.unreached == ("token",)
    assert [factor.name for factor in spec.factors if factor.free] == ["units of unit.0"]
    assert "Not reached by the sample: token" in spec.describe()


def test_samples_that_reach_it_let_it_move():
    module, sample = on_its_sample("a_token_for_masked_places")
    reached = find_permutations(
        module, sample, more_samples=[{"x": sample, "mask": sample[..., 0] > 0}]
    )
    assert not reached.unreached
    assert "token" in reached.blocks


def test_decisions_by_values_are_listed_with_their_lines():
    spec = find_permutations(*on_its_sample("one_of_two_layers"))
    assert list(spec.decisions.values()) == [2]
    assert all("changing_paths.py:" in place for place in spec.decisions)
    assert "Values decide what the network does at changing_paths.py:" in spec.describe()


def test_experts_that_nobody_chose_are_reached_all_the_same():
    spec = find_permutations(*on_its_sample("eager_experts"))
    assert not spec.unreached
    assert sum(factor.size == 12 for factor in spec.factors) == 5


def test_a_decision_that_cannot_be_otherwise_is_refused_by_its_line_unless_samples_are_given():
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h) if x.sum() < 0 else net.leave(h[:, :3])

    module, x = build(lambda: (Net(way, **ends()), negative()))
    with pytest.raises(
        ValueError, match=r"decides by values at test_changing_paths.py:\d+ .*more_samples"
    ):
        find_permutations(module, x)
    assert find_permutations(module, x, more_samples=[2 * x]).blocks


def test_a_way_that_the_network_itself_refuses_needs_no_sample():
    def way(net, x):
        if not torch.isfinite(x).all():
            raise RuntimeError("x must be finite")
        return net.leave(torch.relu(net.enter(x)))

    module, x = build(lambda: (Net(way, **ends()), negative()))
    spec = find_permutations(module, x)
    assert spec.log2_size() > 15
    assert "(1 way followed)" in spec.describe()


@pytest.mark.parametrize("wrong", [torch.zeros(2, 7), "x"])
def test_an_error_says_which_of_more_samples_is_wrong(wrong):
    module, x = on_its_sample("one_of_two_layers")
    with pytest.raises(
        ValueError, match=r"^more_samples\[1\] (must be a tensor|does not run through)"
    ):
        find_permutations(module, x, more_samples=[2 * x, wrong])


def test_where_what_was_not_reached_lets_nothing_move_the_error_says_what_to_do():
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    network[1].spare = nn.Linear(6, 4)
    with pytest.raises(
        ValueError,
        match=r"1\.spare\.weight: not reached; .*1\.spare\.bias\. .*pass more_samples .*or delete",
    ):
        find_permutations(network, torch.randn(5, 4))
    del network[1].spare
    assert round(2 ** find_permutations(network, torch.randn(5, 4)).log2_size()) == 720


@pytest.mark.parametrize("wrong", [None, 3, torch.zeros(2, 4), "x"])
def test_more_samples_must_be_a_list(wrong):
    with pytest.raises(ValueError, match="more_samples"):
        find_permutations(*on_its_sample("one_of_two_layers"), more_samples=wrong)


def test_what_stays_is_listed_with_what_has_fixed_it_and_where():
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(torch.tanh(net.unit(h.cumsum(-1))))

    spec = find_permutations(*build(lambda: (Net(way, **ends(), unit=unit()), negative())))
    assert re.fullmatch(
        r"axis 0: test_changing_paths.py:\d+ \(cumsum\); axis 1: .*py:\d+ \(addmm\) of enter",
        spec.causes["enter.weight"],
    )
    assert spec.causes["leave.bias"] == "axis 0: an output of the network"
    assert set(spec.causes) == set(spec.unmoved)
    assert "(cumsum)" in spec.describe()


def test_a_decision_that_some_are_chosen_has_some_chosen():
    def way(net, x):
        h = torch.relu(net.enter(x))
        chosen = x[:, 0] > 50
        return net.leave(h + h[chosen].max(0).values if chosen.any() else h)

    assert find_permutations(*build(lambda: (Net(way, **ends()), negative()))).log2_size() > 15


def test_an_order_among_those_that_are_chosen_is_met():
    def way(net, x):
        h = torch.relu(net.enter(x))
        chosen = x[:, 0] > 50
        return net.leave(h + h.cumsum(-1)[chosen].max(0).values if chosen.any() else h)

    with pytest.raises(ValueError, match="no axis"):
        find_permutations(*build(lambda: (Net(way, **ends()), negative())))
