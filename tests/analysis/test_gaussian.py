"""The Gaussian mechanism's own epsilon, against its formula in many digits."""

from __future__ import annotations

import mpmath
import pytest

from opacus_shuffle.analysis import gaussian


@pytest.mark.parametrize(("mu", "delta"), [(1e-12, 1e-30), (1e-12, 1e-14), (1e-10, 1e-30), (1e-8, 1e-13), (1e-4, 1e-9)])
def test_epsilon_of_a_very_noisy_step_is_no_less_than_the_exact_one(mu, delta):
    epsilon = gaussian.compute_epsilon(mu=mu, delta=delta)
    with mpmath.workdps(80):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def exact(e):
            return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)

        assert exact(e) <= delta
        assert exact(e * (1 - mpmath.mpf("1e-7"))) > delta  # and no more than its stated error above it
