"""What is particular to ``shuffle_gauss``, whose round is a batch."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.accountants import (
    DELTA,
    spent,
)

import opacus_shuffle
from opacus_shuffle import ShuffleGauss
from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.analysis import composition, mean_ratio

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


def test_a_batch_size_that_is_told_late_counts_as_if_it_was_known():
    known, late = (ShuffleAccountant(ShuffleGauss, num_users=1000, batch_size=batch) for batch in (400, None))
    for each in (known, late):
        each.step(noise_multiplier=10.0, sample_rate=0.1)
    assert late.get_epsilon(DELTA, batch_size=400) == known.get_epsilon(DELTA) > late.get_epsilon(DELTA)
    restored = ShuffleAccountant(ShuffleGauss)
    restored.load_state_dict(late.state_dict())
    with pytest.raises(ValueError, match="leave out num_users and batch_size"):
        restored.get_epsilon(DELTA, batch_size=400)


def test_shuffle_gauss_takes_a_batch_for_a_round():
    epsilon = spent(ShuffleGauss, [(3.0, 0.1, 7)], num_users=1000)
    assert epsilon == opacus_shuffle.compute_epsilon("shuffle_gauss", noise_multiplier=3.0, num_users=100, steps=7, delta=DELTA)


def test_orders_may_come_from_a_generator():
    orders = [2, 3, 5, 8]
    once = spent(ShuffleGauss, [(3.0, 0.1, 7)], bound="published", orders=(order for order in orders))
    assert once == spent(ShuffleGauss, [(3.0, 0.1, 7)], bound="published", orders=orders)


def test_published_is_the_exact_rdp_of_theorem_1_for_shuffle_gauss():
    orders = np.arange(2, 400)
    rdp = mean_ratio.compute_rdp(noise_multiplier=3.0, num_users=100, orders=orders)
    direct, _ = composition.epsilon_from_rdp(lambda at: 7 * np.interp(at, orders, rdp), delta=DELTA, orders=orders)
    assert spent(ShuffleGauss, [(3.0, 0.1, 7)], bound="published") == pytest.approx(direct, rel=1e-9)


def test_the_answer_of_pair_carries_a_lower_value_within_a_percent():
    accountant = ShuffleAccountant(ShuffleGauss, num_users=60_000, local_noise=True)
    accountant.history = [(9.48, 1.0, 7)]
    answer = accountant.bound(1 / 60_000, bound="pair")
    assert 0.99 * answer.epsilon < answer.lower < answer.epsilon
    assert accountant.bound(1 / 60_000).lower is None


def test_a_rise_in_the_number_of_users_is_worth_reporting_in_full():
    accountant = ShuffleAccountant(ShuffleGauss, num_users=60_000, local_noise=True)
    accountant.step(noise_multiplier=9.48, sample_rate=1.0)
    report = accountant.report(1 / 60_000)
    printed = str(report)
    for word in ("published", "pair", "certified", "PAIR", "PROVED", "zero_out", "every data set", "0.001407", "0.3469"):
        assert word in printed
    rungs = ["local", "certified", "published", "pair", "secure_aggregation", "central"]
    assert [row["bound"] for row in report.to_dict()["bounds"]] == rungs
