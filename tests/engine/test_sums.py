"""Training with shuffled sums: what is released, what it costs, and whom its noise counts on.

By default all users report in every round, and each tosses a secret coin for whether its gradient
is in its report, or draws in which round of an epoch it is; with ``poisson_sampling=False`` a
secret sample of fixed size reports.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import opacus
import pytest
import torch
from helpers.private_runs import Run
from helpers.toy import here
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyAssumptionWarning
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DELTA = 1e-5
TOY = 5 * 40 + 40 + 40 * 3 + 3
"""What the small network trains."""
SAMPLES = {"poisson_sampling": False}
ALLOCATED = {"sampling": "random_allocation"}


def protocol_for(records=6, dimension=TOY, *, epsilon=1.0, **options):
    return ShuffleVectorSum(records, dimension, 1.0, epsilon=epsilon, delta=DELTA, **options)


def still(rows, *, batch_size, norm=1.0, **options):
    """Learns nothing: every record's gradient is its row, and a released sum that of a batch's."""
    module = nn.Linear(rows.shape[1], 1, bias=False)
    data = DataLoader(TensorDataset(here(rows)), batch_size=batch_size)
    sgd = torch.optim.SGD(module.parameters(), lr=0.0)
    toy = {"module": module, "optimizer": sgd, "data_loader": data, "max_grad_norm": norm}
    return Run("shuffled_sums", toy=toy, loss_reduction="sum", **options)


def sums(run, *, epochs=1, physical=10**6):
    """The rows of each batch, and the sum that is released of them."""
    for _ in range(epochs):
        with run.split(physical) as batches:
            rows = []
            for (x,) in batches:
                rows.append(x)
                run.optimizer.zero_grad()
                run.model(x).sum().backward()
                run.optimizer.step()
                if not run.optimizer.last_step_was_skipped:
                    yield torch.cat(rows), run.network.weight.grad[0].double()
                    rows = []


# ---- what is released -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "physical"),
    [
        ({}, 10**6),
        (SAMPLES, 3),
        (ALLOCATED, 3),
        pytest.param({}, 3, marks=pytest.mark.zoo),
        pytest.param(SAMPLES, 10**6, marks=pytest.mark.zoo),
        pytest.param(ALLOCATED, 10**6, marks=pytest.mark.zoo),
    ],
)
def test_a_release_is_unbiased_on_the_protocol_s_grid_and_as_noisy_as_it_says(options, physical):
    """All 3000 coordinates are alike, so they are draws: mean and variance to five standard errors.

    Users whose records are not in the batch add their noise all the same.
    """
    value = 0.7 / math.sqrt(3000)  # within the norm: nothing is clipped
    run = still(torch.full((40, 3000), value), batch_size=8, **options)
    protocol, sizes = run.optimizer.noise.protocol, set()
    assert protocol.num_users == (8 if options == SAMPLES else 40)
    step = 2 / protocol.granularity
    bits = protocol.num_users * protocol.noise_bits
    middle = protocol.num_users * protocol.granularity / 2
    noise = bits * protocol.bit_probability * (1 - protocol.bit_probability)
    for x, released in sums(run, epochs=2, physical=physical):
        sizes.add(len(x))
        share = (len(x) * value / step + middle) % 1  # the sum is rounded, once
        deviation = step * math.sqrt(noise + share * (1 - share))
        errors = (released - len(x) * value) / deviation
        assert abs(float(errors.mean())) < 5 / math.sqrt(3000)
        assert float(errors.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / 3000))
        steps = released / step + bits * protocol.bit_probability
        on_grid = steps + middle
        assert float((on_grid - on_grid.round()).abs().max()) < 1e-2
    assert sizes == {8} if options == SAMPLES else len(sizes) > 2
    assert run.accounted == run.updates == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_record_is_clipped_to_the_norm_whatever_the_precision(dtype):
    """Eight records in one direction, less one, add up to 7·C, but for noise of 0.2·C in it.

    The squares of one are beyond its precision, so it is left out, like three more that are not
    finite.
    """
    rows = torch.full((11, 403), 50.0, dtype=dtype)
    rows[0], rows[1] = 1e300 if dtype == torch.float64 else 1e30, 1.0
    rows[8:, -1] = torch.tensor([math.nan, math.inf, -math.inf])
    protocol = protocol_for(11, 403, epsilon=60.0)
    run = still(rows, batch_size=11, sigma=None, aggregator=protocol, **SAMPLES)
    run.network.to(dtype)
    ((_, released),) = sums(run)
    assert run.network.weight.grad.dtype == dtype
    noise = run.optimizer.noise.protocol.variance**0.5
    assert float(released.sum()) / 403**0.5 == pytest.approx(7, abs=5 * noise + 0.05)


# ---- what it costs --------------------------------------------------------------------------


def test_a_run_costs_what_dp_sgd_costs_and_its_multiplier_is_the_sum_s():
    run = Run("shuffled_sums", records=200, batch_size=20, sigma=1.1).train()
    assert 1.1 <= run.optimizer.noise_multiplier <= 1.1 * 1.025
    assert 1.1 <= run.optimizer.noise.protocol.variance**0.5 <= 1.1 * 1.06
    ((mechanism, steps),) = run.engine.accountant.rounds
    told = (mechanism.sampling, mechanism.sample_rate, mechanism.reports, steps)
    assert told == ("poisson", 0.1, 200, 10)
    stock = opacus.accountants.PRVAccountant()
    stock.history = [(run.optimizer.noise_multiplier, 0.1, 10)]
    expected = pytest.approx(stock.get_epsilon(DELTA), abs=0.02, rel=0.01)
    assert run.engine.get_epsilon(DELTA) == expected
    assert "secret coins" in str(run.engine.privacy_report(DELTA))


def test_with_secret_coins_a_replaced_record_becomes_its_opposite_at_worst():
    """One round, by the pair of Theorem 8.2 in docs/proofs; to become 0 costs less."""
    run = Run("shuffled_sums", records=200, batch_size=20, sigma=1.0)
    run.step()
    thresholds = np.linspace(0, 9, 90_001)  # the pair's ratio grows, so they are the best tests
    own, opposite = (
        0.9 * stats.norm.sf(thresholds) + 0.1 * stats.norm.sf(thresholds - place)
        for place in (1 / run.optimizer.noise_multiplier, -1 / run.optimizer.noise_multiplier)
    )
    epsilon = run.engine.get_epsilon(DELTA, adjacency="replace")
    deltas = [np.max(own - math.exp(tried * epsilon) * opposite) for tried in (1.0, 0.995)]
    assert deltas[0] <= DELTA < deltas[1]
    assert run.engine.get_epsilon(DELTA) < epsilon


@pytest.mark.parametrize(
    ("options", "adjacency"),
    [
        ({}, "replace"),
        (SAMPLES, "zero_out"),
        (ALLOCATED, "zero_out"),
        pytest.param({}, "zero_out", marks=pytest.mark.zoo),
        pytest.param(SAMPLES, "replace", marks=pytest.mark.zoo),
        pytest.param(ALLOCATED, "replace", marks=pytest.mark.zoo),
    ],
)
def test_a_budget_is_met_and_used_up(adjacency, options):
    asked = {"bound": "certified", "adjacency": adjacency}
    budget = {"target_epsilon": 1.5, "target_delta": DELTA, "epochs": 2, **asked, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyAssumptionWarning)
        run = Run("shuffled_sums", sigma=None, **budget)
    spent = run.train().train().engine.get_epsilon(DELTA, **asked)
    assert run.accounted == 8
    protocol = run.optimizer.noise.protocol
    assert 1.42 < spent <= 1.5  # a grid has at most 2.5 % more noise
    again = Run("shuffled_sums", sigma=None, aggregator=protocol, **budget)
    assert again.optimizer.noise.protocol is protocol
    with pytest.raises(ValueError, match=r"not met by the aggregator.*leave the aggregator"):
        Run("shuffled_sums", sigma=None, aggregator=protocol, **{**budget, "epochs": 4})


# ---- whom it counts on ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "present", "refusal"),
    [
        (6, 2, r"num_reports|users"),
        (24, 5, r"honest_fraction is 0.5.*samples"),
    ],
)
def test_half_of_all_users_may_drop_out_where_the_protocol_allows_it_and_no_one_of_a_sample(
    records, present, refusal
):
    """Of six records, half of them honest, three suffice, two do not; a sample must be complete."""

    def step(records, present):
        asked = {"aggregator": protocol_for(6, honest_fraction=0.5), **SAMPLES}
        run = Run("shuffled_sums", records=records, batch_size=6, sigma=None, **asked)
        run.step([part[:present] for part in run.batch()])
        return run.accounted

    assert step(6, 3) == 1
    with pytest.raises(ValueError, match=refusal):
        step(records, present)


def test_a_protocol_of_your_own_is_for_everyone_and_one_engine_has_one():
    half = protocol_for(24, honest_fraction=0.5)
    run = Run("shuffled_sums", sigma=None, aggregator=half).train()
    assert run.engine.accountant.rounds[0][0].honest_fraction == 0.5
    Run("shuffled_sums", engine=run.engine, sigma=None, aggregator=half)  # the same again is fine
    other = protocol_for(24, epsilon=0.5)
    with pytest.raises(ValueError, match="use a new PrivacyEngine"):
        Run("shuffled_sums", engine=run.engine, sigma=None, aggregator=other)
    file = run.saved()
    again = Run("shuffled_sums", sigma=None, aggregator=half).load(file)
    assert again.engine.get_epsilon(DELTA) == run.engine.get_epsilon(DELTA)
    with pytest.raises(
        ValueError, match=r"with granularity=.*honest_fraction=0\.5, this accountant of one with"
    ):
        Run("shuffled_sums", sigma=None, aggregator=other).load(file)
