"""The one calibrator: it ends within the budget, close to it, or says why it cannot."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.analysis import gaussian


@settings(deadline=None)
@given(st.floats(1e-4, 1e3), st.floats(1e-12, 0.1))
def test_calibration_ends_on_the_safe_side_and_close(target, delta):
    def epsilon(sigma):
        return gaussian.compute_epsilon(mu=1 / sigma, delta=delta)

    sigma = smallest_noise(epsilon, target_epsilon=target)
    assert epsilon(sigma) <= target
    assert sigma == 1e-3 or epsilon(sigma * (1 - 1e-6)) > target


def test_a_budget_that_no_noise_meets_is_refused_with_the_floor():
    with pytest.raises(ValueError, match="stays at"):
        smallest_noise(lambda sigma: 0.5 + 1 / sigma, target_epsilon=0.1)


def test_calibration_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        smallest_noise(lambda sigma: math.nan, target_epsilon=1.0)


@pytest.mark.parametrize("target", [0, -1, math.nan, math.inf])
def test_target_epsilon_must_be_positive(target):
    with pytest.raises(ValueError, match="target_epsilon"):
        smallest_noise(lambda sigma: 1 / sigma, target_epsilon=target)
