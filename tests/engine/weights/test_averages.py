"""Averages of weights over steps follow the permutations, and leave as the weights do."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from helpers.shuffled_runs import (
    EXACT,
    both_modes,
    build,
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
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.networks.running import unwrap

VISIBLE = 1e-3
HALF_LIFE = {"mean": {}, "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, "with buffers": {"use_buffers": True}}


@both_modes
def test_a_shuffled_run_that_starts_from_weights_of_another_warns_that_their_units_are_in_an_order_of_its_own(shuffle_mode):
    """An average over runs would mix units. Weights that nothing has moved, or a run that moves none, are no matter."""

    def warned(**options):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run = prepare(shuffle_mode=shuffle_mode, **options)
        return run, any("in an order of its own: an average" in str(each.message) for each in seen)

    run, first = warned(shuffle=True)
    again, untouched = warned(shuffle=True, network=run.model.to_standard_module())
    again.train()
    again.model.state_dict()
    third, plain = warned(network=again.model.to_standard_module())
    _, second = warned(shuffle=True, network=third.model.to_standard_module())
    assert (first, untouched, plain, second) == (False, False, False, True)


def averaged(run, whole, begin: int = 0, **options):
    """The average of a run's weights over its steps but for the first ones."""
    made, steps = [], [0]

    def update():
        steps[0] += 1
        if steps[0] > begin:
            made[:] = made or [AveragedModel(whole(run), **options)]
            made[0].update_parameters(whole(run))

    run.train(after=update)
    return made[0]


def contents_of(average: nn.Module) -> dict[str, torch.Tensor]:
    return {**weights(unwrap(average)), **{name: each.clone() for name, each in unwrap(average).named_buffers()}}


WHOLES = {"wrapper": lambda run: run.model, "network": lambda run: run.network, "part": lambda run: run.network[2:4]}


@both_modes
@pytest.mark.parametrize("options", HALF_LIFE)
@pytest.mark.parametrize("begin", [pytest.param(0, marks=pytest.mark.zoo), 3])
def test_an_average_is_that_of_the_run_without_shuffling(shuffle_mode, options, begin):
    name = "buffered" if options == "with buffers" else "mlp"
    plain, run = prepare(name), prepare(name, shuffle=True, shuffle_mode=shuffle_mode)
    expected, found = (contents_of(averaged(each, WHOLES["wrapper"], begin, **HALF_LIFE[options])) for each in (plain, run))
    assert ("scale" in expected) is ("scale" in run.shuffler.spec.buffers) is (name == "buffered")
    if shuffle_mode == "every_step":
        expected = moved(run.shuffler.spec, drawn(run.shuffler), expected)
    assert distance(expected, found) <= EXACT
    assert off(weights(run.network), found) > VISIBLE


@both_modes
@pytest.mark.parametrize("whole", WHOLES)
def test_network_wrapper_and_parts_have_averages_that_follow(shuffle_mode, whole):
    plain, run = prepare(), prepare(shuffle=True, shuffle_mode=shuffle_mode)
    expected, average = (averaged(each, WHOLES[whole]) for each in (plain, run))
    plan = drawn(run.shuffler) if shuffle_mode == "every_step" else run.shuffler.spec.identity()
    assert distance(moved(run.shuffler.spec, plan, weights(unwrap(expected))), weights(unwrap(average))) <= EXACT


@pytest.mark.parametrize("end", [False, True])
def test_an_average_leaves_by_the_same_permutation_as_the_weights(end):
    plain, run = prepare(), prepare(shuffle=True, shuffle_mode="on_release")
    expected, average = (averaged(each, WHOLES["network"]) for each in (plain, run))
    own, x = weights(average.module), records("mlp")[:5][0]
    outputs = average.eval()(x).detach()
    if end:
        run.shuffler.detach()
        assert distance(weights(average.module), moved(run.shuffler.spec, drawn(run.shuffler), own)) == 0
    state, network = average.state_dict(), run.network.state_dict()
    assert int(state.pop("n_averaged")) == run.shuffler.steps
    released = moved(run.shuffler.spec, drawn(run.shuffler), weights(expected.module))
    assert off({name.removeprefix("module."): value for name, value in state.items()}, released) <= EXACT
    assert off(network, moved(run.shuffler.spec, drawn(run.shuffler), weights(plain.network))) <= EXACT
    copied = copy.deepcopy(average)
    assert off(weights(copied.module), released) <= EXACT
    assert float((average(x) - outputs).detach().abs().max()) <= EXACT
    assert run.shuffler.shuffles == 1
    run.shuffler.release()
    assert off(weights(average.module), released) <= EXACT
    assert off(weights(copied.module), released) <= EXACT
    run.train(1)
    assert off(weights(copied.module), released) <= EXACT


def test_an_average_that_begins_late_shows_nothing_of_the_run_itself():
    run = unreleased()
    own = weights(run.network)
    average = AveragedModel(run.model)
    for update in (lambda: None, lambda: average.update_parameters(run.model)):
        update()
        shown = {name.removeprefix("module._module."): value for name, value in average.state_dict().items()}
        shown.pop("n_averaged")
        assert off(shown, moved(run.shuffler.spec, drawn(run.shuffler), own)) == 0
    assert run.shuffler.shuffles == 1


def test_weights_and_average_that_were_shown_go_on_as_the_run_does():
    options = {"shuffle": True, "shuffle_mode": "on_release", "optimizer": "AMSGrad", **in_order}
    run, again = prepare(**options), prepare(**options)
    averages = [AveragedModel(each.model) for each in (run, again)]
    for each in (run, again):
        average = averages[each is again]
        if each is again:
            each.model.load_state_dict(run.model.state_dict())
            each.optimizer.load_state_dict(run.optimizer.state_dict())
            average.load_state_dict(averages[0].state_dict())
            plan = drawn_each(run.shuffler)[-1]
            run.train(1, after=lambda: averages[0].update_parameters(run.model))
        each.train(1, after=lambda average=average, each=each: average.update_parameters(each.model))
    ones, others = (weights(unwrap(each)) for each in averages)
    assert distance(moved(run.shuffler.spec, plan, ones), others) <= EXACT
    assert distance(ones, others) > VISIBLE


@both_modes
def test_an_average_that_was_made_before_the_run_follows_from_its_first_update_on(shuffle_mode):
    runs, averages = [], []
    for shuffling in ({}, {"shuffle": True, "shuffle_mode": shuffle_mode}):
        network = build("mlp")
        averages.append(AveragedModel(network))
        run = prepare(network=network, **shuffling)
        runs.append(run.train(after=lambda run=run: averages[-1].update_parameters(run.model)))
    expected, run = weights(averages[0].module), runs[1]
    plan = drawn(run.shuffler) if shuffle_mode == "every_step" else run.shuffler.spec.identity()
    assert distance(moved(run.shuffler.spec, plan, expected), weights(averages[1].module)) <= EXACT
    assert off(weights(copy.deepcopy(averages[1]).module), moved(run.shuffler.spec, drawn(run.shuffler), expected)) <= EXACT


@both_modes
def test_an_average_of_weights_in_another_order_is_refused_at_its_update(shuffle_mode):
    network = build("mlp")
    average = AveragedModel(network)
    average.update_parameters(network)
    run, before = prepare(network=network, shuffle=True, shuffle_mode=shuffle_mode).train(1), weights(average.module)
    with pytest.raises(ValueError, match=r"AveragedModel.*another order.*make_private"):
        average.update_parameters(run.model)
    assert distance(before, weights(average.module)) == 0
    run.shuffler.detach()
    average.update_parameters(run.model)


@both_modes
def test_averages_of_other_libraries_follow_from_a_call_on(shuffle_mode):
    plain, run = prepare(), prepare(shuffle=True, shuffle_mode=shuffle_mode)
    found = []
    for each in (plain, run):
        each.train(1)
        average = copy.deepcopy(each.model)
        if each is run:
            run.shuffler.follow(average)

        @torch.no_grad()
        def update(average=average, each=each):
            for mean, now in zip(average.parameters(), each.model.parameters(), strict=True):
                mean.lerp_(now, 0.3)

        each.train(1, after=update)
        found.append(average)
    expected, average = weights(unwrap(found[0])), unwrap(found[1])
    if shuffle_mode == "every_step":
        expected = moved(run.shuffler.spec, drawn(run.shuffler), expected)
    assert distance(expected, weights(average)) <= EXACT
    shown = average.state_dict()
    if shuffle_mode == "on_release":
        expected = moved(run.shuffler.spec, drawn_each(run.shuffler)[-1], expected)
    assert off(shown, expected) <= EXACT


@both_modes
def test_an_average_follows_the_next_shuffler_of_the_same_network(shuffle_mode):
    run = prepare(shuffle=True, shuffle_mode="every_step")
    average = AveragedModel(run.network)
    run.train(1, after=lambda: average.update_parameters(run.network))
    x, before = records("mlp")[:5][0], weights(run.network)
    outputs = average.eval()(x).detach()
    shuffler = WeightShuffler(run.network, run.shuffler.spec, run.plain_optimizer, mode=shuffle_mode)
    run.train(1)
    shuffler.release()
    assert (shuffler.shuffles, run.shuffler.steps) == (shuffler.steps if shuffle_mode == "every_step" else 1, shuffler.steps)
    assert distance(before, weights(run.network)) > VISIBLE
    assert float((average(x) - outputs).detach().abs().max()) <= EXACT
    assert distance(weights(average.module), weights(copy.deepcopy(average).module)) == 0


@both_modes
def test_an_average_that_nobody_keeps_is_gone(shuffle_mode):
    run = prepare(shuffle=True, shuffle_mode=shuffle_mode)
    average = AveragedModel(run.model)
    parts = len(run.shuffler._averages)
    assert parts == len(list(run.network.modules()))
    del average
    gc.collect()
    assert len(run.shuffler._averages) == 0
    run.train(1)


@both_modes
def test_copies_that_are_no_averages_stay_as_they_are(shuffle_mode):
    run = prepare(shuffle=True, shuffle_mode=shuffle_mode).train(1)
    average = AveragedModel(run.model)
    copies = [copy.deepcopy(each) for each in (run.model, run.network, average)]
    before = [weights(each) for each in copies]
    run.train(1)
    for each, values in zip(copies, before, strict=True):
        assert distance(weights(each), values) == 0


@both_modes
def test_what_is_no_copy_cannot_follow(shuffle_mode):
    run = prepare(shuffle=True, shuffle_mode=shuffle_mode)
    for other in (run.model, run.network, nn.Linear(2, 2), build("encoder"), run.network[0]):
        before = weights(other)
        with pytest.raises(ValueError, match=r"average must be a copy.*copy\.deepcopy\(model\)"):
            run.shuffler.follow(other)
        assert distance(before, weights(other)) == 0
    with pytest.raises(ValueError, match="average"):
        run.shuffler.follow("model")  # type: ignore[arg-type]


def test_tied_weights_have_an_average_that_follows():
    plain, run = prepare("gpt2"), prepare("gpt2", shuffle=True)
    expected, average = (averaged(each, WHOLES["network"]) for each in (plain, run))
    assert average.module.lm_head.weight is average.module.transformer.wte.weight
    assert distance(moved(run.shuffler.spec, drawn(run.shuffler), weights(expected.module)), weights(average.module)) <= EXACT
