"""Who takes part: each accountant's own sampling, at its own rate, with no step or record lost."""

from __future__ import annotations

import collections
import itertools

import pytest
from helpers.private_runs import OURS, Run, bound_everywhere
from scipy import stats

from opacus_shuffle.core.participation import bernoulli_indices

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
POISSON = ("shuffled_checkin", "shuffled_fw", "shuffled_sums")
FIXED = ("shuffle_gauss", "subsampled_shuffle")


@pytest.mark.parametrize(
    ("records", "batch"), [(24, 6), (23, 7), pytest.param(999, 10, marks=pytest.mark.zoo)]
)
@pytest.mark.parametrize("name", [*POISSON, "rdp"])
def test_every_record_s_coin_has_exactly_the_rate_that_is_accounted(
    name, records, batch, monkeypatch
):
    """To the last bit: the sampler hands its own rate on, and the engine the accountant's."""
    run = Run(name, records=records, batch_size=batch, shuffle_weights=name == "rdp")
    tosses = []

    def toss(count, rate, generator):
        tosses.append((count, rate, generator is run.loader.batch_sampler.generator))
        return [0, 1]

    bound_everywhere(monkeypatch, bernoulli_indices, toss)
    run.train()
    ((_, rate, steps),) = run.engine.accountant.history
    assert rate == run.loader.batch_sampler.sample_rate == 1 / len(run.toy["data_loader"])
    assert tosses == [(records, rate, True)] * steps


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("subsampled_shuffle", {}),
        ("shuffle_gauss", {}),
        ("shuffled_sums", {"poisson_sampling": False}),
        ("shuffled_checkin", {}),
        ("rdp", {}),
    ],
)
def test_all_sets_of_records_that_are_as_likely_by_the_mechanism_are_drawn_as_often(name, options):
    """Of five records two, or each by a coin of rate 1/3: chi-square between its 1e-5 quantiles."""
    run = Run(name, records=5, batch_size=2, sigma=4.0, **options)
    draws = itertools.chain.from_iterable(itertools.repeat(run.loader.batch_sampler))
    count = 3000
    counts = collections.Counter(frozenset(map(int, next(draws))) for _ in range(count))
    fixed = name in FIXED or options
    sizes = [2] if fixed else range(6)
    chances = {
        frozenset(chosen): 0.1 if fixed else (1 / 3) ** size * (2 / 3) ** (5 - size)
        for size in sizes
        for chosen in itertools.combinations(range(5), size)
    }
    assert counts.keys() <= chances.keys()
    squares = [(counts[chosen] - count * p) ** 2 / (count * p) for chosen, p in chances.items()]
    assert sum(squares) < stats.chi2(len(chances) - 1).isf(1e-5)
    assert sum(squares) > stats.chi2(len(chances) - 1).ppf(1e-5)  # they are drawn, not dealt


LENGTHS = [(930, 10), (98, 2), (49, 1), (100, 30), (7, 100)]


@pytest.mark.parametrize(
    ("name", "records", "batch"),
    [
        ("shuffled_checkin", *LENGTHS[0]),
        *((name, *length) for name in ("shuffled_checkin", FIXED[1]) for length in LENGTHS[2::2]),
        *(
            pytest.param(name, *LENGTHS[0], marks=pytest.mark.zoo)
            for name in (*FIXED, "shuffled_fw", "shuffled_sums")
        ),
    ],
)
def test_float_arithmetic_never_loses_a_step_or_a_record(name, records, batch):
    """Opacus makes 92 batches of 93, and of 49 records in batches of one an expected size of 0."""
    run = Run(
        name, records=records, batch_size=batch, **({} if name == "shuffled_fw" else OURS[name])
    )
    length = len(run.toy["data_loader"])
    assert len(run.loader) == length
    run.train()
    assert run.updates == length
    assert run.engine.accountant.num_users == records
    reports = min(batch, records)
    rate, divisor = (
        (reports / records, reports)
        if name in FIXED
        else (1 / length, max(1, round(records / length)))
    )
    assert run.engine.accountant.history == [(run.optimizer.noise_multiplier, rate, length)]
    assert run.optimizer.expected_batch_size == divisor
    assert all(value.isfinite().all() for value in run.weights().values())


def test_shuffle_gauss_keeps_a_loader_of_the_user_s_own_if_all_batches_have_one_size():
    options = {"local_noise": True, "poisson_sampling": False, "records": 25}
    with pytest.raises(ValueError, match="drop_last"):
        Run("shuffle_gauss", loader={"shuffle": True}, **options)
    run = Run("shuffle_gauss", loader={"shuffle": True, "drop_last": True}, **options).train()
    assert run.loader.sampler is run.toy["data_loader"].sampler
    assert run.engine.accountant.history == [(2.0, 6 / 25, 4)]
    assert run.engine.accountant.rounds[0][0].num_users == 6
