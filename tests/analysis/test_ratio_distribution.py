"""The discrete distributions of the mean ratio against closed forms.

Two and three users are integrated in tests/analysis/test_permuted_gaussian.py.
"""

import math

import numpy as np
import pytest
from helpers.hockey_sticks import hockey_stick, reverse_hockey_stick
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis import gaussian, mean_ratio
from opacus_shuffle.analysis.ratio_distribution import mean_distribution

sigmas = st.floats(0.3, 100.0)
rates = st.floats(1e-3, 1.0)


def both_sides(**numbers):
    return mean_distribution(side="lower", **numbers), mean_distribution(side="upper", **numbers)


def epsilons_that_matter(distribution):
    """Where the hockey sticks are neither 0 nor all of it, on both sides of 0."""
    return [k * distribution.scale for k in (0.1, 0.5, 1, 2, 3, 4)]


@pytest.mark.parametrize("sigma", [0.1, 0.5, 0.99, 1.01, 3.0, 30.0, 1e6])
def test_one_user_is_the_exact_gaussian(sigma):
    lower, upper = both_sides(noise_multiplier=sigma, num_users=1)
    for epsilon in epsilons_that_matter(upper):
        exact = math.exp(gaussian.log_delta(mu=1 / sigma, epsilon=epsilon))
        for stick in (hockey_stick, reverse_hockey_stick):
            low, high = stick(lower, epsilon), stick(upper, epsilon)
            assert low <= exact * (1 + 1e-9)
            assert exact <= high * (1 + 1e-9)
            # A cell of width w standard deviations moves δ by w²/8·φ at most, and δ ≥ φ/(1 + x)² ·
            # σ-units up to x = 4.
            assert high - low <= 0.03 * exact


@pytest.mark.parametrize(
    ("users", "rate", "sampling"),
    [
        (2, 1.0, None),
        (37, 1.0, None),
        (60_000, 1.0, None),
        (500, 0.1, "poisson"),
        (500, 0.1, "fixed_size"),
    ],
)
@pytest.mark.parametrize(
    "sigma", [0.86, *(pytest.param(s, marks=pytest.mark.zoo) for s in (2.0, 9.48))]
)
def test_exact_moments_lie_between(sigma, users, rate, sampling):
    orders = np.array([2.0, 3.0, 5.0])
    exact = mean_ratio.compute_rdp(
        noise_multiplier=sigma, num_users=users, orders=orders, sample_rate=rate, sampling=sampling
    ) * (orders - 1)
    lower, upper = both_sides(
        noise_multiplier=sigma, num_users=users, sample_rate=rate, sampling=sampling
    )

    def log_moments(distribution):  # Σ q (r^λ − 1) without cancellation
        return [
            math.log1p(float(distribution.masses @ np.expm1(order * distribution.log_ratios)))
            for order in orders
        ]

    slack = 1e-9 * exact + 1e-13
    assert np.all(log_moments(lower) <= exact + slack)
    assert np.all(exact <= log_moments(upper) + slack)


@settings(max_examples=8)
@given(sigma=st.floats(0.5, 10), users=st.integers(1, 2000), epsilon=st.floats(0.01, 3))
def test_more_users_never_cost_more(sigma, users, epsilon):
    # SG's Conjecture 1, a theorem; an upper distribution of more users lies below one of fewer, but
    # for the grids.
    fewer = mean_distribution(noise_multiplier=sigma, num_users=users)
    more = mean_distribution(noise_multiplier=sigma, num_users=2 * users, side="lower")
    assert hockey_stick(more, epsilon) <= hockey_stick(fewer, epsilon) * (1 + 1e-11)
    assert reverse_hockey_stick(more, epsilon) <= reverse_hockey_stick(fewer, epsilon) * (1 + 1e-11)
