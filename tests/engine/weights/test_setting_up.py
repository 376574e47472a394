"""Shuffling as a flag: setting it up, once and again, by hand, and for networks that do unusual things."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from helpers.perceptron import X
from helpers.perceptron import mlp as perceptron
from helpers.shuffled_runs import (
    BATCH,
    EXACT,
    RECORDS,
    build,
    contents,
    distance,
    drawn,
    drawn_each,
    in_order,
    in_record,
    logits,
    moved,
    prepare,
    records,
    unshuffle,
    weights,
)
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import TensorDataset

from opacus_shuffle import PrivacyEngine, ShuffleGradSampleModule
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.permutation import PermutationSpec, find_permutations

STEPS = RECORDS // BATCH  # of an epoch

# Setting up again
# --------------------------------------------------------------------------------------------------------


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


def test_set_up_twice_there_is_one_shuffler():
    run = prepare(shuffle=True).train(1)
    first, before = run.shuffler, contents(run)
    again(run, shuffle_weights=True)
    assert run.shuffler is not first
    assert run.model.shuffler is run.shuffler
    assert distance(before, contents(run)) == 0
    run.train(1)
    assert (first.shuffles, run.shuffler.shuffles) == (STEPS, STEPS)


def test_set_up_again_without_the_flag_shuffling_ends():
    run = prepare(shuffle=True).train(1)
    first = run.shuffler
    again(run)
    assert run.engine.shuffler is None
    assert type(run.model) is GradSampleModule
    assert not hasattr(run.model, "shuffler")
    run.train(1)
    assert first.shuffles == STEPS


def test_another_optimizer_for_the_same_network_ends_the_first_shuffler():
    run = prepare(shuffle=True).train(1)
    first = run.shuffler
    again(
        run,
        optimizer=torch.optim.SGD(run.network.parameters(), lr=0.1, momentum=0.9),
        shuffle_weights=first.spec,
    )
    run.train(1)
    assert run.shuffler.spec is first.spec
    assert (first.shuffles, run.shuffler.shuffles) == (STEPS, STEPS)


def test_shuffling_can_begin_later_and_training_goes_on():
    plain, run = (prepare(**in_order).train(1) for _ in range(2))
    again(plain, **in_order)
    again(
        run,
        shuffle_weights=True,
        shuffle_generator=torch.Generator().manual_seed(20_260_101),
        **in_order,
    )
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
        spent.append(
            engine.get_epsilon(1e-5, **({} if accountant == "rdp" else {"bound": "certified"}))
        )
    assert spent[0] == spent[1] > 0


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


# By hand
# -----------------------------------------------------------------------------------------------------------------


def train_by_hand(network, wrapped, sgd, mode="hooks", before_step=lambda: None):
    """An epoch as with Opacus's classes alone, without an engine."""
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    kind = DPOptimizerFastGradientClipping if mode == "ghost" else DPOptimizer
    optimizer = kind(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=BATCH)
    criterion = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")
    for start in range(0, RECORDS, BATCH):
        x, y = records("mlp")[start : start + BATCH]
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        before_step()
        optimizer.step()
    return weights(network)


def momentum(network):
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("attached", ["at once", "by a call", "at the first step"])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_made_by_hand_it_trains_as_opacus_wrapper_whenever_it_gets_its_optimizer(mode, attached):
    from opacus.grad_sample.utils import wrap_model

    keywords = {"max_grad_norm": 1.0} if mode == "ghost" else {}
    plain, network = build("mlp"), build("mlp")
    expected = train_by_hand(
        plain, wrap_model(plain, mode, True, **keywords), momentum(plain), mode
    )
    sgd = momentum(network)
    model = ShuffleGradSampleModule(
        network,
        generator=torch.Generator().manual_seed(20_260_101),
        grad_sample_mode=mode,
        **({"optimizer": sgd} if attached == "at once" else {}),
        **keywords,
    )
    if attached == "by a call":
        model.attach(sgd)
    assert any(hasattr(layer, "ft_compute_sample_grad") for layer in network) == (
        mode == "functorch"
    )
    found = train_by_hand(network, model, sgd, mode)
    assert model.shuffler.shuffles == model.shuffler.steps == STEPS
    assert distance(expected, found) > 1e-3
    spec = model.permutations
    spec.apply_(network, spec.invert(drawn(model.shuffler)), sgd)
    assert distance(expected, weights(network)) <= EXACT


def test_without_an_optimizer_it_is_opacus_wrapper():
    """It computes, has gradients per record, is copied and saved, and no optimizer of another network attaches it."""
    network, x = build("mlp"), records("mlp")[:5][0]
    model = ShuffleGradSampleModule(network)
    assert isinstance(model, GradSampleModule)
    model(x).square().sum().backward()
    stock = GradSampleModule(build("mlp"))
    stock(x).square().sum().backward()
    for own, other in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(own.grad_sample, other.grad_sample)
    assert list(model.state_dict()) == list(stock.state_dict())
    other = build("mlp")
    other(x).sum().backward()
    momentum(other).step()
    assert (model.shuffler.steps, model.shuffler.shuffles) == (0, 0)
    model.zero_grad()
    assert model.to_standard_module() is network


def test_attached_to_another_optimizer_it_follows_that_one_alone():
    network = build("mlp")
    first, second = momentum(network), momentum(network)
    model = ShuffleGradSampleModule(network, optimizer=first)
    model.attach(second)
    for optimizer, shuffles in ((first, 0), (second, 1)):
        network(records("mlp")[:5][0]).sum().backward()
        optimizer.step()
        assert model.shuffler.shuffles == shuffles


@pytest.mark.parametrize("late", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_optimizer_that_cannot_be_followed_is_refused_before_its_first_step(late):
    network = build("mlp")
    model, before = ShuffleGradSampleModule(network), weights(network)
    model(records("mlp")[:5][0]).square().sum().backward()
    optimizer = late(network.parameters())
    for attach in (model.attach, lambda optimizer: optimizer.step(lambda: 0.0)):
        with pytest.raises(ValueError, match=f"{late.__name__}.*use SGD"):
            attach(optimizer)
    assert distance(before, weights(network)) == 0
    assert model.shuffler.steps == 0


class HoldsTensors(torch.optim.SGD):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.averages = [
            each.detach().clone() for group in self.param_groups for each in group["params"]
        ]


def test_shufflers_that_could_not_do_their_work_are_refused():
    network, other = perceptron(), perceptron()
    spec = find_permutations(network, X)
    with pytest.raises(ValueError, match="trains none of the parameters"):
        WeightShuffler(network, spec, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="averages"):
        WeightShuffler(network, spec, HoldsTensors(network.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="moves nothing"):
        WeightShuffler(
            network, PermutationSpec((), {}, {}), torch.optim.SGD(network.parameters(), lr=0.1)
        )
    shuffler = WeightShuffler(network, spec, torch.optim.SGD(network.parameters(), lr=0.1))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match=r"cannot be copied or pickled.*state_dict\(\)"):
            copied(shuffler)


def test_made_by_hand_it_takes_specifications_levels_and_opacus_own_keywords():
    network = build("encoder")
    sample, sgd = records("encoder")[:2][0], torch.optim.SGD(network.parameters(), lr=0.1)
    spec = find_permutations(network, sample, groups="paper")
    model = ShuffleGradSampleModule(
        network, optimizer=sgd, groups=spec, sample_input=sample, loss_reduction="sum"
    )
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


# What else users do
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize("part", ["model", "network"])
def test_copies_compute_the_same_are_opacus_own_and_have_nothing_to_do_with_the_run(part, copied):
    run = prepare(shuffle=True).train(1)
    x = records("mlp")[:5][0]
    found = copied(getattr(run, part))
    assert type(found) is (GradSampleModule if part == "model" else nn.Sequential)
    assert distance(contents_of(found), weights(run.network)) == 0
    before = contents_of(found)
    run.train(1)
    assert distance(before, contents_of(found)) == 0
    shuffles, after = run.shuffler.shuffles, weights(run.network)
    found.eval()(x)
    found.load_state_dict(found.state_dict())
    assert run.shuffler.shuffles == shuffles
    assert distance(after, weights(run.network)) == 0


def contents_of(module):
    return weights(getattr(module, "_module", module))


def test_a_network_that_has_got_new_parameters_is_refused_by_their_names():
    network = build("mlp")
    optimizer = momentum(network)
    WeightShuffler(network, find_permutations(network), optimizer)
    network.add_module("probe", nn.Linear(3, 3).double())
    network(records("mlp")[:5][0]).sum().backward()
    with pytest.raises(
        ValueError, match=r"new parameters.*probe\.weight, probe\.bias.*make_private"
    ):
        optimizer.step()


def test_nothing_is_shuffled_in_the_middle_of_a_batch():
    run = prepare(shuffle=True).train(1)
    x, y = next(iter(run.loader))
    run.optimizer.zero_grad()
    run.criterion(run.model(x), y).backward()
    before, shuffles = contents(run), run.shuffler.shuffles
    with pytest.raises(ValueError, match=r"shuffle_\(\) in the middle of a batch"):
        run.shuffler.shuffle_()
    assert distance(before, contents(run)) == 0
    run.optimizer.step()
    before = contents(run)
    run.shuffler.shuffle_()
    assert run.shuffler.shuffles == shuffles + 2
    last = drawn_each(run.shuffler)[-1]
    assert distance(moved(run.shuffler.spec, last, before), contents(run)) == 0


def test_a_step_with_loaded_weights_and_the_state_of_others_comes_with_a_warning():
    network = build("mlp")
    optimizer = momentum(network)
    WeightShuffler(network, find_permutations(network), optimizer)

    def step():
        optimizer.zero_grad()
        network(records("mlp")[:5][0]).square().sum().backward()
        optimizer.step()

    step()
    best = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
    step()
    network.load_state_dict(best[0])
    with pytest.warns(
        UserWarning, match=r"weights were loaded.*SGD.*another order.*state\.clear\(\)"
    ):
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


class Speaking(nn.Sequential):
    """Has what Hugging Face's models have."""

    config = "of the network"

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(-1)


@pytest.mark.parametrize("mode", ["hooks", "ew", "ghost"])
def test_the_wrapper_offers_what_the_network_does_and_training_is_not_disturbed(mode):
    plain, run = (
        prepare(network=Speaking(*build("mlp")), mode=mode, shuffle=shuffle)
        for shuffle in (False, True)
    )
    x, words = records("mlp")[:5][0], []
    plain.train()
    run.train(before=lambda: words.append(run.model.generate(x)))
    assert torch.equal(run.model.generate(x), logits(run.network, x).argmax(-1))
    assert run.model.config == "of the network"
    with pytest.raises(AttributeError, match=r"Speaking.*nothing_like_it"):
        _ = run.model.nothing_like_it
    unshuffle(run)
    assert distance(weights(plain.network), weights(run.network)) <= EXACT


# Networks that do unusual things
# ----------------------------------------------------------------------------------------------


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
    plain, shuffled = (
        prepare(network=copy.deepcopy(network), shuffle=shuffle) for shuffle in (False, True)
    )
    for name, value in network.named_buffers():
        assert torch.equal(
            shuffled.network.get_buffer(name), value
        )  # a search for permutations leaves no trace
    for run in (plain, shuffled):
        run.train(1)
    assert "scale" in shuffled.shuffler.spec.buffers
    unshuffle(shuffled)
    assert distance(contents(plain), contents(shuffled)) <= EXACT


def test_a_network_whose_only_child_is_called_module_is_run_as_a_whole():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = build("mlp")

        def forward(self, x):
            return self.module(x.flatten(1))

    x, y = records("mlp").tensors
    plain, run = (
        prepare(network=Outer(), data=TensorDataset(x[:, :, None], y), shuffle=shuffle)
        for shuffle in (False, True)
    )
    for each in (plain, run):
        each.train(1)
    unshuffle(run)
    assert distance(contents(plain), contents(run)) <= EXACT


def test_a_plain_optimizer_is_followed_without_opacus_and_its_earlier_hooks_see_permuted_weights():
    network, other, seen = build("mlp"), build("mlp"), []
    x, y = records("mlp")[:]
    optimizers = [
        torch.optim.Adam(each.parameters(), lr=0.03, eps=0.03) for each in (network, other)
    ]
    optimizers[0].register_step_post_hook(lambda *_: seen.append(weights(network)))
    generator = torch.Generator().manual_seed(20_260_101)
    shuffler = WeightShuffler(
        network, find_permutations(network), optimizers[0], generator=generator
    )
    for _ in range(5):
        for each, optimizer in zip((network, other), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits(each, x), y).backward()
            optimizer.step()
    assert len(seen) == shuffler.shuffles == 5
    assert distance(seen[-1], weights(network)) == 0
    shuffler.spec.apply_(network, shuffler.spec.invert(drawn(shuffler)))
    assert distance(weights(network), weights(other)) <= EXACT
