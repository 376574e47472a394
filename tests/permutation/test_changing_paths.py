"""What is found keeps the function where the network takes another path."""

import re

import pytest
import torch
from helpers.changing_paths import CHANGING, ends, negative, unit
from helpers.model_zoo import Wired, build
from helpers.zoo import outputs_stay
from torch import nn

from opacus_shuffle.permutation import find_permutations


@pytest.mark.parametrize("name", CHANGING)
def test_outputs_stay_on_inputs_that_take_another_path(name):
    assert outputs_stay(CHANGING[name])


def on_its_sample(name):
    return build(lambda: CHANGING[name]()[:2])


def test_unreached_parameters_stay_with_every_axis_of_their_sizes_until_a_sample_reaches_them():
    module, x = on_its_sample("a_token_for_masked_places")
    spec = find_permutations(module, x)
    assert spec.unreached == ("token",)
    assert [factor.name for factor in spec.factors if factor.free] == ["units of unit.0"]
    assert "Not reached by the samples: token" in spec.describe()
    reached = find_permutations(module, x, more_samples=[{"x": x, "mask": x[..., 0] > 0}])
    assert not reached.unreached
    assert "token" in reached.blocks


def test_lines_at_which_values_are_read_are_listed_and_further_samples_are_traced():
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(h.cumsum(-1) if x.sum() > 0 else h)

    module, x = build(lambda: (Wired(way, **ends()), negative()))
    spec = find_permutations(module, x)
    (line,) = spec.reads
    assert line.startswith("test_changing_paths.py:")
    assert f"Python reads values at {line}" in spec.describe()
    with pytest.raises(ValueError, match=r"no axis .*\(cumsum\)"):
        find_permutations(module, x, more_samples=[-x])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (None, "more_samples must be"),
        ("x", "more_samples must be"),
        ([negative(), torch.zeros(2, 7)], r"^more_samples\[1\] does not run through"),
        ([negative(), "x"], r"^more_samples\[1\] must be a tensor"),
    ],
)
def test_errors_about_more_samples_name_the_sample(more, message):
    with pytest.raises(ValueError, match=message):
        find_permutations(*on_its_sample("one_of_two_layers"), more_samples=more)


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


def test_what_stays_is_listed_with_what_has_fixed_it_and_where():
    def way(net, x):
        h = torch.relu(net.enter(x))
        return net.leave(torch.tanh(net.unit(h.cumsum(-1))))

    spec = find_permutations(*build(lambda: (Wired(way, **ends(), unit=unit()), negative())))
    assert re.fullmatch(
        r"axis 0: test_changing_paths.py:\d+ \(cumsum\); axis 1: .*py:\d+ \(addmm\) of enter",
        spec.causes["enter.weight"],
    )
    assert spec.causes["leave.bias"] == "axis 0: an output of the network"
    assert set(spec.causes) == set(spec.unmoved)
    assert "(cumsum)" in spec.describe()
