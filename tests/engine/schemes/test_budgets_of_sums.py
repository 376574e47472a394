"""Budgets of runs with shuffled sums: large ones, and whose adjacency they are about."""

from __future__ import annotations

import math

import pytest
from helpers.toy import make_toy

from opacus_shuffle import PrivacyEngine
from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.protocols.calibration import ROUNDING_SHARE


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


# --- how much rounding may cost ----------------------------------------------------------------------------------------------


def bits_and_share(optimizer, rate):
    """Bits a coordinate, and how far above that of DP-SGD's Gaussian the variance is, for the multiplier that is accounted."""
    protocol = optimizer.aggregator
    variance = protocol._plan.variance(protocol.num_users, rate) * (2 / protocol.granularity) ** 2
    return protocol.granularity + protocol.noise_bits, variance / optimizer.noise_multiplier**2 - 1


@pytest.mark.parametrize(("coins", "rate"), [(True, 0.25), pytest.param(False, 1.0, marks=pytest.mark.zoo)])
def test_a_smaller_rounding_share_takes_more_bits_in_both_methods(coins, rate):
    def trained(share):
        toy = make_toy(records=24, batch_size=6)
        engine = PrivacyEngine(accountant="shuffled_sums")
        options = {"poisson_sampling": coins, "rounding_share": share}
        return engine.make_private(**toy, noise_multiplier=1.5, **options)[1]

    def trained_by_budget(share):
        return trained_for(4.0, poisson_sampling=coins, rounding_share=share)[1]

    for method in (trained, trained_by_budget):
        fine, usual, coarse = (bits_and_share(method(share), rate) for share in (0.02, None, 0.5))
        assert fine[0] > usual[0] > coarse[0]
        assert usual == bits_and_share(method(ROUNDING_SHARE), rate)
        assert fine[1] <= 0.02
        assert coarse[1] <= 0.5


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, math.nan, True, "much"])
def test_a_rounding_share_out_of_range_is_refused_before_anything_is_changed(share):
    engine, toy = PrivacyEngine(accountant="shuffled_sums"), make_toy()
    with pytest.raises(ValueError, match="rounding_share must"):
        engine.make_private(**toy, noise_multiplier=1.0, rounding_share=share)
    assert engine.accountant.planned is None
    engine.make_private(**toy, noise_multiplier=1.0)


def test_a_rounding_share_is_refused_where_no_protocol_is_built_by_it():
    for accountant in ("shuffled_checkin", "rdp"):
        with pytest.raises(ValueError, match=r"rounding_share=0.1 goes with accountant='shuffled_sums'"):
            PrivacyEngine(accountant=accountant).make_private(**make_toy(), noise_multiplier=1.0, rounding_share=0.1)
    for options in ({"bound": "published"}, {"poisson_sampling": False, "adjacency": "replace"}):
        with pytest.raises(ValueError, match=r"rounding_share=0.1 is for protocols of a noise multiplier"):
            trained_for(4.0, rounding_share=0.1, **options)
    protocol = trained_for(4.0)[1].aggregator
    with pytest.raises(ValueError, match=r"rounding_share=0.1 is for a protocol that is built here, got an aggregator"):
        PrivacyEngine(accountant="shuffled_sums").make_private(**make_toy(), aggregator=protocol, rounding_share=0.1)


def mechanism_epsilon(mechanism, adjacency):
    return compute_bound([(mechanism, 4)], delta=1e-5, adjacency=adjacency).epsilon
