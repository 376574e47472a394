"""Budgets of runs with shuffled sums: large ones, and whose adjacency they are about."""

from __future__ import annotations

import pytest
from helpers.toy import make_toy

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.accountants.bounds.registry import compute_bound


def trained_for(target_epsilon, **options):
    engine = PrivacyEngine(accountant="shuffled_sums")
    toy = make_toy(records=24, batch_size=6)
    budget = {"target_epsilon": target_epsilon, "target_delta": 1e-5, "epochs": 1}
    return engine, engine.make_private_with_epsilon(**toy, **budget, **options)[1]


@pytest.mark.parametrize("coins", [True, False])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_a_budget_above_the_paper_s_range_is_met_by_the_tight_protocol(coins, adjacency):
    engine, optimizer = trained_for(40.0, poisson_sampling=coins, adjacency=adjacency)
    mechanism = engine.accountant.planned
    assert 30 < mechanism_epsilon(mechanism, adjacency) <= 40
    assert optimizer.aggregator.calibration == "tight"


def test_the_paper_s_own_constants_are_refused_above_its_range():
    with pytest.raises(ValueError, match=r"calibration='published' must not exceed 15 .*got 40.0"):
        trained_for(40.0, bound="published")


def test_zero_out_is_never_answered_by_replacement_where_coins_are_secret():
    mechanism = trained_for(4.0)[0].accountant.planned
    assert mechanism_epsilon(mechanism, "zero_out") < 0.7 * mechanism_epsilon(mechanism, "replace")


def mechanism_epsilon(mechanism, adjacency):
    return compute_bound([(mechanism, 4)], delta=1e-5, adjacency=adjacency).epsilon
