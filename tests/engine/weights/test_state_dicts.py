"""What state dicts of a run in mode "on_release" are: permuted copies, whole, tied as the network is."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from helpers.shuffled_runs import (
    EXACT,
    build,
    contents,
    distance,
    drawn,
    drawn_each,
    in_order,
    moved,
    off,
    prepare,
    records,
    unreleased,
    weights,
)
from opacus.layers import DPLSTM
from torch import nn

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.permutation import find_permutations

VISIBLE = 1e-3


def test_what_has_left_is_a_copy():
    run = unreleased(optimizer="Adam")
    model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    kept = copy.deepcopy((model, optimizer))
    run.train(1)
    run.model.release()
    assert all(torch.equal(model[name], kept[0][name]) for name in model)
    for number, state in kept[1]["state"].items():
        assert all(torch.equal(value, optimizer["state"][number][key]) for key, value in state.items())
    with torch.no_grad():
        before = contents(run)
        for value in (*run.model.state_dict().values(), *run.optimizer.state_dict()["state"][0].values()):
            value.zero_()
    assert distance(before, contents(run)) == 0


def test_kept_variables_are_parameters_that_are_trained_as_those_of_the_network():
    run = prepare("mlp", shuffle=True, shuffle_mode="on_release")
    run.train(1)
    run.network[2].bias.requires_grad_(False)
    found = run.network.state_dict(keep_vars=True)
    assert all(isinstance(value, nn.Parameter) for value in found.values())
    assert [name for name, value in found.items() if not value.requires_grad] == ["2.bias"]
    assert not any(value is parameter for value in found.values() for parameter in run.network.parameters())


def test_a_state_dict_that_the_caller_began_is_filled_and_nothing_else_of_it_touched():
    run = unreleased()
    mine = collections.OrderedDict(other=torch.zeros(2))
    before = mine["other"]
    run.network.state_dict(destination=mine, prefix="net.")
    assert mine.pop("other") is before
    expected = moved(run.shuffler.spec, drawn(run.shuffler), weights(run.network))
    assert distance({name.removeprefix("net."): value for name, value in mine.items()}, expected) == 0


class Tied(nn.Module):
    """Ties that move, ties that stay in place, and a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("gpt2")
        self.one, self.other = nn.Linear(20, 20), nn.Linear(20, 20)
        self.other.weight = self.one.weight
        self.last = self.again = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).logits.cumsum(-1)
        return self.again(self.last(self.other(self.one(x).cumsum(-1)).cumsum(-1)).cumsum(-1)).cumsum(-1)


@pytest.mark.parametrize("place", ["", "inner"])
def test_tied_tensors_leave_as_one_and_load_as_one(place):
    network = Tied().double()
    x, optimizer = records("gpt2")[:2][0], torch.optim.SGD(network.parameters(), lr=0.1)
    spec = find_permutations(network, x)
    shuffler = WeightShuffler(network, spec, optimizer, mode="on_release")
    network(x).square().mean().backward()
    optimizer.step()
    part, copied = network.get_submodule(place), copy.deepcopy(network).get_submodule(place)
    expected: dict[int, set[str]] = collections.defaultdict(set)
    for name, tensor in copied.state_dict().items():
        expected[tensor.data_ptr()].add(name)
    state = part.state_dict()
    assert shuffler.shuffles == 1
    found: dict[int, set[str]] = collections.defaultdict(set)
    for name, tensor in state.items():
        found[tensor.data_ptr()].add(name)
    copied.load_state_dict(state)
    if not place:
        assert float((copied(x) - network(x)).detach().abs().max()) <= EXACT * float(network(x).detach().abs().max())
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, expected.values()))


class Recurrent(nn.Module):
    """Opacus's layer gives its parameters the names that PyTorch's have."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.rnn, self.out = nn.Linear(5, 6), DPLSTM(6, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(torch.tanh(self.into(x)))[0].mean(1))


def test_renamed_parameters_leave_permuted_under_all_their_names():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        network, again = Recurrent().double(), Recurrent().double()
    x, optimizer = records("encoder")[:5][0], torch.optim.SGD(network.parameters(), lr=0.1)
    shuffler = WeightShuffler(network, find_permutations(network, x), optimizer, mode="on_release")
    network(x).square().sum().backward()
    optimizer.step()
    state = network.state_dict()
    assert shuffler.shuffles == 1
    for name, value in network.named_parameters(remove_duplicate=False):
        if value.shape[-1] == 7 or "ih" in name:
            assert float((state[name] - value).detach().abs().max()) > VISIBLE, name
    again.load_state_dict(state)
    assert float((again(x) - network(x)).detach().abs().max()) <= EXACT


def test_weights_that_were_shown_and_loaded_are_not_shown_again_under_the_same_permutation_twice():
    run = unreleased()
    before = weights(run.network)["0.bias"]
    shown = run.model.state_dict()
    run.model.load_state_dict(shown)
    again = run.model.state_dict()
    one, two = shown["_module.0.bias"], again["_module.0.bias"]
    if not torch.equal(one, two):  # who sees both knows the permutation between them: it must not be the one to the run
        between = (two[:, None] - one).abs().argmin(1)
        back = torch.empty_like(one)
        back[between] = one
        assert float((back - before).abs().max()) > VISIBLE


def test_model_and_optimizer_that_left_one_after_the_other_belong_together():
    run = unreleased(optimizer="AMSGrad", **in_order)
    model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    plan = drawn(run.shuffler)
    run.train(1)
    again = prepare(optimizer="AMSGrad", **in_order)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    again.train(1)
    assert distance(contents(run), contents(again)) > VISIBLE
    spec = run.shuffler.spec
    spec.apply_(again.network, spec.invert(plan), again.plain_optimizer)
    assert distance(contents(run), contents(again)) <= EXACT


def test_a_network_whose_layers_were_replaced_since_its_last_release_shows_nothing():
    run = unreleased()
    run.model.release()
    run.train(1)
    before = weights(run.network)
    layer, run.network[0] = run.network[0], nn.Linear(5, 7).double()
    for show in (run.network.state_dict, run.network[2].state_dict, lambda: copy.deepcopy(run.network[2])):
        with pytest.raises(ValueError, match=r"0\.weight should have shape \(16, 5\), but has shape \(7, 5\)"):
            show()
    run.network[0] = layer
    assert off(run.network.state_dict(), moved(run.shuffler.spec, drawn_each(run.shuffler)[-1], before)) == 0
