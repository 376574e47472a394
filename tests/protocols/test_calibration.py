"""The printed constants as printed; what the tight calibration promises, against all outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.binomial_sums import hockey_stick
from opacus_shuffle.protocols.calibration import (
    CALIBRATIONS,
    OVERHEAD,
    Promise,
    honest_users,
    noise_variance,
    published_scalar_plan,
    published_vector_plan,
    tight_scalar_plan,
    tight_vector_plan,
)
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

# ---- SCO Theorem A.6, Lemma 3.1

vectors = st.fixed_dictionaries(
    {
        "num_users": st.integers(1, 10**4),
        "dimension": st.integers(1, 10**4),
        "max_norm": st.floats(0.01, 2.0),
        "epsilon": st.floats(0.5, 15.0),
        "delta": st.floats(1e-8, 0.49),
    }
)


def smallest_bits(g, epsilon, delta, n):
    """b and p as Lemma 3.1 prints them, b the smallest whole number above its bound."""
    b = math.floor(180 * g**2 * math.log(2 / delta) / (epsilon**2 * n)) + 1
    return b, 90 * g**2 * math.log(2 / delta) / (b * epsilon**2 * n)


# SCO Theorem A.6.
@given(given_numbers=vectors)
@settings(max_examples=200)
def test_the_vector_plan_is_theorem_a6_as_printed(given_numbers):
    n, d, norm = (given_numbers[name] for name in ("num_users", "dimension", "max_norm"))
    epsilon, delta = given_numbers["epsilon"], given_numbers["delta"]
    plan = published_vector_plan(**given_numbers, honest_fraction=1.0)
    g = math.ceil(max(2 * norm * math.sqrt(n), math.sqrt(d), 4) - 1e-9)
    share = delta / (d + 1)
    small = epsilon / (18 * math.sqrt(math.log(1 / share)))
    b, p = smallest_bits(g, small, share, n)
    assert plan.granularity == g
    assert abs(plan.noise_bits - b) <= 1 + 1e-12 * b
    assert plan.noise_bits > 180 * g**2 * math.log(2 / share) / (small**2 * n) * (1 - 1e-13)
    assert plan.bit_probability == pytest.approx(p, rel=1e-9) or b < 10
    assert plan.bit_probability * plan.noise_bits == pytest.approx(p * b, rel=1e-12)
    assert 0 < plan.bit_probability < 0.5
    assert plan.honest_users == n


# SCO Lemma 3.1, SCO Lemma A.2.
@given(given_numbers=vectors)
@settings(max_examples=200)
def test_the_scalar_plan_is_lemma_31_as_printed(given_numbers):
    n, epsilon, delta = (given_numbers[name] for name in ("num_users", "epsilon", "delta"))
    top = given_numbers["max_norm"]
    plan = published_scalar_plan(
        num_users=n, max_value=top, epsilon=epsilon, delta=delta, honest_fraction=1.0
    )
    g = plan.granularity
    printed = math.ceil(top * math.sqrt(n) - 1e-9)
    # The grid is finer than printed only where the proof's "alpha small" needs it.
    assert g == max(printed, 1, math.ceil(epsilon / 2.57 - 1e-9))
    b, p = smallest_bits(g, epsilon, delta, n)
    assert plan.noise_bits == b
    assert plan.bit_probability == pytest.approx(p, rel=1e-12)
    assert 0 < p < 0.5


# SCO Lemma A.1.
@pytest.mark.parametrize("fraction", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize(
    ("n", "d", "epsilon", "delta"),
    [(1, 1, 1.0, 0.4), (7, 2, 0.9, 0.1), (20, 3, 0.5, 1e-3), (1, 1, 15.0, 0.49)],
)
def test_the_papers_noise_gives_lemma_a1s_divergence(n, d, epsilon, delta, fraction):
    if fraction < 1:
        epsilon = min(epsilon, 1.0)
    plan = published_vector_plan(
        num_users=n,
        dimension=d,
        max_norm=1.0,
        epsilon=epsilon,
        delta=delta,
        honest_fraction=fraction,
    )
    share = delta / (d + 1)
    small = epsilon / (18 * math.sqrt(-math.log(share)))
    assert hockey_stick(plan.noise, shift=plan.granularity, epsilon=small) <= share
    scalar = published_scalar_plan(
        num_users=n, max_value=1.0, epsilon=epsilon, delta=delta, honest_fraction=fraction
    )
    assert hockey_stick(scalar.noise, shift=scalar.granularity, epsilon=epsilon) <= delta


# SCO Definition A.7.
@given(num_users=st.integers(1, 10**7), fraction=st.floats(1 / 3, 1.0))
@settings(max_examples=300)
def test_honest_users_are_the_fewest_that_the_fraction_allows(num_users, fraction):
    count = honest_users(num_users, fraction)
    assert 1 <= count <= num_users
    assert count >= fraction * num_users - 1e-6
    assert count - 1 < fraction * num_users


@pytest.mark.parametrize(
    ("num_users", "fraction", "count"),
    [(3_000_000, 1 / 3, 1_000_000), (3_000_001, 1 / 3, 1_000_001), (10, 0.7, 7), (1, 1 / 3, 1)],
)
def test_rounding_adds_no_honest_user(num_users, fraction, count):
    assert honest_users(num_users, fraction) == count


# ---- tight


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (30, 3), (10_000, 500)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-2), (1.0, 1e-6), (8.0, 1e-9)])
def test_the_tight_vector_plan_is_within_its_overhead_and_its_mu(n, d, epsilon, delta, fraction):
    mu, lost = Promise(epsilon, delta).round_mu, 1e-6 * delta
    plan = tight_vector_plan(num_users=n, dimension=d, mu=mu, lost=lost, honest_fraction=fraction)
    honest = math.ceil(fraction * n - 1e-9)
    assert plan.noise.trials == plan.noise_bits * honest
    assert plan.bit_probability == 0.5
    # Variance of the honest users' noise, in units of the range: never below a Gaussian's of that
    # mu, nor far above.
    limit = 1 / mu**2
    assert plan.noise.variance / plan.granularity**2 >= limit * (1 - 1e-12)
    assert plan.variance(n) / plan.granularity**2 <= (1 + OVERHEAD) * limit * n / honest
    # One step more and the bound is broken, but for what OVERHEAD leaves.
    assert (plan.granularity * (1 + OVERHEAD) + 1) / math.sqrt(plan.noise.variance) > mu


def test_plans_are_those_of_the_release_before():
    """What users send is in reports and other people's budgets: it does not change by itself."""
    found = []
    for n, d, mu, fraction in ((1000, 3, 0.01, 1.0), (40, 2, 0.2, 1.0), (500, 30, 0.1, 0.5)):
        sizes = {"num_users": n, "dimension": d, "mu": mu, "honest_fraction": fraction}
        plan = tight_vector_plan(lost=1e-12, **sizes)
        found.append((plan.granularity, plan.noise_bits))
    assert found == [(14, 8000), (53, 7297), (24, 959)]


# SCO Claim A.8: ``fraction``.
@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize(
    ("n", "epsilon", "delta"), [(1, 1.0, 0.1), (20, 0.5, 1e-3), (1000, 3.0, 1e-8), (50, 15.0, 0.3)]
)
def test_the_tight_scalar_plan_meets_delta_and_would_not_with_one_step_more(
    n, epsilon, delta, fraction
):
    plan = tight_scalar_plan(num_users=n, epsilon=epsilon, delta=delta, honest_fraction=fraction)
    m, g = plan.noise_bits * math.ceil(fraction * n - 1e-9), plan.granularity
    y = np.arange(-1, m + g + 3)

    def exact(shift):
        # All outcomes, by pmf: relative error 1e-12.
        moved, stayed = binom.pmf(y - shift, m, 0.5), binom.pmf(y, m, 0.5)
        return float(np.maximum(moved - math.exp(epsilon) * stayed, 0).sum())

    assert exact(g) <= delta
    assert exact(g + 1) > delta


@pytest.mark.parametrize("rounds", [1, 7, 1000])
def test_rounds_of_the_tight_mu_together_are_a_gaussian_that_is_private_enough(rounds):
    mu = Promise(1.0, 1e-5, rounds=rounds).round_mu
    assert gaussian.log_delta(mu=mu * math.sqrt(rounds), epsilon=1.0) <= math.log(1e-5)


# ---- SCO Algorithm 5's split


def optimal_composition(epsilon_each, delta_each, rounds, epsilon):
    """The exact δ(ε) of the worst T (ε_r, δ_r)-DP rounds: randomised responses that fail by δ_r."""
    ones = np.arange(rounds + 1)
    chances = binom.pmf(ones, rounds, 1 / (1 + math.exp(-epsilon_each)))
    loss = (2 * ones - rounds) * epsilon_each
    spread = float(chances @ np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0))
    safe = math.exp(rounds * math.log1p(-delta_each))
    return -math.expm1(rounds * math.log1p(-delta_each)) + safe * spread


@pytest.mark.parametrize("rounds", [2, 3, 10, 100, 3000])
@pytest.mark.parametrize("delta", [0.49, 0.1, 1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 4.0, 15.0])
def test_rounds_of_the_papers_budget_stay_within_the_whole(epsilon, delta, rounds):
    each, each_delta = Promise(epsilon, delta, rounds=rounds).published_round
    assert each_delta == delta / (rounds + 1)
    assert each <= epsilon / (2 * math.sqrt(2 * rounds * math.log(1 / delta))) * (1 + 1e-12)
    # Advanced composition with the δ that is left.
    slack = delta - rounds * each_delta
    assert min(
        rounds * each, rounds * each**2 / 2 + each * math.sqrt(2 * rounds * math.log(1 / slack))
    ) <= epsilon * (1 + 1e-9)
    # And the worst mechanisms that have this budget, exactly.
    assert optimal_composition(each, each_delta, rounds, epsilon) <= delta * (1 + 1e-9)


def test_the_printed_split_stands_where_it_is_enough():
    for epsilon, delta, rounds in ((1.0, 1e-6, 50), (0.3, 1e-8, 1000), (1.0, 1e-5, 2)):
        each, _ = Promise(epsilon, delta, rounds=rounds).published_round
        assert each == pytest.approx(
            epsilon / (2 * math.sqrt(2 * rounds * math.log(1 / delta))), rel=1e-12
        )
    assert Promise(1.0, 1e-6).published_round == (1.0, 1e-6)


# ---- planning


@pytest.mark.parametrize("calibration", CALIBRATIONS)
@pytest.mark.parametrize(
    ("d", "norm", "epsilon", "delta"), [(10, 1.0, 1.0, 1e-6), (200, 3.0, 4.0, 1e-5)]
)
def test_the_planned_variance_is_the_protocols_limit(calibration, d, norm, epsilon, delta):
    planned = noise_variance(
        dimension=d, max_norm=norm, epsilon=epsilon, delta=delta, calibration=calibration
    )
    found = ShuffleVectorSum(10_000, d, norm, epsilon, delta, calibration).variance
    assert planned * (1 - 1e-9) <= found <= planned * (1 + OVERHEAD)


# ---- refusals

GOOD = {"epsilon": 1.0, "delta": 1e-3, "honest_fraction": 1.0, "calibration": "tight"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epsilon", value) for value in (0.0, -1.0, 300.5, math.nan, math.inf, "1", True)),
        *(("delta", value) for value in (0.0, 0.5, 1.0, math.nan, None)),
        *(("honest_fraction", value) for value in (0.33, 1.01, math.nan, True)),
        *(("calibration", value) for value in ("Tight", None, ["tight"])),
    ],
)
@pytest.mark.parametrize(
    "build",
    [
        lambda **promise: Promise(**promise),
        lambda **promise: ShuffleVectorSum(100, 3, 1.0, **promise, rounds=3),
        lambda **promise: ShuffleScalarSum(100, 1.0, **promise),
    ],
)
def test_bad_privacy_is_refused_with_its_name_and_value(build, name, value):
    with pytest.raises(ValueError, match=name) as raised:
        build(**{**GOOD, name: value})
    assert repr(value) in str(raised.value)


def test_beyond_the_papers_range_of_epsilon_the_tight_calibration_has_less_noise_yet():
    loud, quiet = (ShuffleVectorSum(100, 3, 1.0, epsilon, 1e-3) for epsilon in (100.0, 15.0))
    lower, upper = loud.exact_epsilon()
    assert 15 < lower <= upper <= 100
    assert loud.variance < quiet.variance


def published(users, norm=1.0, epsilon=1.0, fraction=1.0):
    return ShuffleVectorSum(users, 3, norm, epsilon, 1e-6, "published", fraction)


def made_for(users, multiplier):
    return ShuffleVectorSum.with_noise_multiplier(users, 3, 1.0, multiplier, delta=1e-6)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: published(10, epsilon=15.01), "'published' must not exceed 15 .*15.01.*'tight'"),
        (
            lambda: published(10, epsilon=3.0, fraction=0.5),
            r"honest_fraction=0.5.*epsilon=3.0.*tight",
        ),
        (lambda: published(10, epsilon=1e-5), "calibration='published' would send"),
        (lambda: published(10, norm=1e13), "grid would have"),
        (lambda: made_for(4000, 1e8), "bits .* num_users=4000 and a noise multiplier of 1e.08:"),
        (lambda: made_for(4000, 1e9), "bits .* num_users=4000 and a noise multiplier of 1e.09:"),
        (lambda: made_for(2**53, 2.0), f"bits .* num_users={2**53} and a noise multiplier of 2:"),
        (lambda: ShuffleVectorSum(2**53, 3, 1.0, 1.0, 1e-6), r"fewer than 2\*\*50 noise bits"),
    ],
)
def test_what_the_paper_does_not_say_and_nobody_would_send_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()
