"""Training on every record once an epoch: the batches, the account, and an attack on real runs.

So trains a trusted server with Gaussian noise, and so do users who send sums of bits.
"""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from helpers.private_runs import MODES, Run
from scipy.stats import chi2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyAssumptionWarning, PrivacyEngine, compute_epsilon
from opacus_shuffle.audit import audit_scores
from opacus_shuffle.engine.sampling.samplers import RandomAllocationSampler


def epsilon_of(epochs, batches=4, sigma=2.0):
    return compute_epsilon(
        "random_allocation",
        noise_multiplier=sigma,
        num_batches=batches,
        steps=epochs * batches,
        delta=1e-5,
    )


KINDS = {
    "a server": functools.partial(Run, "random_allocation"),
    "sums of bits": functools.partial(Run, "shuffled_sums", sampling="random_allocation"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def has_spent(run, epochs):
    """Whether it costs what a server's noise costs, and tails of bits next to nothing."""
    sigma = run.optimizer.noise_multiplier
    return run.engine.get_epsilon(1e-5) == pytest.approx(epsilon_of(epochs, sigma=sigma), rel=1e-7)


def test_every_record_is_in_each_epoch_once_and_in_each_batch_as_often():
    """Chi-square of the places of 40 records in 400 epochs: 40·4 classes, at p = 1e-6."""
    sampler = RandomAllocationSampler(num_samples=40, batch_size=8, steps=5)
    seen = torch.zeros(40, 5)
    for _ in range(400):
        batches = list(sampler)
        assert len(batches) == 5
        assert sorted(record for batch in batches for record in batch) == list(range(40))
        for place, batch in enumerate(batches):
            seen[batch, place] += 1
    assert float(((seen - 80) ** 2 / 80).sum()) < chi2.ppf(1 - 1e-6, 40 * 4)


def test_two_records_and_two_epochs_are_drawn_apart():
    """Pairs of places are uniform: of two records in one epoch, of one record in two epochs."""
    sampler = RandomAllocationSampler(num_samples=2, batch_size=1, steps=3)
    together, later = torch.zeros(3, 3), torch.zeros(3, 3)
    before = 0
    for _ in range(1800):
        batches = list(sampler)
        one, two = (next(p for p, batch in enumerate(batches) if r in batch) for r in (0, 1))
        together[one, two] += 1
        later[before, one] += 1
        before = one
    for counts in (together, later):
        assert float(((counts - 200) ** 2 / 200).sum()) < chi2.ppf(1 - 1e-6, 8)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*(("a server", mode) for mode in MODES if mode != "ew"), ("sums of bits", "hooks")],
)
def test_an_epoch_trains_on_each_record_once_and_is_accounted_in_full_at_its_first_step(kind, mode):
    run = KINDS[kind](mode=mode)
    for epochs in (1, 2):
        records = 0
        for batch in run.loader:
            run.step(batch)
            records += len(batch[0])
            assert run.accounted == 4 * epochs
        assert records == 24
        assert run.updates == 4 * epochs
        assert has_spent(run, epochs)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle_weights": True},
        {"engine": "secure"},
        {"clipping": "per_layer", "toy": {"max_grad_norm": [0.5] * 4}},
        {"loader": {"num_workers": 1}},
    ],
    ids=["weights", "secure mode", "layers", "workers"],
)
def test_it_goes_with_the_other_flags(options):
    if "engine" in options:
        options = {"engine": PrivacyEngine(accountant="random_allocation", secure_mode=True)}
    run = Run("random_allocation", **options).train()
    assert (run.updates, run.accounted) == (4, 4)


@kinds
def test_an_epoch_that_is_left_costs_what_a_whole_one_costs(kind):
    run = KINDS[kind]()
    for _ in range(3):
        run.step(next(iter(run.loader)))
    assert run.updates == 3
    assert has_spent(run, 3)


@kinds
def test_physical_batches_belong_to_the_epoch_of_theirs(kind):
    run = KINDS[kind](records=40, batch_size=10)
    for epochs in (1, 2):
        with run.split(3) as loader:
            run.train(loader)
        assert (run.updates, run.accounted) == (4 * epochs, 4 * epochs)


@kinds
def test_an_empty_batch_is_noised_and_released(kind):
    run = KINDS[kind](records=3, batch_size=1)
    sizes = []
    for _ in range(20):
        for x, y in run.loader:
            sizes.append(len(x))
            before = run.weights()
            run.step((x, y))
            moved = [not torch.equal(before[name], now) for name, now in run.weights().items()]
            assert all(moved)
    assert 0 in sizes
    assert run.updates == len(sizes) == 60


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


@pytest.mark.parametrize("kind", [*KINDS, "shuffled_sums", "shuffled_checkin", "prv"])
def test_a_batch_that_is_left_out_is_told_of_as_its_size_may_show(kind):
    run = KINDS.get(kind, functools.partial(Run, kind))()
    batches = iter(run.loader)
    next(batches)
    run.optimizer.zero_grad()
    run.backward(next(batches))
    with pytest.warns(PrivacyAssumptionWarning, match="step on every batch, also on empty") as told:
        run.optimizer.step()
    assert {warning.filename for warning in told} == {__file__}
    for text in (run.engine.privacy_report(1e-5).statement(), str(run.engine.privacy_report(1e-5))):
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
@pytest.mark.parametrize("kind", ["a server", "prv", "shuffle_gauss"])
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


@pytest.mark.filterwarnings("error::opacus_shuffle.PrivacyAssumptionWarning")
def test_the_last_batch_of_a_pass_that_is_left_out_is_told_of_at_the_next_step():
    run = Run("random_allocation")
    assert len(list(run.loader)) == 4  # as whoever evaluates there
    for place, batch in enumerate(run.loader):
        if place < 3:
            run.step(batch)
    with pytest.warns(PrivacyAssumptionWarning, match="step on every batch, also on empty"):
        run.step(next(iter(run.loader)))


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
        ({"local_noise": True}, "at the server: leave out local_noise"),
        ({"rand_on_empty": True}, "leave it out, for batches of no records"),
        ({"clipping": "adaptive"}, "clipping .* must be one of"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Run("random_allocation", **options)


def test_a_changed_sampler_is_refused():
    run = Run("random_allocation")
    run.loader.batch_sampler.steps = 2
    with pytest.raises(ValueError, match="steps from 4 to 2"):
        next(iter(run.loader))


@pytest.mark.parametrize("name", ["random_allocation", "shuffled_checkin", "shuffle_gauss"])
def test_nothing_is_said_of_a_secure_generator_where_all_are(name, recwarn):
    PrivacyEngine(accountant=name)
    assert not [str(warning.message) for warning in recwarn if "Secure RNG" in str(warning.message)]


@pytest.mark.zoo
def test_an_attack_on_real_epochs_stays_below_and_comes_near():
    """The likelihood ratio of what an engine released, record 1 as it is and zeroed.

    At a learning rate of 0 every epoch is a trial by itself. The bound is above the truth with
    probability 1e-6 at most.
    """
    sigma, batches, epochs = 0.6, 2, 1500

    def scores(present):
        data = torch.zeros(4, 1)
        data[0] = 100.0 * present  # clipped to a gradient of norm 1
        model = nn.Linear(1, 1, bias=False)
        private, optimizer, loader = PrivacyEngine(accountant="random_allocation").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(data), batch_size=2),
            noise_multiplier=sigma,
            max_grad_norm=1.0,
            loss_reduction="sum",
        )
        found = torch.empty(epochs, batches)
        for trial in range(epochs):
            for step, (x,) in enumerate(loader):
                private(x).sum().backward()
                optimizer.step()
                found[trial, step] = model.weight.grad.item()
                optimizer.zero_grad()
        return torch.exp((found - 0.5) / sigma**2).mean(dim=1).numpy()

    lower = audit_scores(scores(0.0), scores(1.0), delta=1e-2, confidence=1 - 1e-6)
    certified = compute_epsilon(
        "random_allocation", noise_multiplier=sigma, num_batches=batches, steps=batches, delta=1e-2
    )
    assert 0.3 < lower.epsilon <= certified
