"""The Gaussian mechanism's own epsilon, against its formula in many digits."""

from __future__ import annotations

import mpmath
import pytest

from opacus_shuffle.analysis import gaussian


# SG Definition 2, SG Definition 4: (ε, δ) of one Gaussian report.
@pytest.mark.parametrize(
    ("mu", "delta"), [(1e-12, 1e-30), (1e-12, 1e-14), (1e-10, 1e-30), (1e-8, 1e-13), (1e-4, 1e-9)]
)
def test_epsilon_of_a_very_noisy_step_is_no_less_than_the_exact_one(mu, delta):
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def exact(e):
            return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)

        assert exact(e) <= delta
        assert (
            exact(e * (1 - mpmath.mpf("1e-7"))) > delta
        )  # and no more than its stated error above it


@pytest.mark.parametrize("mu", [1e5, 9e6, 1e7, 1e10, 1.18e21, 1e150])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.999])
def test_an_epsilon_too_large_for_the_difference_of_two_tails_is_no_less_than_the_exact_one(
    mu, delta
):
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)
    with mpmath.workdps(400):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        assert mpmath.ncdf(m / 2 - e / m) <= delta * (
            1 + mpmath.mpf("1e-6")
        )  # what is taken off is a share of 40/μ of it
    assert epsilon <= mu**2 / 2 + 40 * mu + 1e-7 * epsilon


def test_an_epsilon_beyond_double_precision_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^mu must be at most 1e\+150, got 1e\+308"):
        gaussian.compute_epsilon(mu=1e308, delta=1e-5)
