"""Averages of weights over steps follow the permutations."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from helpers.shuffled_runs import EXACT, build, distance, drawn, moved, prepare, records, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.networks.running import unwrap

VISIBLE = 1e-3


def contents_of(average: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **weights(unwrap(average)),
        **{name: each.clone() for name, each in unwrap(average).named_buffers()},
    }


def averaged(run, *, part: str, before: int = 0, **options):
    """The average of a run's weights over its steps but for the first ones, made of the wrapper or of the network."""
    averages, steps = [], []

    def update():
        steps.append(1)
        if len(steps) > before:
            if not averages:
                averages.append(AveragedModel(getattr(run, part), **options))
            averages[0].update_parameters(getattr(run, part))

    run.train(after=update)
    return averages[0]


@pytest.mark.parametrize(
    ("name", "part", "before", "options"),
    [
        ("mlp", "model", 0, {}),
        ("mlp", "network", 3, {}),
        ("mlp", "model", 3, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}),
        ("buffered", "model", 2, {"use_buffers": True}),
        ("gpt2", "network", 0, {}),  # whose weights are tied
    ],
)
def test_an_average_is_that_of_the_run_without_shuffling(name, part, before, options):
    plain, run = prepare(name), prepare(name, shuffle=True)
    expected, average = (
        averaged(each, part=part, before=before, **options) for each in (plain, run)
    )
    own = moved(run.shuffler.spec, drawn(run.shuffler), contents_of(expected))
    assert distance(own, contents_of(average)) <= EXACT
    assert distance(weights(run.network), weights(unwrap(average))) > VISIBLE


def test_an_average_that_was_made_before_the_run_follows_from_its_first_update_on():
    averages, runs = [], []
    for shuffle in (False, True):
        network = build("mlp")
        averages.append(AveragedModel(network))
        run = prepare(network=network, shuffle=shuffle)
        runs.append(run.train(after=lambda run=run: averages[-1].update_parameters(run.model)))
    expected, found = (weights(average.module) for average in averages)
    assert distance(moved(runs[1].shuffler.spec, drawn(runs[1].shuffler), expected), found) <= EXACT


def test_an_average_of_weights_in_another_order_is_refused_at_its_update():
    network = build("mlp")
    average = AveragedModel(network)
    average.update_parameters(network)
    run, before = prepare(network=network, shuffle=True).train(1), weights(average.module)
    with pytest.raises(ValueError, match=r"AveragedModel.*another order.*make_private"):
        average.update_parameters(run.model)
    assert distance(before, weights(average.module)) == 0
    run.shuffler.detach()
    average.update_parameters(run.model)


def test_averages_of_other_libraries_follow_from_a_call_on():
    plain, run = prepare(), prepare(shuffle=True)
    averages = []
    for each in (plain, run):
        each.train(1)
        averages.append(copy.deepcopy(each.model))
        if each is run:
            run.shuffler.follow(averages[-1])

        @torch.no_grad()
        def update(average=averages[-1], each=each):
            for mean, now in zip(average.parameters(), each.model.parameters(), strict=True):
                mean.lerp_(now, 0.3)

        each.train(1, after=update)
    expected, found = (weights(unwrap(average)) for average in averages)
    assert distance(moved(run.shuffler.spec, drawn(run.shuffler), expected), found) <= EXACT


def test_an_average_follows_the_next_shuffler_of_the_same_network_and_nobody_keeps_it():
    run = prepare(shuffle=True)
    average = averaged(run, part="network")
    x, before = records("mlp")[:5][0], weights(average.module)
    outputs = average.eval()(x).detach()
    shuffler = WeightShuffler(run.network, run.shuffler.spec, run.plain_optimizer)
    run.train(1)
    assert shuffler.shuffles == shuffler.steps > 0
    assert distance(before, weights(average.module)) > VISIBLE
    assert float((average(x) - outputs).detach().abs().max()) <= EXACT
    del average
    gc.collect()
    run.train(1)


def test_copies_that_are_no_averages_stay_as_they_are():
    run = prepare(shuffle=True).train(1)
    average = AveragedModel(run.model)
    copies = [copy.deepcopy(each) for each in (run.model, run.network, average)]
    before = [weights(each) for each in copies]
    run.train(1)
    for each, values in zip(copies, before, strict=True):
        assert distance(weights(each), values) == 0


def test_what_is_no_copy_cannot_follow():
    run = prepare(shuffle=True)
    for other in (run.model, run.network, nn.Linear(2, 2), build("encoder"), run.network[0]):
        before = weights(other)
        with pytest.raises(ValueError, match=r"average must be a copy.*copy\.deepcopy\(model\)"):
            run.shuffler.follow(other)
        assert distance(before, weights(other)) == 0
    with pytest.raises(ValueError, match="average"):
        run.shuffler.follow("model")  # type: ignore[arg-type]


def test_a_shuffled_run_that_starts_from_weights_of_another_warns_that_their_units_are_in_an_order_of_its_own():
    """An average over runs would mix units. Weights that nothing has moved, or a run that moves none, are no matter."""

    def warned(**options):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run = prepare(**options)
        return run, any("in an order of its own: an average" in str(each.message) for each in seen)

    run, first = warned(shuffle=True)
    again, untouched = warned(shuffle=True, network=run.model.to_standard_module())
    third, plain = warned(network=again.train().model.to_standard_module())
    _, second = warned(shuffle=True, network=third.model.to_standard_module())
    assert (first, untouched, plain, second) == (False, False, False, True)
