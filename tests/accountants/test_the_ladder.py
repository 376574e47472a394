"""The rows of a report are right about each other: what is compared is about the same thing, and what is seen is said."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle import ShuffledCheckIn, SubsampledShuffle
from opacus_shuffle.accountants.bounds.registry import compute_baseline
from opacus_shuffle.accountants.bounds.shuffle_gaussian import fewest_reports
from opacus_shuffle.accountants.report import PrivacyReport, contradiction
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound

FEW_USERS = {"noise_multiplier": 0.3, "num_users": 50, "sample_rate": 0.1}


def bound_of(**fields):
    standard = {"mechanism": "m", "bound": "b", "epsilon": 1.0, "delta": 1e-5, "adjacency": "zero_out", "rounds": 3}
    return PrivacyBound(**{**standard, "guarantee": Guarantee.ESTIMATE, "covers": "", **fields})


@pytest.mark.parametrize("kind", [ShuffledCheckIn, SubsampledShuffle])
def test_a_sum_and_a_server_are_not_contradicted_by_a_pair_whose_every_report_is_seen(kind):
    report = PrivacyReport([(kind(**FEW_USERS), 50)], delta=1e-3)
    spent = {bound.bound: bound for bound in report.bounds}
    assert spent["central"].epsilon < spent["pair"].lower
    assert "no upper bound" not in str(report)


def test_an_estimate_is_contradicted_by_a_pair_of_the_same_adversary_alone():
    pair = bound_of(bound="pair", epsilon=3.0, lower=2.0, guarantee=Guarantee.PAIR)
    assert "is no upper bound here" in contradiction(bound_of(), pair)
    others = {
        "adversary": "sees sums",
        "trusted": "nobody",
        "adjacency": "replace",
        "delta": 1e-6,
        "rounds": 4,
        "mechanism": "n",
    }
    for name, value in others.items():
        assert not contradiction(bound_of(**{name: value}), pair), name
    assert not contradiction(bound_of(epsilon=2.0), pair)
    assert not contradiction(dataclasses.replace(bound_of(), guarantee=Guarantee.PROVED), pair)


def exact_delta(run, rounds, epsilon):
    """δ at ε where each round's sum and participants are seen: a mixture of Gaussian mechanisms over how many take part."""
    others = np.arange(run.num_users)
    squares = np.concatenate([[0.0], 1 / ((others + 1) * run.noise_multiplier**2)])  # μ² of one round
    chances = np.concatenate(
        [[1 - run.sample_rate], run.sample_rate * scipy.stats.binom(run.num_users - 1, run.sample_rate).pmf(others)]
    )
    total, weight = np.zeros(1), np.ones(1)
    for _ in range(rounds):
        total, weight = np.add.outer(total, squares).ravel(), np.outer(weight, chances).ravel()
    mu, weight = np.sqrt(total[total > 0]), weight[total > 0]
    normal = scipy.stats.norm
    return float(weight @ (normal.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu)))


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(("users", "rate", "sigma"), [(20, 0.1, 0.5), (40, 0.5, 1.0), (30, 0.02, 2.0)])
def test_the_sum_of_a_round_by_coins_has_the_noise_of_the_reports_that_it_has(rounds, users, rate, sigma):
    run = ShuffledCheckIn(noise_multiplier=sigma, num_users=users, sample_rate=rate)
    for delta in (1e-3, 1e-6):
        sums = compute_baseline([(run, rounds)], delta=delta, baseline="secure_aggregation")
        assert sums.guarantee is Guarantee.PROVED
        assert exact_delta(run, rounds, sums.epsilon) <= delta * (1 + 1e-9)
        assert sums.epsilon <= compute_baseline([(run, rounds)], delta=delta, baseline="local").epsilon


@pytest.mark.parametrize(("users", "rate", "sigma", "delta"), [(50, 0.7, 0.5, 0.01), (200, 0.5, 1.0, 1e-3)])
def test_the_sum_of_a_round_by_coins_costs_what_is_left_of_delta_for_as_few_reports_as_there_may_be(users, rate, sigma, delta):
    """A hundredth of δ is for rounds of fewer than k reports; 99 of them are for k, of which a grid takes 0.3 at most."""
    run = [(ShuffledCheckIn(noise_multiplier=sigma, num_users=users, sample_rate=rate), 1)]
    others = scipy.stats.binom(users - 1, rate)
    fewest = max(k for k in range(1, users + 1) if rate * others.cdf(k - 2) <= 0.01 * delta)
    epsilon = compute_baseline(run, delta=delta, baseline="secure_aggregation").epsilon
    mu, normal = 1 / (sigma * math.sqrt(fewest)), scipy.stats.norm
    spent = rate * (normal.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal.cdf(-mu / 2 - epsilon / mu))
    assert 0.987 * delta < spent <= 0.99 * delta


@settings(max_examples=50)
@given(users=st.integers(1, 300), rate=st.floats(1e-3, 0.999), exponent=st.floats(-12, -0.1))
def test_a_record_is_rarely_in_a_round_of_fewer_reports(users, rate, exponent):
    probability = 10**exponent
    fewest = fewest_reports(users, rate, probability)
    chances = scipy.stats.binom(users - 1, rate).pmf(np.arange(users))  # of the others' reports
    assert 1 <= fewest <= users
    assert rate * chances[: fewest - 1].sum() <= probability
    if fewest < users and probability < rate / 2.1:
        assert rate * chances[:fewest].sum() >= probability * (1 - 1e-5)  # not one report fewer than that takes


def test_a_row_says_that_who_takes_part_is_seen_where_not_everyone_does():
    run = ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1)
    report = PrivacyReport([(run, 500)], delta=1e-5)
    rows = [line for line in str(report).splitlines() if "sample seen" in line]
    assert [row.split("  ")[0] for row in rows] == ["aggregation"]
    everyone = PrivacyReport([(dataclasses.replace(run, sample_rate=1.0), 500)], delta=1e-5)
    assert "sample seen" not in str(everyone)


def test_the_server_adds_a_noise_that_does_not_depend_on_how_many_take_part():
    central = compute_baseline([(ShuffledCheckIn(**FEW_USERS), 5)], delta=1e-3, baseline="central")
    assert central.guarantee is Guarantee.PROVED
    assert "noise of the expected number of reports" in central.meaning
