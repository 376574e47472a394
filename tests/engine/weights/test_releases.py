"""Mode "on_release": what leaves is permuted, and the run goes on as if nothing had left."""

from __future__ import annotations

import collections
import copy
import io
import itertools
import math
import pickle

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
    drawn_each,
    in_order,
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
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy.stats import chi2
from torch import nn

from opacus_shuffle import ShuffleGradSampleModule
from opacus_shuffle.engine.weights.shuffler import MODES, WeightShuffler
from opacus_shuffle.permutation import find_permutations

VISIBLE = 1e-3


def ways_out(run) -> dict:
    """What shows the run and leaves it where it is: each gives what it shows."""
    model, network = run.model, run.network
    return {
        "model": lambda: left(model.state_dict()),
        "network": lambda: left(network.state_dict()),
        "layer by layer": lambda: {
            f"{place}.{name}": value for place, part in network.named_children() for name, value in part.state_dict().items()
        },
        "kept variables": lambda: left(network.state_dict(keep_vars=True)),
        "optimizer": lambda: left(optimizer=run.optimizer.state_dict(), network=network),
        "plain optimizer": lambda: left(optimizer=run.plain_optimizer.state_dict(), network=network),
    }


def test_on_release_nothing_moves_while_nothing_leaves():
    plain, run = prepare().train(), prepare(shuffle=True, shuffle_mode="on_release").train()
    assert run.shuffler.shuffles == 0
    assert run.shuffler.steps == 2 * RECORDS // BATCH
    assert distance(contents(plain), contents(run)) == 0


@pytest.mark.parametrize("way", ["model", "network", "layer by layer", "kept variables", "optimizer", "plain optimizer"])
def test_what_leaves_is_permuted_once_per_update_and_the_run_stays(way):
    run = unreleased(optimizer="AMSGrad")
    ways = ways_out(run)
    for epoch in (1, 2):
        before = contents(run)
        found = ways[way]()
        assert run.shuffler.shuffles == epoch
        plan = drawn_each(run.shuffler)[-1]
        expected = moved(run.shuffler.spec, plan, before)
        assert off(found, expected) == 0
        assert off(found, before) > VISIBLE
        for each in ways.values():
            assert off(each(), expected) == 0
        assert run.shuffler.shuffles == epoch
        assert distance(before, contents(run)) == 0
        run.train(1)
    assert drawn_each(run.shuffler)[0] != drawn_each(run.shuffler)[1]


@pytest.mark.parametrize("way", ["release", "to_standard_module"])
@pytest.mark.parametrize("shown", [False, True])
def test_a_release_moves_the_run_to_where_it_was_shown(way, shown):
    run = unreleased(optimizer="AMSGrad")
    x = records("mlp")[:5][0]
    before, outputs = contents(run), run.network(x).detach()
    found = left(run.model.state_dict(), run.optimizer.state_dict(), run.network) if shown else {}
    assert distance(before, contents(run)) == 0
    getattr(run.model, way)()
    assert run.shuffler.shuffles == 1
    after = contents(run)
    assert distance(after, moved(run.shuffler.spec, drawn(run.shuffler), before)) == 0
    assert distance(before, after) > VISIBLE
    assert not shown or off(found, after) == 0
    assert float((run.network(x) - outputs).detach().abs().max()) <= EXACT
    # shown and released again it stays so
    run.shuffler.release()
    for each in ways_out(run).values() if way == "release" else [lambda: left(run.network.state_dict())]:
        assert off(each(), after) == 0
    assert distance(after, contents(run)) == 0
    assert run.shuffler.shuffles == 1


def test_before_the_first_update_nothing_needs_to_be_permuted():
    run = prepare(shuffle=True, shuffle_mode="on_release")
    start = weights(build("mlp"))
    assert off(left(run.model.state_dict()), start) == 0
    run.optimizer.state_dict()
    run.model.release()
    assert run.shuffler.shuffles == 0
    assert distance(start, weights(run.network)) == 0


def test_releasing_between_steps_is_the_same_run():
    plain, run = prepare(optimizer="Adam").train(), prepare(optimizer="Adam", shuffle=True, shuffle_mode="on_release")
    steps = itertools.count()
    run.train(after=lambda: run.model.release() if next(steps) % 3 == 0 else None)
    assert run.shuffler.shuffles == math.ceil(run.shuffler.steps / 3)
    assert distance(weights(plain.network), weights(run.network)) > VISIBLE
    unshuffle(run)
    assert distance(contents(plain), contents(run)) <= EXACT


@pytest.mark.parametrize(
    ("mode", "training"),
    [(mode, training) for mode in ("hooks", "functorch", "ew", "ghost") for training in ({}, {"physical": 3})]
    + [("hooks", {"accumulate": 2})],  # as with hooks in the other modes, or not possible
)
def test_what_leaves_in_the_middle_of_a_batch_does_not_disturb_it(mode, training):
    options = in_order if "accumulate" in training else {}
    plain = prepare(mode=mode, **options).train(**training)
    run = prepare(mode=mode, shuffle=True, shuffle_mode="on_release", **options)
    calls, shown = itertools.count(), []

    def leave():
        """With gradients of records, or sums of those, waiting for the step."""
        if not training or next(calls) % 2:
            before = contents(run)
            found = left(run.model.state_dict(), run.optimizer.state_dict(), run.network)
            plans = drawn_each(run.shuffler)
            assert off(found, moved(run.shuffler.spec, plans[-1], before) if plans else before) == 0
            shown.append(len(plans))

    run.train(**training, before=leave)
    assert 0 < run.shuffler.shuffles == shown[-1] < run.shuffler.steps
    assert distance(contents(plain), contents(run)) == 0


def test_a_release_in_the_middle_of_a_batch_is_refused_and_draws_nothing():
    run = unreleased()
    x, y = next(iter(run.loader))
    run.optimizer.zero_grad()
    run.criterion(run.model(x), y).backward()
    before = contents(run)
    for release in (run.shuffler.release, run.model.release, run.model.to_standard_module):
        with pytest.raises(ValueError, match="middle of a batch"):
            release()
    assert run.shuffler.shuffles == 0
    assert distance(before, contents(run)) == 0
    run.optimizer.step()
    run.model.release()
    assert run.shuffler.shuffles == 1


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_sums_of_physical_batches_that_wait_for_the_rest_are_the_middle_of_a_batch(mode):
    plain, run = prepare(mode=mode).train(1), unreleased(mode=mode)
    plain.train(1, physical=3)
    refused = 0
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer) as loader:
        for x, y in loader:
            run.optimizer.zero_grad()
            if any(getattr(parameter, "summed_grad", None) is not None for parameter in run.network.parameters()):
                refused += 1
                with pytest.raises(ValueError, match="middle of a batch"):
                    run.model.release()
            run.criterion(logits(run.model, x), y).backward()
            run.optimizer.step()
    assert refused > 2
    run.model.release()
    unshuffle(run)
    assert distance(weights(plain.network), weights(run.network)) <= EXACT


# Whole modules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("whole", [True, False], ids=["wrapped", "network"])
@pytest.mark.parametrize("dump", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "torch.save"])
def test_a_whole_module_is_saved_as_it_is_released_of_opacus_s_class_and_free_of_the_run(dump, whole, shown):
    run = unreleased()
    if shown:
        run.model.state_dict()
    before, module = contents(run), run.model if whole else run.network
    dump(module)
    again = pickle.loads(pickle.dumps(module))
    assert run.shuffler.shuffles == 1
    assert distance(before, contents(run)) == 0
    assert type(again) is (GradSampleModule if whole else type(run.network))
    assert type(run.model) is not GradSampleModule
    network = again._module if whole else again
    run.model.release()
    assert distance(weights(run.network), weights(network)) == 0
    assert run.shuffler.shuffles == 1
    run.train(1)
    state = network.state_dict()
    again(records("mlp")[:5][0])
    assert run.shuffler.shuffles == 1
    assert state["0.weight"].data_ptr() == network[0].weight.data_ptr()


@both_modes
@pytest.mark.parametrize("whole", [True, False], ids=["wrapped", "network"])
def test_copies_compute_the_same_and_have_nothing_to_do_with_the_run(shuffle_mode, whole):
    run = prepare(shuffle=True, shuffle_mode=shuffle_mode).train(1)
    x = records("mlp")[:5][0]
    run.model.eval()
    with torch.no_grad():
        outputs = run.model(x)
        copied = copy.deepcopy(run.model if whole else run.network)
        assert float((copied(x) - outputs).abs().max()) <= EXACT
        assert float((run.model(x) - outputs).abs().max()) <= EXACT
    assert not isinstance(copied, ShuffleGradSampleModule)
    before = weights(copied)
    run.train(1)
    shuffles, after = run.shuffler.shuffles, weights(run.network)
    copied.state_dict()
    pickle.dumps(copied)
    assert run.shuffler.shuffles == shuffles
    assert distance(after, weights(run.network)) == 0
    run.model.state_dict()
    assert distance(before, weights(copied)) == 0


def test_stopping_permutes_what_has_not_left():
    run = unreleased()
    before = contents(run)
    run.shuffler.detach()
    assert run.shuffler.shuffles == 1
    assert distance(before, contents(run)) > VISIBLE
    unshuffle(run)
    assert distance(before, contents(run)) == 0
    run.train(1)
    assert off(left(run.model.state_dict()), weights(run.network)) == 0
    run.shuffler.release()
    assert (run.shuffler.shuffles, run.shuffler.steps) == (1, RECORDS // BATCH)


def three_units() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


@pytest.mark.parametrize("shuffle_mode", MODES)
def test_both_modes_release_the_same_joint_law(shuffle_mode):
    network = three_units()
    start = copy.deepcopy(network.state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def step():
        optimizer.zero_grad()
        network(x).square().sum().backward()
        optimizer.step()

    def trial():
        """The run up to its two releases."""
        optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(start[name])
        found = []
        for updates in (2, 1):
            for _ in range(updates):
                step()
            found.append(network.state_dict()["0.bias"].clone())
        return found

    truth = trial()  # without shuffling
    shuffler = WeightShuffler(
        network, find_permutations(network, x), optimizer, mode=shuffle_mode, generator=torch.Generator().manual_seed(8)
    )
    counts, trials = collections.Counter(), 36 * 10
    for _ in range(trials):
        found = trial()
        places = [tuple((one[:, None] - true).abs().argmin(1).tolist()) for one, true in zip(found, truth, strict=True)]
        for one, true, place in zip(found, truth, places, strict=True):
            assert float((one - true[list(place)]).abs().max()) <= EXACT
        counts[tuple(places)] += 1
    assert shuffler.shuffles == trials * (3 if shuffle_mode == "every_step" else 2)
    assert len(counts) == 36
    statistic = sum((count - 10) ** 2 / 10 for count in counts.values())
    assert chi2.sf(statistic, 35) > 1e-4
