"""What a calibration promises, against all outcomes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.protocols import calibration
from opacus_shuffle.protocols.calibration import (
    OVERHEAD,
    SumBudget,
    honest_users,
    noise_variance,
    tight_scalar_plan,
    tight_vector_plan,
)
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


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


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (30, 3), (10_000, 500)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-2), (1.0, 1e-6), (8.0, 1e-9)])
def test_the_tight_vector_plan_is_within_its_overhead_and_its_mu(n, d, epsilon, delta, fraction):
    mu, lost = SumBudget(epsilon, delta).round_mu, 1e-6 * delta
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
    mu = SumBudget(1.0, 1e-5, rounds=rounds).round_mu
    assert gaussian.log_delta(mu=mu * math.sqrt(rounds), epsilon=1.0) <= math.log(1e-5)


@given(st.floats(0.1, 1000.0))
def test_the_mu_of_a_noise_multiplier_is_rounded_so_that_its_own_multiplier_is_no_smaller(asked):
    """A protocol reports 2/μ rounded down. That must not fall below the multiplier asked for."""
    options = {"zero_on_grid": False, "rate": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "fewest_bits_plan", lambda **plan: plan["mu"])
        mu = calibration.plan_with_noise_multiplier(9, 3, asked, SumBudget(1.0, 1e-6), **options)
    assert math.nextafter(2 / mu, 0.0) >= asked


# ---- planning


@pytest.mark.parametrize(
    ("d", "norm", "epsilon", "delta"), [(10, 1.0, 1.0, 1e-6), (200, 3.0, 4.0, 1e-5)]
)
def test_the_planned_variance_is_the_protocols_limit(d, norm, epsilon, delta):
    planned = noise_variance(max_norm=norm, epsilon=epsilon, delta=delta)
    found = ShuffleVectorSum(10_000, d, norm, epsilon, delta).variance
    assert planned * (1 - 1e-9) <= found <= planned * (1 + OVERHEAD)


# ---- refusals

GOOD = {"epsilon": 1.0, "delta": 1e-3, "honest_fraction": 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epsilon", value) for value in (0.0, -1.0, 300.5, math.nan, math.inf, "1", True)),
        *(("delta", value) for value in (0.0, 0.5, 1.0, math.nan, None)),
        *(("honest_fraction", value) for value in (0.33, 1.01, math.nan, True)),
    ],
)
@pytest.mark.parametrize(
    "build",
    [
        SumBudget,
        lambda **budget: ShuffleVectorSum(100, 3, 1.0, **budget, rounds=3),
        lambda **budget: ShuffleScalarSum(100, 1.0, **budget),
    ],
)
def test_bad_privacy_is_refused_with_its_name_and_value(build, name, value):
    with pytest.raises(ValueError, match=name) as raised:
        build(**{**GOOD, name: value})
    assert repr(value) in str(raised.value)


def made_for(users, multiplier):
    return ShuffleVectorSum.with_noise_multiplier(users, 3, 1.0, multiplier, delta=1e-6)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: made_for(4000, 1e8), "bits .* num_users=4000 and a noise multiplier of 1e.08:"),
        (lambda: made_for(4000, 1e9), "bits .* num_users=4000 and a noise multiplier of 1e.09:"),
        (lambda: made_for(2**53, 2.0), f"bits .* num_users={2**53} and a noise multiplier of 2:"),
        (lambda: ShuffleVectorSum(2**53, 3, 1.0, 1.0, 1e-6), r"fewer than 2\*\*50 noise bits"),
    ],
)
def test_more_bits_than_anyone_would_send_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()
