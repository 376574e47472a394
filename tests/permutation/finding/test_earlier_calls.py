"""What is found keeps the function also of a network that was called before, and leaves what calls change as it was."""

from __future__ import annotations

import copy
from collections import deque

import numpy as np
import pytest
import torch
from helpers.changing_paths import Net, ends, negative, unit
from helpers.model_zoo import build, run
from helpers.zoo import DOUBLE, distance, found_if_any, same
from torch import nn

from opacus_shuffle.permutation import find_permutations

CALLS = 14


class Clock:
    """A plain object with a count."""

    def __init__(self):
        self.ticks = 0

    def tick(self):
        self.ticks += 1
        return self.ticks


def counts_in_an_attribute(net, h):
    net.kept = (net.kept or 0) + 1
    return h.flip(-1) if net.kept > 10 else h


def counts_in_training(net, h):
    net.kept = (net.kept or 0) + net.training
    return h.flip(-1) if net.kept > 10 else h


def counts_in_a_dictionary(net, h):
    net.table["steps"] += 1
    return h.cumsum(-1) if net.table["steps"] % 9 == 8 else h


def counts_in_a_helper(net, h):
    return h.flip(-1) if net.clock.tick() == 12 else h


def counts_in_a_tensor(net, h):
    net.number += 1
    return h.flip(-1) if net.number > 10 else h


def goes_from_state_to_state(net, h):
    net.kept = {None: "first", "first": "second"}.get(net.kept, "last")
    return h.flip(-1) if net.kept == "last" else h


def keeps_a_history(net, h):
    net.rows.append(len(h))
    return h.flip(-1) if len(net.rows) > 2 else h


def turns_over(net, h):
    """Its second call takes back what the first one changed."""
    before, net.table["steps"] = net.table["steps"], 1 - net.table["steps"]
    return h.flip(-1) if before else h


def puts_another_buffer_in_place(net, h):
    before, net.past = net.past, torch.ones(1)
    return h.flip(-1) if before.dim() else h


WAYS = (
    *(counts_in_an_attribute, counts_in_training, counts_in_a_dictionary, counts_in_a_helper, counts_in_a_tensor),
    *(goes_from_state_to_state, keeps_a_history, turns_over, puts_another_buffer_in_place),
)


def counting(way, **layers):
    def builder():
        network = Net(lambda net, x: net.leave(way(net, torch.relu(net.enter(x)))), **ends(), **layers)
        network.kept, network.table, network.rows, network.clock = None, {"steps": 0}, [], Clock()
        network.number = torch.zeros(())
        network.line = deque(["nothing"], maxlen=1)
        network.register_buffer("past", torch.zeros(()))
        return network, negative()

    return build(builder)


@pytest.mark.parametrize("way", WAYS)
def test_outputs_stay_however_often_the_network_was_called(way):
    network, x = counting(way)
    if (spec := found_if_any(network, x)) is None:
        return
    for training in (True, False):
        plain, shuffled = copy.deepcopy(network).train(training), copy.deepcopy(network).train(training)
        spec.apply_(shuffled, spec.sample())
        assert all(distance(run(plain, x), run(shuffled, x)) <= DOUBLE for _ in range(CALLS))


def in_a_deque(net, seen):
    before = net.line[0]
    net.line.append(seen)
    return before


def in_a_set(net, seen):
    before, net.rows = net.rows, {seen}
    return next(iter(before), None)


def in_a_tuple(net, seen):
    before, net.kept = net.kept, (seen,)
    return before and before[0]


def in_bytes(net, seen):
    before, net.kept = net.kept, seen.encode()
    return before and before.decode()


def in_an_array(net, seen):
    before, net.kept = net.kept, np.array([seen])
    return before is not None and before[0]


def as_a_function(net, seen):
    before, net.kept = net.kept, str.lower if seen == "training" else str.upper
    return before and "evaluation" if before is str.upper else "training"


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("keep", [in_a_deque, in_a_set, in_a_tuple, in_bytes, in_an_array, as_a_function])
def test_what_was_kept_of_a_call_in_evaluation_mode_is_met_wherever_it_lies(keep, marked):
    def way(net, h):
        before = keep(net, "training" if net.training else "evaluation")
        net.called = marked  # by which alone all calls look alike
        return h.flip(-1) if before == "evaluation" else h

    network, x = counting(way)
    network.called = False
    with pytest.raises(ValueError, match="has no axis that may be permuted"):
        find_permutations(network, x)


def longer_than_before(net, h):
    """By a text, which no comparison of sizes notices."""
    before, net.kept = net.kept, "2 rows" if len(h) == 2 else "many"
    return h.flip(-1) if before == "2 rows" else h


def positive_before(net, h):
    before, net.kept = net.kept, "yes" if bool((net.seen > 0).all()) else "no"
    return h.flip(-1) if before == "yes" else h


@pytest.mark.parametrize(("way", "more"), [(longer_than_before, negative()[:2]), (positive_before, -negative())])
def test_what_a_further_sample_leaves_behind_is_met_by_the_first_one(way, more):
    def forward(net, x):
        net.seen = x
        return net.leave(way(net, torch.relu(net.enter(x))))

    network, x = build(lambda: (Net(forward, **ends()), negative()))
    network.kept = network.seen = None
    with pytest.raises(ValueError, match="has no axis that may be permuted"):
        find_permutations(network, x, more_samples=[more])


def test_a_count_that_changes_nothing_pins_nothing():
    def way(net, h):
        net.kept = (net.kept or 0) + 1
        return net.unit(h) if net.kept > 10 else h

    network, x = counting(way, unit=unit())
    assert find_permutations(network, x).log2_size() > 28  # 12!, of the unit


def writes_in_place(net, x):
    for average, each in zip(net.other.parameters(), net.enter.parameters(), strict=True):
        average.mul_(0.9).add_(each, alpha=0.1)


def writes_around_autograd(net, x):
    for average, each in zip(net.other.parameters(), net.enter.parameters(), strict=True):
        average.data.mul_(0.9).add_(each.data, alpha=0.1)


def puts_new_data_in_place(net, x):
    for average, each in zip(net.other.parameters(), net.enter.parameters(), strict=True):
        average.data = 0.9 * average.data + 0.1 * each.data


@pytest.mark.parametrize("update", [writes_in_place, writes_around_autograd, puts_new_data_in_place])
def test_averages_of_parameters_that_forward_updates_are_left_as_they_were_and_move_with_these(update):
    def way(net, x):
        with torch.no_grad():
            update(net, x)
        return net.leave(torch.relu(net.enter(x)) + torch.relu(net.other(x)))

    network, x = build(lambda: (Net(way, **ends(), other=nn.Linear(4, 8)), negative()))
    before, places = copy.deepcopy(network), [parameter.data_ptr() for parameter in network.parameters()]
    spec = find_permutations(network, x)
    assert same(network, before)
    assert [parameter.data_ptr() for parameter in network.parameters()] == places
    assert round(2 ** spec.log2_size()) == 40320  # 8!
