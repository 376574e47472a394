"""Reports of any ε0-LDP randomiser: the pair by enumeration, and true reports below it."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from helpers.clones_by_enumeration import exact_delta
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from opacus_shuffle.analysis import ldp_clones


@settings(max_examples=40)
@given(st.floats(0.05, 6), st.integers(2, 12), st.floats(1e-9, 0.2))
def test_numeric_epsilon_is_just_above_the_enumerated_pair(local_epsilon, users, delta):
    epsilon = ldp_clones.compute_epsilon(local_epsilon=local_epsilon, num_users=users, delta=delta)
    probability = 2 / (1 + mpmath.exp(local_epsilon))
    assert exact_delta(epsilon, local_epsilon, users, probability) <= delta
    if epsilon > 0:
        below = epsilon * (1 - 1e-5) - 1e-9
        assert exact_delta(below, local_epsilon, users, probability) > delta


def shuffled_delta(epsilon, reports):
    """δ(ε) of shuffled reports: row 0 or row 1 is user 1's, the other rows are the others'."""
    first, second = {}, {}
    for values in itertools.product(range(reports.shape[1]), repeat=len(reports) - 1):
        others = math.prod(reports[range(2, len(reports)), values[1:]])
        view = tuple(sorted(values))
        first[view] = first.get(view, 0) + reports[0, values[0]] * others
        second[view] = second.get(view, 0) + reports[1, values[0]] * others
    return sum(max(first[view] - math.exp(epsilon) * second[view], 0) for view in first)


@pytest.mark.parametrize("users", [1, 2, 3])
def test_no_small_reports_show_more_than_their_clones_and_two_answers_all_of_it(users):
    generator = np.random.default_rng(users)
    answers = np.array([[0.8, 0.2], [0.2, 0.8]])[[0, 1, 0, 1][: users + 1]]
    some = [
        generator.exponential(size=values) * generator.choice([1, 2, 7], (users + 1, values))
        for values in (3, 4)
        for _ in range(20)
    ]
    for reports in (answers, *(rows / rows.sum(axis=1, keepdims=True) for rows in some)):
        local_epsilon = math.log((reports.max(axis=0) / reports.min(axis=0)).max())
        for part in (0.0, 0.1, 0.3, 0.6, 0.9):
            epsilon = part * local_epsilon
            probability = 2 / (1 + math.exp(local_epsilon))
            most = float(exact_delta(epsilon, local_epsilon, users, probability))
            shown = shuffled_delta(epsilon, reports)
            assert shown <= most + 1e-14
            if reports is answers and users < 3:
                assert shown == pytest.approx(most, rel=1e-12)


@pytest.mark.parametrize("trials", [1000, 10**6, pytest.param(10**9, marks=pytest.mark.zoo)])
def test_binomial_tails_are_as_accurate_as_the_margin_assumes(trials):
    for deviations in (1, 6, 15):
        k = int(trials / 2 + deviations * math.sqrt(trials) / 2)
        with mpmath.workdps(40):
            edge = mpmath.binomial(trials, k - 1) * mpmath.mpf(2) ** -trials
            term, tail, a = edge * (trials - k + 1) / k, mpmath.mpf(0), k
            while term > tail * mpmath.mpf(10) ** -16:
                tail, term, a = tail + term, term * (trials - a) / (a + 1), a + 1
            assert abs(binom.pmf(k - 1, trials, 0.5) / edge - 1) < ldp_clones.MARGIN / 2
            assert abs(binom.sf(k - 1, trials, 0.5) / tail - 1) < ldp_clones.MARGIN / 2


def test_one_user_hides_among_nobody():
    assert ldp_clones.compute_epsilon(local_epsilon=4.0, num_users=1, delta=1e-6) == 4.0
