"""Training with shuffled weights is training: the same run in another order, and ε as it was."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from helpers.model_zoo import Wired
from helpers.shuffled_runs import (
    BATCH,
    EPOCHS,
    EXACT,
    RECORDS,
    SHUFFLE_SEED,
    SeededRun,
    build,
    distance,
    drawn,
    inverses,
    logits,
    moved,
    records,
    spec_of,
    weights,
)
from opacus import GradSampleModule
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from opacus_shuffle import ShuffleGradSampleModule
from opacus_shuffle.networks.running import unwrap

pytestmark = [
    pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:This run is not private"),
]
STEPS = RECORDS // BATCH  # of an epoch
VISIBLE = 1e-3
"""What a permutation of weights moves them by, at least: they differ in the first digit."""
in_order = {"poisson_sampling": False}
"""The loader's own batches, in their order, so that a run can go on where it was."""


def agree(plain, shuffled):
    """The shuffled run is the plain one in another order, and in no other order than that."""
    expected = plain.contents()
    assert distance(weights(plain.network), weights(shuffled.network)) > VISIBLE
    shuffled.unshuffle()
    assert distance(expected, shuffled.contents()) <= EXACT


# ---- the same run in another order ----------------------------------------------------------


def groups_of_parameters(parameters):
    """Two learning rates."""
    groups = [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2], "lr": 0.005}]
    return torch.optim.Adam(groups, eps=0.03)


ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 9.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}
RUNS = [  # a network, what is asked for, and how it is trained
    ("mlp", {"mode": "functorch", "optimizer": "AMSGrad"}, {}),
    ("conv", {"mode": "ghost", "optimizer": "SGD"}, {}),
    ("encoder", {"optimizer": "Adam"}, {"physical": 3}),
    ("mlp", in_order, {"accumulate": 2}),
    ("mlp", {"clipping": "per_layer", "max_grad_norm": [0.1, 0.12, 0.14, 0.16, 0.18, 0.2]}, {}),
    ("mlp", ADAPTIVE, {}),
    ("low rank", {"mode": "ghost", "optimizer": "Adam"}, {}),
    ("buffered", {}, {}),
]
ZOO = [
    ("mlp", {"mode": "ew", "optimizer": "RMSprop"}, {"physical": 3}),
    ("mlp", {"mode": "no wrapper", "optimizer": "Adagrad"}, {}),
    ("mlp", {"optimizer": groups_of_parameters}, {}),
    ("encoder", {"shuffle": "paper"}, {}),
    ("mlp", {}, {"physical": 3}),
    ("conv", {"mode": "functorch"}, {"physical": 3}),
    ("conv", {"mode": "ew"}, {}),
    ("encoder", {"mode": "functorch"}, {"physical": 3}),
    ("encoder", {"mode": "ghost", "optimizer": "Adagrad"}, {"physical": 3}),
    ("gpt2", {}, {"physical": 3}),
    ("gpt2", {"mode": "no wrapper", "optimizer": "AMSGrad"}, {}),
]


# WS Table II; WS Theorem 5, since the accounts agree: shuffling is post-processing.
@pytest.mark.parametrize(
    ("name", "options", "training"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.zoo) for run in ZOO)],
)
def test_unshuffled_afterwards_a_run_is_the_run_without_shuffling(name, options, training):
    """In weights, buffers, gradients and the optimizer's state."""
    plain, run = (
        SeededRun(name, **{**options, "shuffle": shuffle}).fit(**training)
        for shuffle in (False, options.get("shuffle", True))
    )
    rounds = EPOCHS * STEPS // training.get("accumulate", 1)
    assert run.shuffler.shuffles == run.accounted == rounds
    assert plain.engine.accountant.history == run.engine.accountant.history
    assert run.shuffler.spec.level == options.get("shuffle", "residual")
    assert distance(weights(build(name)), weights(plain.network)) > VISIBLE
    agree(plain, run)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_noise_is_added_before_the_units_move_and_other_randomness_is_left_alone(mode):
    runs, states = [], []
    for shuffle in (False, spec_of("mlp")):
        torch.manual_seed(0)
        run = SeededRun(mode=mode, sigma=1.5, shuffle=shuffle)
        run.step(next(iter(run.loader)))  # noise of a second step would meet other units
        drawing = (run.optimizer.generator, run.loader.batch_sampler.generator)
        states.append([torch.get_rng_state(), *(stream.get_state() for stream in drawing)])
        runs.append(run)
    agree(*runs)
    assert all(map(torch.equal, *states))


# ---- setting up, once and again -------------------------------------------------------------


def again(run, **changes):
    """What the first call returned through make_private once more."""
    toy = {**run.toy, "module": run.model, "optimizer": run.optimizer, "data_loader": run.loader}
    results = run.engine.make_private(**{**toy, "noise_multiplier": 0.0, **changes})
    run.optimizer, run.loader = results[1], results[-1]
    return run


def test_set_up_again_the_earlier_shuffler_ends_unless_that_is_refused():
    run = SeededRun(shuffle=True).fit(1)
    first, spec = run.shuffler, run.shuffler.spec
    with pytest.raises(ValueError, match="Pre-existing GradSampleModule"):
        again(run, batch_first=False, shuffle_weights=True)
    assert run.model.shuffler is run.engine.shuffler is first
    run.fit(1)
    assert first.shuffles == 2 * STEPS
    sgd = torch.optim.SGD(run.network.parameters(), lr=0.1, momentum=0.9)
    second = again(run, shuffle_weights=spec, optimizer=sgd).fit(1).shuffler
    assert (first.shuffles, second.shuffles) == (2 * STEPS, STEPS)
    again(run).fit(1)
    assert run.engine.shuffler is None
    assert type(run.model) is GradSampleModule
    assert not hasattr(run.model, "shuffler")
    assert second.shuffles == STEPS


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_in_every_mode_the_model_is_opacus_s_and_offers_what_the_network_does(mode):
    network = build("mlp")
    network.generate = lambda x: network(x).argmax(-1)  # as Hugging Face's models have it
    plain = SeededRun(mode=mode)
    run = SeededRun(network=network, mode=mode, shuffle=spec_of("mlp"))
    assert isinstance(run.model, ShuffleGradSampleModule)
    assert isinstance(run.model, type(plain.model))
    assert not isinstance(plain.model, ShuffleGradSampleModule)
    assert run.model.shuffler is run.engine.shuffler
    assert list(run.model.state_dict()) == list(plain.model.state_dict())
    assert run.model.generate is network.generate
    with pytest.raises(AttributeError, match=r"Sequential.*nothing_like_it"):
        _ = run.model.nothing_like_it
    assert run.model.to_standard_module() is network


# ---- by hand --------------------------------------------------------------------------------


def momentum(network):
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)


def train_by_hand(network, wrapped, sgd, mode):
    """An epoch as with Opacus's classes alone, without an engine."""
    kind = DPOptimizerFastGradientClipping if mode == "ghost" else DPOptimizer
    optimizer = kind(sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=BATCH)
    criterion = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion, "mean")
    for start in range(0, RECORDS, BATCH):
        x, y = records("mlp")[start : start + BATCH]
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()
    return weights(network)


@pytest.mark.parametrize(
    ("mode", "attached"),
    [
        ("hooks", "at once"),
        ("functorch", "at the first step"),
        ("ew", "at the first step"),
        ("ghost", "at the first step"),
    ],
)
def test_made_by_hand_it_trains_as_opacus_s_wrapper_whenever_it_gets_its_optimizer(mode, attached):
    keywords = {"max_grad_norm": 1.0} if mode == "ghost" else {}
    plain, network, other, seen = build("mlp"), build("mlp"), build("mlp"), []
    wrapped = wrap_model(plain, mode, True, **keywords)
    expected = train_by_hand(plain, wrapped, momentum(plain), mode)
    sgd, own = momentum(network), torch.Generator().manual_seed(SHUFFLE_SEED)
    sgd.register_step_post_hook(lambda *_: seen.append(weights(network)))
    keywords |= {"optimizer": sgd} if attached == "at once" else {}
    model = ShuffleGradSampleModule(network, generator=own, grad_sample_mode=mode, **keywords)
    momentum(other).step()  # another network's is not taken for it
    trained = train_by_hand(network, model, sgd, mode)
    assert model.shuffler.shuffles == STEPS
    assert distance(expected, trained) > VISIBLE
    assert distance(seen[-1], trained) == 0  # the user's hooks run after the shuffle
    for plan in inverses(model.shuffler):
        model.permutations.apply_(network, plan, sgd)
    assert distance(expected, weights(network)) <= EXACT


BY_HAND = [
    ({"grad_sample_mode": "hook"}, "hook"),
    ({"generator": 3}, "generator must be"),
    ({"groups": "all"}, "groups"),
    ({"sample_input": torch.zeros(2, 9)}, "sample_input"),
    ({"optimizer": 3}, "optimizer"),
    ({"optimizer": torch.optim.LBFGS}, "LBFGS.*use SGD"),
    (
        {"optimizer": lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)},
        "trains none of the parameters",
    ),
]


@pytest.mark.parametrize(("changes", "match"), BY_HAND)
def test_made_by_hand_nonsense_is_refused_and_the_network_is_left_alone(changes, match):
    network = build("mlp")
    optimizer = changes.get("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = optimizer(network.parameters()) if callable(optimizer) else optimizer
    with pytest.raises(ValueError, match=match):
        ShuffleGradSampleModule(network, **{**changes, "optimizer": optimizer})
    assert not any(layer._forward_hooks or layer._backward_hooks for layer in network.modules())
    assert not any(hasattr(parameter, "grad_sample") for parameter in network.parameters())


def test_the_first_optimizer_that_steps_is_refused_if_it_cannot_be_followed():
    network = build("mlp")
    model, before = ShuffleGradSampleModule(network), weights(network)
    with pytest.raises(ValueError, match=r"Adafactor.*use SGD"):
        torch.optim.Adafactor(network.parameters()).step()
    assert distance(before, weights(network)) == 0
    with pytest.raises(ValueError, match=r"cannot be copied or pickled.*state_dict\(\)"):
        copy.deepcopy(model.shuffler)


@pytest.mark.parametrize(
    "keep",
    [
        lambda parameter: parameter.detach().reshape(len(parameter), -1)[:, :1].clone(),
        lambda parameter: [parameter.detach()],
        lambda parameter: {"a": 1},
        lambda parameter: parameter.detach().flatten().clone(),
    ],
    ids=["one column", "a list", "a dict", "flat"],
)
def test_an_optimizer_whose_state_turns_out_not_to_fit_is_refused_at_its_first_step(keep):
    """State that is no tensor of the parameter's shape."""

    class OddState(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["rows"] = keep(parameter)
            super().step(closure)

    plain = SeededRun(optimizer="SGD")
    run = SeededRun(shuffle=spec_of("mlp"), optimizer=lambda p: OddState(p, lr=0.1))
    batch = next(iter(plain.loader))
    plain.step(batch)
    next(iter(run.loader))
    with pytest.raises(ValueError, match=r"OddState keeps 'rows'.*0.weight"):
        run.step([part.clone() for part in batch])
    assert distance(weights(plain.network), weights(run.network)) <= EXACT
    assert run.shuffler.shuffles == 0


# ---- what else users do ---------------------------------------------------------------------


def test_nothing_is_shuffled_in_the_middle_of_a_batch_and_by_a_call_between_two():
    run = SeededRun(shuffle=spec_of("mlp"))
    run.backward()
    before = run.contents()
    with pytest.raises(ValueError, match=r"shuffle_\(\) in the middle of a batch"):
        run.shuffler.shuffle_()
    assert distance(before, run.contents()) == 0
    run.optimizer.step()
    before = run.contents()
    run.shuffler.shuffle_()
    assert distance(moved(run.shuffler.spec, drawn(run.shuffler)[-1:], before), run.contents()) == 0


# ---- averages of weights over steps ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("buffered", {"use_buffers": True, "multi_avg_fn": get_ema_multi_avg_fn(0.5)}),
        pytest.param("gpt2", {}, marks=pytest.mark.zoo),  # whose weights are tied
    ],
)
@pytest.mark.parametrize("by_call", [False, True])
def test_an_average_is_that_of_the_run_without_shuffling(name, options, by_call):
    """One that is updated from the private model, or a copy from the call of ``follow`` on."""
    averages, runs = [], []
    for shuffle in (False, True):
        run = SeededRun(name, shuffle=shuffle)
        averages.append(
            AveragedModel(copy.deepcopy(run.network) if by_call else run.model, **options)
        )
        if by_call and shuffle:
            run.shuffler.follow(averages[-1])
        source = run.network if by_call else run.model
        runs.append(run.fit(1, after=functools.partial(averages[-1].update_parameters, source)))
    plain, average = map(unwrap, averages)
    spec = runs[1].shuffler.spec
    expected, kept = (
        weights(network) | {key: buffer.clone() for key, buffer in network.named_buffers()}
        for network in (plain, average)
    )
    assert distance(moved(spec, drawn(runs[1].shuffler), expected), kept) <= EXACT
    assert distance(weights(runs[1].network), weights(average)) > VISIBLE
    x = records(name)[:5][0]
    before, outputs = weights(average), logits(average.eval(), x)
    again(runs[1], shuffle_weights=spec).fit(1)  # the next shuffler moves it on
    assert float((outputs - logits(average, x)).detach().abs().max()) <= EXACT
    assert distance(before, weights(average)) > VISIBLE


def test_averages_that_cannot_follow_are_refused():
    network = build("mlp")
    late = AveragedModel(network)
    late.update_parameters(network)
    run, before = SeededRun(network=network, shuffle=spec_of("mlp")).fit(1), weights(late.module)
    with pytest.raises(ValueError, match=r"AveragedModel.*another order.*make_private"):
        late.update_parameters(run.model)
    for other in (run.model, run.network[0], "model"):
        with pytest.raises(ValueError, match="average must be a"):
            run.shuffler.follow(other)
    assert distance(weights(late.module), before) == 0
    run.shuffler.detach()
    late.update_parameters(run.model)


# ---- where much of a network cannot move ----------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, "paper"])
def test_the_share_that_moves_and_the_reasons_for_the_others_are_named_with_the_remedy(shuffle):
    def returns_hidden_units(net, x):
        hidden = torch.relu(net.two(torch.relu(net.one(x))))
        return net.three(hidden), hidden

    layers = {"one": nn.Linear(5, 8), "two": nn.Linear(8, 64), "three": nn.Linear(64, 3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SeededRun(network=Wired(returns_hidden_units, **layers), shuffle=shuffle)
        SeededRun(network=build("mlp"), shuffle=shuffle)  # most of which moves
    messages = [str(warning.message) for warning in caught]
    said = [message for message in messages if "shuffle_weights moves" in message]
    assert len(said) == (shuffle is True)
    # The first layer's 8 units move: 5*8 + 8 entries and the 64*8 that read them. 64 and 64*3 + 3
    # entries stay.
    words = f"moves {560 / 819:.1%} of the parameters of Wired", "an output of the network (259 en"
    for sentence in (*words, "return only what the loss needs"):
        assert all(sentence in message for message in said)
