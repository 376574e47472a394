"""Runs whose users convert, replace or add tensors, have hooks of their own, or begin another run over the same parameters."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from helpers.shuffled_runs import EXACT, both_modes, build, contents, distance, drawn, moved, off, records, unreleased, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.permutation import find_permutations

VISIBLE = 1e-3


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def begin(network: nn.Module, shuffle_mode: str = "on_release", before=lambda optimizer: None):
    """A network with a shuffler, and its training step; ``before`` gets the optimizer earlier than the shuffler."""
    x, optimizer = records("mlp")[:5][0], torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    before(optimizer)
    generator = torch.Generator().manual_seed(20_260_101)
    shuffler = WeightShuffler(network, find_permutations(network, x), optimizer, mode=shuffle_mode, generator=generator)

    def step():
        optimizer.zero_grad()
        network(x).square().sum().backward()
        optimizer.step()

    step()
    return shuffler, optimizer, step


def converted(network: nn.Module) -> None:
    network.to(torch.float32).to(torch.float64)


def assigned(network: nn.Module) -> None:
    network.load_state_dict(network.state_dict(), assign=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("change", [converted, assigned])
@pytest.mark.parametrize("averaged", [False, True])
def test_tensors_that_have_come_in_the_place_of_others_are_copied_permuted(copied, change, averaged):
    network = build("buffered")
    shuffler, optimizer, step = begin(network)
    module: nn.Module = AveragedModel(network) if averaged else network
    whole = module.module if averaged else network  # type: ignore[union-attr]
    change(whole)
    optimizer.param_groups[0]["params"] = list(network.parameters())
    step()
    x = records("mlp")[:5][0]
    own, outputs = {**weights(whole), "scale": whole.scale.clone()}, module(x).detach()
    found = copied(module)
    assert float((found(x) - outputs).detach().abs().max()) <= EXACT
    inside = found.module if averaged else found
    for name in ("scale", "one.weight", "middle.weight"):
        assert float((inside.state_dict()[name] - own[name]).abs().max()) > VISIBLE
    shuffler.end()
    assert not any("__reduce_ex__" in vars(part) for each in (network, whole, found) for part in each.modules())


def test_a_traced_network_is_copied_permuted_and_its_copies_can_be_copied():
    network = torch.fx.symbolic_trace(build("mlp"))
    begin(network)
    x = records("mlp")[:5][0]
    for copied in (copy.deepcopy, pickled):
        found = copied(network)
        assert float((copied(found)(x) - network(x)).detach().abs().max()) <= EXACT
        assert off(weights(found), weights(network)) > VISIBLE


def test_state_dict_hooks_that_were_there_before_see_permuted_copies():
    network = build("mlp")
    network[0].register_state_dict_post_hook(
        lambda part, state, prefix, _: state.update({name: value.clone() for name, value in state.items()})
    )

    def before(optimizer):
        optimizer.register_state_dict_post_hook(
            lambda _, state: {**state, "kept": state["state"][0]["momentum_buffer"].clone()}
        )

    shuffler, optimizer, _ = begin(network, before=before)
    state = network.state_dict()
    assert off(state, moved(shuffler.spec, drawn(shuffler), weights(network))) == 0
    kept = optimizer.state_dict()
    assert torch.equal(kept["kept"], kept["state"][0]["momentum_buffer"])
    assert not torch.equal(kept["kept"], optimizer.state[network[0].weight]["momentum_buffer"])


def test_step_hooks_that_were_there_before_see_permuted_weights():
    network, seen = build("mlp"), []
    shuffler, _, step = begin(
        network, before=lambda optimizer: optimizer.register_step_post_hook(lambda *_: seen.append(network.state_dict()))
    )
    assert off(seen[0], moved(shuffler.spec, drawn(shuffler), weights(network))) == 0
    assert off(seen[0], network.state_dict()) == 0
    step()
    assert shuffler.shuffles == 2


class SavesAnother(nn.Linear):
    """Saves something that it has made of its weight."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].to(torch.float32)


def test_what_a_layer_saves_in_the_place_of_its_weight_is_refused_unless_released():
    network = build("mlp")
    network[0].__class__ = SavesAnother
    shuffler, _, _ = begin(network)
    for part in (network, network[0]):
        with pytest.raises(ValueError, match=r"weight in the state_dict is not the tensor that SavesAnother.*release\(\)"):
            part.state_dict()
    shuffler.release()
    assert torch.equal(network.state_dict()["0.weight"], network[0].weight.float())


@both_modes
def test_a_network_that_has_got_new_parameters_is_refused_by_their_names(shuffle_mode):
    network = build("mlp")
    _, _, step = begin(network, shuffle_mode)
    network.add_module("probe", nn.Linear(9, 9).double())
    network.forward = lambda x: nn.Sequential.forward(network[:5], x)
    show = step if shuffle_mode == "every_step" else network.state_dict
    with pytest.raises(ValueError, match=r"new parameters.*probe\.weight, probe\.bias.*make_private"):
        show()
    del network.probe
    network.state_dict()


def test_what_was_not_released_is_when_shuffling_at_every_step_begins():
    network = build("mlp")
    first, optimizer, _ = begin(network)
    before, shown = weights(network), network.state_dict()
    shuffler = WeightShuffler(network, first.spec, optimizer)
    assert off(shown, weights(network)) == 0
    assert off(network.state_dict(), before) > VISIBLE
    assert (first.shuffles, shuffler.shuffles) == (1, 0)


def test_what_was_not_released_of_a_network_is_when_its_optimizer_begins_on_another():
    network = build("mlp")
    first, optimizer, _ = begin(network)
    before, part = weights(network), network[2:]
    spec = find_permutations(part, torch.ones(3, 16, dtype=torch.float64))
    WeightShuffler(part, spec, optimizer, mode="on_release")
    assert off({"0.weight": network.state_dict()["0.weight"]}, before) > VISIBLE
    assert first.shuffles == 1


def test_nothing_is_shuffled_in_the_middle_of_a_batch():
    run = unreleased()
    x, y = next(iter(run.loader))
    run.optimizer.zero_grad()
    run.criterion(run.model(x), y).backward()
    before = contents(run)
    with pytest.raises(ValueError, match=r"shuffle_\(\) in the middle of a batch"):
        run.shuffler.shuffle_()
    assert distance(before, contents(run)) == 0
    assert run.shuffler.shuffles == 0


def test_a_parameter_can_be_viewed_in_every_way_that_pytorch_has():
    network = build("mlp")
    begin(network)
    weight = network[0].weight.detach()
    assert torch.equal(network[0].weight.view(size=(5, 16)), weight.view(5, 16))
    assert torch.equal(network[0].weight.view(dtype=torch.int64), weight.view(torch.int64))


def test_showing_a_network_walks_through_it_a_fixed_number_of_times(monkeypatch):
    def walks(depth):
        network = nn.Sequential(*[nn.Linear(5, 5) for _ in range(depth)]).double()
        begin(network)
        network.state_dict()
        calls, walk = [0], nn.Module.named_modules

        def counted(self, *arguments, **keywords):
            calls[0] += self is network
            return walk(self, *arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", counted)
            network.state_dict()
        return calls[0]

    assert walks(4) == walks(8)


@both_modes
def test_a_step_with_loaded_weights_and_the_state_of_others_comes_with_a_warning(shuffle_mode):
    network = build("mlp")
    _, optimizer, step = begin(network, shuffle_mode)
    best = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
    step()
    network.load_state_dict(best[0])
    with pytest.warns(UserWarning, match=r"weights were loaded.*SGD.*another order.*state\.clear\(\)"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        for order in (1, -1):
            for owner, state in [(network, best[0]), (optimizer, best[1])][::order]:
                owner.load_state_dict(state)
            step()
        optimizer.state.clear()
        network.load_state_dict(best[0])
        step()
