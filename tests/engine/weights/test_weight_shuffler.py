"""Shuffling as a flag: setting it up, once and again, by hand, and for networks that do unusual things."""

from __future__ import annotations

import copy

import opacus
import pytest
import torch
from helpers.shuffled_runs import (
    BATCH,
    EXACT,
    RECORDS,
    both_modes,
    build,
    contents,
    distance,
    drawn,
    in_order,
    in_record,
    left,
    logits,
    moved,
    off,
    prepare,
    records,
    unreleased,
    unshuffle,
    weights,
)
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine, ShuffleGradSampleModule
from opacus_shuffle.core.randomness import KeyChain
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling
from opacus_shuffle.engine.weights_alone import WeightsAlone
from opacus_shuffle.permutation import find_permutations

# Setting up again, and by hand ------------------------------------------------------------------------------------------------


def again(run, **changes):
    """The same objects through make_private once more."""
    keywords = {
        "module": run.model,
        "optimizer": run.optimizer,
        "data_loader": run.loader,
        "noise_multiplier": 0.0,
        "max_grad_norm": 1.0,
        **changes,
    }
    results = run.engine.make_private(**in_record(**keywords))
    run.returned, run.optimizer, run.loader = results[0], results[1], results[-1]
    run.model = run.returned if isinstance(run.returned, nn.Module) else run.model
    return run


@both_modes
def test_set_up_twice_there_is_one_shuffler(shuffle_mode):
    run = prepare(shuffle=True, shuffle_mode=shuffle_mode).train(1)
    first, stopped, before = run.shuffler, run.shuffler.shuffles, contents(run)
    again(run, shuffle_weights=True, shuffle_mode=shuffle_mode)
    assert run.shuffler is not first
    assert run.model.shuffler is run.shuffler
    assert distance(before, contents(run)) == 0
    run.train(1)
    run.model.state_dict()
    assert first.shuffles == stopped
    assert run.shuffler.shuffles == (RECORDS // BATCH if shuffle_mode == "every_step" else 1)
    assert len(run.plain_optimizer._optimizer_step_pre_hooks) == 1
    assert len(run.plain_optimizer._optimizer_step_post_hooks) == 1
    for hooks in (run.plain_optimizer._optimizer_state_dict_post_hooks, *(e._state_dict_hooks for e in run.network.modules())):
        assert sum(not isinstance(each, WeightsAlone) for each in hooks.values()) == (shuffle_mode == "on_release")


@pytest.mark.parametrize("shown", [False, True])
def test_what_the_first_shuffler_has_not_released_the_second_one_shows_permuted(shown):
    run = unreleased()
    first, before = run.shuffler, contents(run)
    if shown:
        run.model.state_dict()
    again(run, shuffle_weights=first.spec, shuffle_mode="on_release")
    key = run.shuffler.state_dict()["key"]
    found = left(run.model.state_dict(), run.optimizer.state_dict(), run.network)
    expected = moved(first.spec, first.spec.sample(KeyChain(key).next_generator()), before)
    assert off(found, expected) == 0
    assert off(found, before) > 1e-3
    first.release()  # has nothing to say any more
    assert distance(before, contents(run)) == 0
    run.shuffler.release()
    assert distance(expected, contents(run)) == 0


@both_modes
def test_set_up_again_without_the_flag_shuffling_ends(shuffle_mode):
    run = prepare(shuffle=True, shuffle_mode=shuffle_mode).train(1)
    first = run.shuffler
    again(run)
    assert run.engine.shuffler is None
    assert type(run.model) is GradSampleModule
    assert not hasattr(run.model, "shuffler")
    before, stopped = contents(run), first.shuffles
    run.model.state_dict()
    assert distance(before, contents(run)) == 0
    run.train(1)
    assert first.shuffles == stopped
    assert not run.plain_optimizer._optimizer_step_post_hooks
    assert all(isinstance(each, WeightsAlone) for each in run.network._state_dict_hooks.values())
    assert not run.network._state_dict_pre_hooks


@pytest.mark.parametrize("found", [True, False], ids=["found again", "given"])
def test_another_optimizer_for_the_same_network_ends_the_first_shuffler(found):
    plain, run = prepare().train(1), unreleased()
    first, spec = run.shuffler, run.shuffler.spec
    for each, options in ((plain, {}), (run, {"shuffle_weights": found or spec, "shuffle_mode": "on_release"})):
        each.plain_optimizer = torch.optim.SGD(each.network.parameters(), lr=0.1, momentum=0.9)
        again(each, optimizer=each.plain_optimizer, **options)
        each.loader.batch_sampler.generator.manual_seed(5)
    run.shuffler._secret.generator = torch.Generator().manual_seed(1)
    for each in (plain, run):
        each.train(1)
    shown = left(run.model.state_dict(), run.optimizer.state_dict(), run.network)
    plan = spec.sample(torch.Generator().manual_seed(1))
    assert off(shown, moved(spec, plan, contents(run))) == 0
    for each in (plain, run):
        each.train(1)
    assert (first.shuffles, run.shuffler.shuffles) == (0, 1)
    assert run.shuffler.spec == spec
    assert distance(contents(plain), contents(run)) == 0
    run.model.release()
    generator = torch.Generator().manual_seed(1)
    later = [spec.sample(generator) for _ in range(2)][-1]
    assert distance(moved(spec, later, contents(plain)), contents(run)) == 0


def test_shuffling_can_begin_later_and_training_goes_on():
    plain, run = (prepare(**in_order).train(1) for _ in range(2))
    again(plain, **in_order)
    again(run, shuffle_weights=True, shuffle_generator=torch.Generator().manual_seed(20_260_101), **in_order)
    for each in (plain, run):
        each.train(1)
    assert run.shuffler.shuffles == RECORDS // BATCH
    unshuffle(run)
    assert distance(contents(plain), contents(run)) <= EXACT


@pytest.mark.parametrize("accountant", ["rdp", "shuffled_checkin", "subsampled_shuffle"])
def test_epsilon_is_the_same_with_and_without_shuffling(accountant):
    spent = []
    for shuffle in (False, True):
        engine = PrivacyEngine(accountant=accountant)
        prepare(shuffle=shuffle, engine=engine, sigma=2.0).train()
        spent.append(engine.get_epsilon(1e-5, **({} if accountant == "rdp" else {"bound": "certified"})))
    assert spent[0] == spent[1] > 0


@pytest.mark.parametrize("accountant", ["gdp", pytest.param("rdp", marks=pytest.mark.zoo)])
def test_a_target_epsilon_goes_with_shuffling(accountant):
    found = []
    for shuffle in (False, True):
        engine, network = PrivacyEngine(accountant=accountant), build("mlp")
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=network,
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            data_loader=DataLoader(records("mlp"), batch_size=BATCH),
            target_epsilon=5.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
            **({"shuffle_weights": WeightShuffling(groups="heads", mode="on_release")} if shuffle else {}),
        )
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append((optimizer.noise_multiplier, engine.get_epsilon(1e-5)))
    assert found[0] == found[1]
    assert isinstance(model, ShuffleGradSampleModule)
    assert (engine.shuffler.mode, engine.shuffler.spec.level) == ("on_release", "heads")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_in_every_mode_the_model_is_opacus_and_ours(mode):
    run, plain = prepare(mode=mode, shuffle=True), prepare(mode=mode)
    assert isinstance(run.model, ShuffleGradSampleModule)
    assert isinstance(run.model, type(plain.model))
    assert not isinstance(plain.model, ShuffleGradSampleModule)
    assert run.model.shuffler is run.engine.shuffler
    assert plain.engine.shuffler is None
    assert run.model.permutations is run.shuffler.spec
    assert type(run.model).__name__ in repr(run.model)
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    run.train(1)
    assert run.model.to_standard_module() is run.network
    assert not any(hasattr(parameter, "grad_sample") for parameter in run.network.parameters())


def test_without_wrapping_opacus_hooks_come_back_and_the_engine_has_the_shuffler():
    run = prepare(shuffle=True, wrap_model=False)
    assert not isinstance(run.returned, nn.Module)
    assert not isinstance(run.returned, ShuffleGradSampleModule)
    run.train(1)
    assert run.engine.shuffler.shuffles == RECORDS // BATCH
    run.returned.cleanup()


def test_what_the_wrapper_passes_through_stays():
    run = prepare("encoder", shuffle=True)
    assert run.model.attention is run.network.attention
    assert run.model.forbid_grad_accumulation() is None
    with pytest.raises(AttributeError):
        run.model.no_such_thing  # noqa: B018
    run.model.eval()
    assert not run.network.training
    run.model.zero_grad()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@both_modes
def test_made_by_hand_it_trains_as_the_engines(mode, shuffle_mode):
    from opacus.grad_sample.utils import wrap_model
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    found = []
    for shuffle in (False, True):
        network = build("mlp")
        sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        keywords = {"max_grad_norm": 1.0} if mode == "ghost" else {}
        if shuffle:
            model = ShuffleGradSampleModule(
                network,
                optimizer=sgd,
                sample_input=records("mlp")[:2][0],
                mode=shuffle_mode,
                generator=torch.Generator().manual_seed(20_260_101),
                grad_sample_mode=mode,
                **keywords,
            )
            assert isinstance(model, ShuffleGradSampleModule)
            assert isinstance(model, type(found[0][0]))
            forced = [hasattr(layer, "ft_compute_sample_grad") for layer in network]
            assert any(forced) == (mode == "functorch")
        else:
            model = wrap_model(network, mode, True, **keywords)
        kind = DPOptimizerFastGradientClipping if mode == "ghost" else DPOptimizer
        optimizer = kind(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=BATCH)
        criterion = nn.CrossEntropyLoss()
        if mode == "ghost":
            criterion = DPLossFastGradientClipping(model, optimizer, criterion, "mean")
        for start in range(0, RECORDS, BATCH):
            x, y = records("mlp")[start : start + BATCH]
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        found.append((model, network, sgd))
    (_, plain, _), (model, network, sgd) = found
    if shuffle_mode == "on_release":
        assert model.shuffler.shuffles == 0
        model.release()
    assert model.shuffler.shuffles == (RECORDS // BATCH if shuffle_mode == "every_step" else 1)
    assert distance(weights(plain), weights(network)) > 1e-3
    spec = model.permutations
    spec.apply_(network, spec.invert(drawn(model.shuffler)), sgd)
    assert distance(weights(plain), weights(network)) <= EXACT


def test_made_by_hand_it_takes_specifications_levels_and_opacus_own_keywords():
    network = build("encoder")
    sample, sgd = records("encoder")[:2][0], torch.optim.SGD(network.parameters(), lr=0.1)
    spec = find_permutations(network, sample, groups="paper")
    model = ShuffleGradSampleModule(network, optimizer=sgd, groups=spec, sample_input=sample, loss_reduction="sum")
    assert model.permutations is spec
    assert model.loss_reduction == "sum"
    model.to_standard_module()
    model = ShuffleGradSampleModule(network, optimizer=sgd, groups="heads", sample_input=sample)
    assert model.permutations.level == "heads"
    assert len(sgd._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"grad_sample_mode": "hook"}, "hook"),
        ({"mode": "never"}, "mode must be one of"),
        ({"generator": 3}, "generator must be"),
        ({"groups": "all"}, "groups"),
        ({"groups": None}, "groups"),
        ({"sample_input": torch.zeros(2, 9)}, "sample_input"),
        ({"optimizer": 3}, "optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
        ({"optimizer": torch.optim.Adafactor}, "Adafactor"),
    ],
)
def test_made_by_hand_nonsense_is_refused_and_the_network_is_left_alone(changes, match):
    network = build("mlp")
    optimizer = changes.get("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = optimizer(network.parameters()) if callable(optimizer) else optimizer
    with pytest.raises(ValueError, match=match):
        ShuffleGradSampleModule(network, **{**changes, "optimizer": optimizer})
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in network.modules())
    assert not any(hasattr(parameter, "grad_sample") for parameter in network.parameters())
    assert not getattr(optimizer, "_optimizer_step_post_hooks", None)


# Networks that do unusual things ----------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Keeps a running mean of its hidden units' weights in a buffer that is assigned anew, or written into."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.up, self.down, self.in_place = nn.Linear(5, 12), nn.Linear(12, 3), in_place
        self.register_buffer("scale", torch.rand(12) + 0.5)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        scale = self.scale.clone()
        if self.training and len(x):
            moved = 0.9 * self.scale + 0.1 * self.up.weight.detach().abs().mean(1)
            if self.in_place:
                self.scale.copy_(moved)
            else:
                self.scale = moved
        return self.down(hidden * scale)


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_move_with_the_units_they_belong_to(in_place):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        network = Gated(in_place).double()
    plain, shuffled = (prepare(network=copy.deepcopy(network), shuffle=shuffle) for shuffle in (False, True))
    for name, value in network.named_buffers():
        assert torch.equal(shuffled.network.get_buffer(name), value)  # a search for permutations leaves no trace
    for run in (plain, shuffled):
        run.train(1)
    assert "scale" in shuffled.shuffler.spec.buffers
    unshuffle(shuffled)
    assert distance(contents(plain), contents(shuffled)) <= EXACT
    run = unreleased(network=copy.deepcopy(network))
    shown = left(run.model.state_dict())
    assert distance(contents(plain), contents(run)) == 0
    assert off(shown, moved(run.shuffler.spec, drawn(run.shuffler), contents(plain))) == 0
    assert float((shown["scale"] - run.network.scale).abs().max()) > 1e-3


def test_a_network_whose_only_child_is_called_module_is_run_as_a_whole():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = build("mlp")

        def forward(self, x):
            return self.module(x.flatten(1))

    x, y = records("mlp").tensors
    plain, run = (prepare(network=Outer(), data=TensorDataset(x[:, :, None], y), shuffle=shuffle) for shuffle in (False, True))
    for each in (plain, run):
        each.train(1)
    unshuffle(run)
    assert distance(contents(plain), contents(run)) <= EXACT


def test_a_plain_optimizer_is_followed_without_opacus():
    network, other = build("mlp"), build("mlp")
    x, y = records("mlp")[:]
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.03, eps=0.03) for each in (network, other)]
    shuffler = WeightShuffler(
        network, find_permutations(network), optimizers[0], generator=torch.Generator().manual_seed(20_260_101)
    )
    for _ in range(5):
        for each, optimizer in zip((network, other), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits(each, x), y).backward()
            optimizer.step()
    assert shuffler.shuffles == 5
    shuffler.spec.apply_(network, shuffler.spec.invert(drawn(shuffler)))
    assert distance(weights(network), weights(other)) <= EXACT


def test_stock_opacus_networks_are_followed_inside_their_wrapper():
    model = GradSampleModule(build("mlp"))
    engine = opacus.PrivacyEngine(accountant="rdp")
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records("mlp"), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    shuffler = WeightShuffler(model, find_permutations(model), optimizer)
    x, y = records("mlp")[:BATCH]
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert shuffler.shuffles == 1
