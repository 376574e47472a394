"""Exact moments against independent slow references.

They are held to closed forms, too, and the properties that they must have.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.stats import norm

from opacus_shuffle.analysis.mean_ratio import compute_rdp

# The documented relative error of compute_rdp; every comparison with an exact value uses it.
RELATIVE_ERROR = 1e-10

sigmas = st.floats(0.3, 100.0)
populations = st.integers(1, 10**9)
rates = st.floats(1e-3, 1.0)


def mp_rdp(*, noise_multiplier, num_users, order, rate=1.0, sampling=None):
    """λ!/n^λ·[x^λ] A(x)^n by binary powering with 80 digits."""
    with mpmath.workdps(80):
        u = 1 / mpmath.mpf(noise_multiplier) ** 2
        gamma = mpmath.mpf(rate)
        moments = [mpmath.exp(u * k * (k - 1) / 2) for k in range(order + 1)]
        users = num_users
        if sampling == "poisson":
            moments = [1 if k == 0 else 1 - gamma + gamma * a for k, a in enumerate(moments)]
        if sampling == "fixed_size":
            users = round(rate * num_users)
            gamma = mpmath.mpf(users) / num_users

        def product(a, b):
            return [mpmath.fsum(a[i] * b[m - i] for i in range(m + 1)) for m in range(order + 1)]

        base = [a / mpmath.factorial(k) for k, a in enumerate(moments)]
        power = [mpmath.mpf(1)] + [mpmath.mpf(0)] * order
        exponent = users
        while exponent:
            if exponent % 2:
                power = product(power, base)
            exponent //= 2
            base = product(base, base) if exponent else base
        means = [power[k] * mpmath.factorial(k) / mpmath.mpf(users) ** k for k in range(order + 1)]
        if sampling == "fixed_size":
            total = mpmath.fsum(
                mpmath.binomial(order, j) * (1 - gamma) ** (order - j) * gamma**j * means[j]
                for j in range(order + 1)
            )
        else:
            total = means[order]
        return mpmath.log(total) / (order - 1)


# SG Theorem 1, whose sum is the coefficient of a power of a series (SG Algorithm 1).
# Fewer users than orders; check-in: 2n + 2 on either side of the order exercises both ways to
# raise a series to a power.
@settings(max_examples=40)
@example(0.5, 1, 60, 1.0, None)
@example(30.0, 17, 60, 1.0, None)
@example(3.0, 29, 60, 0.3, "poisson")
@example(0.5, 30, 61, 0.3, "poisson")
@given(
    sigmas, populations, st.integers(2, 24), rates, st.sampled_from([None, "poisson", "fixed_size"])
)
def test_rdp_matches_eighty_digit_series_powers(sigma, users, order, rate, sampling):
    rate = 1.0 if sampling is None else rate
    if sampling == "fixed_size" and round(rate * users) < 1:
        return
    exact = mp_rdp(
        noise_multiplier=sigma, num_users=users, order=order, rate=rate, sampling=sampling
    )
    rdp = compute_rdp(
        noise_multiplier=sigma, num_users=users, orders=order, sample_rate=rate, sampling=sampling
    )
    assert rdp == pytest.approx(float(exact), rel=RELATIVE_ERROR)


# SG Corollary 1.
@given(sigmas, populations, rates, st.sampled_from([None, "poisson"]))
def test_rdp_never_exceeds_unshuffled(sigma, users, rate, sampling):
    orders = np.array([1.01, 1.5, 2, 2.5, 3, 7.3, 20, 40])
    rdp = compute_rdp(
        noise_multiplier=sigma,
        num_users=users,
        orders=orders,
        sample_rate=1.0 if sampling is None else rate,
        sampling=sampling,
    )
    assert np.all(rdp > 0)
    assert np.all(rdp <= orders / (2 * sigma**2))


# SG Definition 3: the divergence as an integral.
@pytest.mark.zoo
def test_fractional_orders_lie_above_the_truth():
    sigma = 1.0
    for order in (1.5, 2.5, 3.3):

        def moment(y, x, order=order):
            ratio = (
                math.exp((2 * x - 1) / (2 * sigma**2)) + math.exp((2 * y - 1) / (2 * sigma**2))
            ) / 2
            return ratio**order * norm.pdf(x, scale=sigma) * norm.pdf(y, scale=sigma)

        truth, error = integrate.dblquad(moment, -8, 12, -8, 12, epsabs=1e-7)
        rdp = compute_rdp(noise_multiplier=sigma, num_users=2, orders=order)
        assert rdp >= math.log(truth - error) / (order - 1)
