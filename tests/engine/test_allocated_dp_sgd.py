"""Training on every record once an epoch: the batches and the account.

So trains a trusted server with Gaussian noise, and so do users who send sums of bits.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import warnings

import pytest
import torch
from helpers.private_runs import MODES, Run
from scipy.stats import chi2

from opacus_shuffle import PrivacyAssumptionWarning, compute_epsilon
from opacus_shuffle.engine.batches.samplers import RandomAllocationSampler

KINDS = {
    "a server": functools.partial(Run, "random_allocation"),
    "sums of bits": functools.partial(Run, "shuffled_sums", sampling="random_allocation"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def has_spent(run, epochs):
    """Whether it costs what a server's noise costs; the tails of bits cost almost nothing."""
    numbers = {"noise_multiplier": run.optimizer.noise_multiplier, "num_batches": 4}
    expected = compute_epsilon("random_allocation", **numbers, steps=4 * epochs, delta=1e-5)
    return run.engine.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-7)


def test_all_ways_to_allocate_two_records_in_two_epochs_are_drawn_as_often():
    """Chi-square of the batches of both records in both epochs: 3⁴ classes, at p = 1e-6."""
    sampler = RandomAllocationSampler(num_samples=2, batch_size=1, steps=3)
    counts = collections.Counter()
    for _ in range(3000):
        epochs = [list(sampler), list(sampler)]
        assert all(sorted(itertools.chain(*batches)) == [0, 1] for batches in epochs)
        counts[str(epochs)] += 1
    expected = 3000 / 3**4
    squares = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == 3**4
    assert squares < chi2.isf(1e-6, 3**4 - 1)


@pytest.mark.parametrize(
    ("kind", "options", "physical"),
    [
        *(("a server", {"mode": mode}, 24) for mode in MODES if mode != "ew"),
        ("a server", {"shuffle_weights": True}, 24),
        ("a server", {"clipping": "per_layer", "toy": {"max_grad_norm": [0.5] * 4}}, 24),
        ("a server", {"loader": {"num_workers": 1}}, 24),
        ("a server", {}, 3),
        ("sums of bits", {}, 24),
        ("sums of bits", {}, 3),
    ],
)
def test_an_epoch_trains_on_each_record_once_and_is_accounted_in_full_at_its_first_step(
    kind, options, physical
):
    run = KINDS[kind](**options)
    for epochs in (1, 2):
        records = 0
        with run.split(physical) as batches:
            for batch in batches:
                run.step(batch)
                records += len(batch[0])
                assert not run.updates or run.accounted == 4 * math.ceil(run.updates / 4)
        assert records == 24
        assert run.updates == run.accounted == 4 * epochs
        assert has_spent(run, epochs)


@kinds
def test_an_epoch_that_is_left_costs_what_a_whole_one_costs(kind):
    run = KINDS[kind]()
    for _ in range(3):
        run.step(next(iter(run.loader)))
    assert run.updates == 3
    assert has_spent(run, 3)


@kinds
def test_an_empty_batch_is_noised_and_released(kind):
    run, empty = KINDS[kind](records=3, batch_size=1), 0
    for batch in itertools.islice(run.batches, 60):
        before = run.weights()
        run.step(batch)
        assert not any(torch.equal(before[name], now) for name, now in run.weights().items())
        empty += not len(batch[0])
    assert empty
    assert run.updates == 60


def test_noise_may_rise_within_an_epoch_and_fall_between_epochs():
    run = Run("random_allocation")
    batches = iter(run.loader)
    run.step(next(batches))
    run.optimizer.noise_multiplier = 3.0
    run.step(next(batches))
    run.optimizer.noise_multiplier = 1.9
    with run.refused("this epoch was accounted with 2.0", goes_on=False):
        run.step(next(batches))
    run.train()
    assert [step.noise_multiplier for step, _ in run.engine.accountant.rounds] == [2.0, 1.9]
    assert run.accounted == 8


@kinds
def test_a_checkpoint_in_the_middle_of_an_epoch_holds_all_of_it(kind):
    run, again = KINDS[kind](), KINDS[kind]()
    run.step(next(iter(run.loader)))
    assert again.load(run.saved()).accounted == 4
    again.train()  # another epoch, with its own draws
    assert has_spent(again, 2)


def test_a_load_in_the_middle_of_an_epoch_accounts_for_the_rest_of_the_epoch():
    run = Run("random_allocation")
    before, batches = run.saved(), iter(run.loader)
    run.step(next(batches))
    other_epoch = run.saved()
    for file, accounted, rewound in ((before, 4, 4), (other_epoch, 8, 8)):
        run.load(file, allow_rewind=True)
        run.step(next(batches))
        assert (run.accounted, run.engine.accountant.rewound) == (accounted, rewound)


@pytest.mark.parametrize("kind", [*KINDS, "shuffled_sums", "shuffled_checkin", "gdp"])
def test_a_batch_that_is_left_out_is_told_of_as_its_size_may_show(kind):
    run = KINDS.get(kind, functools.partial(Run, kind))()
    batches = iter(run.loader)
    next(batches)
    run.optimizer.zero_grad()
    run.backward(next(batches))
    with pytest.warns(PrivacyAssumptionWarning, match="step on every batch, also on empty") as told:
        run.optimizer.step()
    assert {warning.filename for warning in told} == {__file__}
    report = run.engine.privacy_report(1e-5)
    for text in (report.statement(), str(report)):
        assert "skipped batches were skipped independently" in " ".join(text.split())
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        run.train(batches)
        assert (run.updates, run.accounted) == (3, 4 if kind in KINDS else 3)
        run.train(itertools.islice(run.loader, 2))  # an epoch may be left
        run.train()


def leave(run, *, after):
    """Draws one more batch than it steps on, and leaves the pass as a break does."""
    batches = iter(run.loader)
    run.train(itertools.islice(batches, after))
    next(batches)


WAYS = {
    "chosen batches of next(iter(loader))": (
        lambda run: [leave(run, after=0) for _ in range(5)] and run.step(next(iter(run.loader))),
        (True, True),
    ),
    "the last batch alone": (lambda run: run.step(list(run.loader)[-1]), (True, True)),
    "the last batch left out": (
        lambda run: [
            run.train(batch for place, batch in enumerate(run.loader) if place < 3),
            run.step(next(iter(run.loader))),
        ],
        (True, True),
    ),
    "breaks for a size": (lambda run: [leave(run, after=1) for _ in range(3)], (True, True)),
    "a break at the end": (lambda run: leave(run, after=2), (False, True)),
    "a look at one batch": (lambda run: leave(run, after=0) or run.train(), (False, True)),
    "breaks after a step": (
        lambda run: [run.train(itertools.islice(run.loader, 3)) for _ in range(2)],
        (False, False),
    ),
    "evaluations of all records": (
        lambda run: [run.step(batch) or list(run.loader) for batch in run.loader],
        (False, False),
    ),
    "a report before the step": (
        lambda run: [
            run.engine.privacy_report(1e-5) and run.step(batch) for batch in run.train().loader
        ],
        (False, False),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["a server", "gdp", "shuffle_gauss"])
def test_leaving_a_pass_counts_as_a_batch_left_out_unless_a_step_or_the_end_came_last(kind, way):
    """Batches of one size, as in shuffle_gauss, reveal nothing. There is one warning."""
    run, (leave_out, expected) = KINDS.get(kind, functools.partial(Run, kind))(), WAYS[way]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        leave_out(run)
        report = run.engine.privacy_report(1e-5)
    warned = [str(one.message) for one in said if "no step was taken on it" in str(one.message)]
    noted = "skipped batches were skipped" in " ".join(report.statement().split())
    random = kind != "shuffle_gauss"
    assert (len(warned), noted) == (expected[0] and random, expected[1] and random)


@kinds
def test_noise_is_found_for_whole_epochs(kind):
    run = KINDS[kind](sigma=None, target_epsilon=1.0, target_delta=1e-5, epochs=3)
    for _ in range(3):
        run.train()
    spent = run.engine.get_epsilon(1e-5)
    assert 0.95 < spent <= 1.0  # a grid has at most 2.5 % more noise


def test_the_report_says_what_is_hidden_and_what_is_not_claimed():
    run = Run("random_allocation").train()
    report = run.engine.privacy_report(1e-5)
    statement = report.statement()
    assert "neither which records are in a batch nor how many" in statement
    rows = {bound.bound: bound.epsilon for bound in report.bounds}
    assert rows["certified"] < rows["shuffled_batches"]
    assert "one size from" in str(report)
    assert run.engine.privacy_report(1e-5, adjacency="replace").best.epsilon > rows["certified"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"poisson_sampling": True}, "got poisson_sampling=True: leave it out"),
        ({"poisson_sampling": False}, "got poisson_sampling=False: leave it out"),
        ({"local_noise": True}, "local_noise=True adds noise to every report"),
        ({"rand_on_empty": True}, "leave it out, because steps on empty batches"),
        ({"clipping": "adaptive"}, "clipping .* must be one of"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Run("random_allocation", **options)
