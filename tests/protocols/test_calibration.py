"""The printed constants as printed, and what the tight calibration promises, against sums over all outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.binomial_sums import gaussian_bound, hockey_stick
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
# ---------------------------------------------------------------------------------------------

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


@given(given_numbers=vectors)
@settings(max_examples=200, deadline=None)
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


@given(given_numbers=vectors)
@settings(max_examples=200, deadline=None)
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


@given(given_numbers=vectors, fraction=st.floats(1 / 3, 1.0))
@settings(max_examples=200, deadline=None)
def test_every_step_of_the_papers_proof_holds_for_the_plans(given_numbers, fraction):
    n, d, norm = (given_numbers[name] for name in ("num_users", "dimension", "max_norm"))
    delta, epsilon = given_numbers["delta"], given_numbers["epsilon"]
    if fraction < 1:
        epsilon = min(epsilon, 1 / fraction)
    share = delta / (d + 1)
    common = {"num_users": n, "epsilon": epsilon, "honest_fraction": fraction}
    vector = published_vector_plan(dimension=d, max_norm=norm, delta=delta, **common)
    scalar = published_scalar_plan(max_value=norm, delta=delta, **common)
    # What each coordinate must have when a share of the users is honest, and what all of them add
    # up to.
    small = epsilon / (18 * math.sqrt(-math.log(share)))
    for plan, each_epsilon, each_delta in ((vector, small, share), (scalar, epsilon, delta)):
        g, m, p = plan.granularity, plan.noise.trials, plan.bit_probability
        alpha = each_epsilon / (3 * g)
        assert 0 < alpha < 1
        assert alpha * m * p >= 2 * g * (1 - 1e-9)  # Lemma A.1's condition, t = g
        assert 2 * math.exp(-(alpha**2) * m * p / 10) <= each_delta * (1 + 1e-6)
        assert math.log((1 + alpha) / (1 - alpha)) <= 3 * alpha
        assert p <= 0.5
    rng = np.random.default_rng(n + d)
    for move in (np.eye(min(d, 50))[0], np.ones(min(d, 50)), rng.standard_normal(min(d, 50))):
        shares = np.zeros(d)
        shares[: len(move)] = np.abs(move) / np.linalg.norm(move)  # a_j/2Δ₂
        # Lemma 3.1's loss of each coordinate; a coordinate at rest adds its 2/g as the paper counts
        # it.
        losses = small * (2 / vector.granularity + shares)
        total = float(losses @ np.expm1(losses)) + 2 * math.sqrt(
            -math.log(share) * float(losses @ losses)
        )
        assert total <= epsilon


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


@given(num_users=st.integers(1, 10**7), fraction=st.floats(1 / 3, 1.0))
@settings(max_examples=300, deadline=None)
def test_honest_users_are_the_fewest_that_the_fraction_allows(num_users, fraction):
    count = honest_users(num_users, fraction)
    assert 1 <= count <= num_users
    assert count >= fraction * num_users - 1e-6
    assert count - 1 < fraction * num_users


def test_a_third_of_three_million_users_is_a_million():
    assert honest_users(3_000_000, 1 / 3) == 1_000_000
    assert honest_users(3_000_001, 1 / 3) == 1_000_001
    assert honest_users(10, 0.7) == 7
    assert honest_users(1, 1 / 3) == 1


# ---- tight
# ------------------------------------------------------------------------------------------------------------------


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


def test_a_plan_for_a_tiny_mu_asks_for_few_bounds():
    """Each takes a second where noise is large; those of grids that are too coarse anyhow made 13 of them."""
    tight_vector_plan.cache_clear()
    before = gaussian_bound.cache_info().misses
    plan = tight_vector_plan(num_users=1000, dimension=3, mu=0.01, lost=1e-12, honest_fraction=1.0)
    assert (plan.granularity, plan.noise_bits) == (14, 8000)
    assert gaussian_bound.cache_info().misses - before <= 7


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
# ------------------------------------------------------------------------------------------------


def optimal_composition(epsilon_each, delta_each, rounds, epsilon):
    """The exact δ(ε) of the worst T (ε_r, δ_r)-DP rounds: each a randomised response that fails with probability δ_r."""
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
# ---------------------------------------------------------------------------------------------------------------


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
# ---------------------------------------------------------------------------------------------------------------

GOOD = {"epsilon": 1.0, "delta": 1e-3, "honest_fraction": 1.0, "calibration": "tight"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", 300.5),
        ("epsilon", math.nan),
        ("epsilon", math.inf),
        ("epsilon", "1"),
        ("epsilon", True),
        ("delta", 0.0),
        ("delta", 0.5),
        ("delta", 1.0),
        ("delta", math.nan),
        ("delta", None),
        ("honest_fraction", 0.33),
        ("honest_fraction", 1.01),
        ("honest_fraction", math.nan),
        ("honest_fraction", True),
        ("calibration", "Tight"),
        ("calibration", None),
        ("calibration", ["tight"]),
    ],
)
def test_bad_privacy_is_refused_with_its_name_and_value(name, value):
    for build in (
        lambda: Promise(**{**GOOD, name: value}),
        lambda: ShuffleVectorSum(100, 3, 1.0, **{**GOOD, name: value}),
        lambda: ShuffleScalarSum(100, 1.0, **{**GOOD, name: value}),
        lambda: ShuffleVectorSum(100, 3, 1.0, **{**GOOD, name: value}, rounds=3),
    ):
        with pytest.raises(ValueError, match=name) as raised:
            build()
        assert repr(value) in str(raised.value)


def test_the_paper_s_range_of_epsilon_binds_its_own_constants_only():
    with pytest.raises(
        ValueError,
        match=r"epsilon with calibration='published' must not exceed 15 .*got 15.01.*'tight'",
    ):
        ShuffleVectorSum(100, 3, 1.0, 15.01, 1e-3, "published")
    loud, quiet = (ShuffleVectorSum(100, 3, 1.0, epsilon, 1e-3) for epsilon in (100.0, 15.0))
    lower, upper = loud.exact_epsilon()
    assert 15 < lower <= upper <= 100
    assert loud.variance < quiet.variance


def test_the_paper_says_nothing_about_drop_outs_at_a_large_epsilon():
    with pytest.raises(ValueError, match=r"honest_fraction=0.5.*epsilon=3.0.*tight"):
        ShuffleVectorSum(10, 2, 1.0, 3.0, 1e-3, "published", 0.5)
    assert Promise(3.0, 1e-3, "published").epsilon == 3.0
    assert Promise(3.0, 1e-3, "published", 1 / 3).honest_fraction == 1 / 3


def test_plans_beyond_2_to_the_50_bits_are_refused():
    with pytest.raises(ValueError, match="calibration='published' would send"):
        ShuffleVectorSum(10, 3, 1.0, 1e-5, 1e-6, "published")
    with pytest.raises(ValueError, match="grid would have"):
        ShuffleVectorSum(10, 3, 1e13, 1.0, 1e-6, "published")
    for users, multiplier, told in ((4000, 1e8, "1e.08"), (4000, 1e9, "1e.09"), (2**53, 2.0, "2")):
        with pytest.raises(
            ValueError, match=f"bits .* num_users={users} and a noise multiplier of {told}:"
        ):
            ShuffleVectorSum.with_noise_multiplier(users, 3, 1.0, multiplier, delta=1e-6)
