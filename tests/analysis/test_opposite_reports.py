"""The curve of a record that becomes its opposite.

Above the truth, hardly, and above every other replacement.

True values: closed forms for one report, quadrature for two, an adversary's sum of scores for many.
What is tested is proved in docs/proofs/09_replacement.md.
"""

import math

import numpy as np
import pytest
from helpers.hockey_sticks import hockey_stick, reverse_hockey_stick
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from opacus_shuffle.analysis.opposite_reports import opposite_reports

# A midpoint rule with steps of h standard deviations on a Gaussian integrand with one kink errs by
# h²/12 of it or so.
Z, STEP = np.linspace(-9, 9, 1801, retstep=True)
WEIGHTS = np.exp(-(Z**2) / 2) * STEP / math.sqrt(2 * math.pi)


def ratio(x: float, sigma: float, z: np.ndarray = Z) -> np.ndarray:
    """The likelihood ratio of reports at x and at zero."""
    return np.exp(x * z / sigma - x**2 / (2 * sigma**2))


def two_reports(tau: float, sigma: float, x: float, other: float, rate: float = 1.0) -> float:
    """E(1 − π + πX̄ − τ(1 − π + πX̄′))₊ for two reports, by quadrature."""
    gain = 1 - tau + rate * (ratio(x, sigma) - 1 - tau * (ratio(other, sigma) - 1))
    return float(WEIGHTS @ np.maximum(gain[:, None] / 2 + gain[None, :] / 2, 0) @ WEIGHTS)


sigmas = st.floats(0.4, 30.0)
epsilons = st.floats(0.0, 4.0)


@given(sigma=sigmas, epsilon=epsilons)
def test_one_report_is_the_gaussian_mechanism_at_distance_two(sigma, epsilon):
    replaced = opposite_reports(noise_multiplier=sigma, num_users=1)
    mu = 2 / sigma
    exact = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
    assert exact - 1e-13 <= hockey_stick(replaced, epsilon)
    if (
        exact > 1e-6
        # Steps of 0.06 and chords in θ and in τ cost up to 0.06²/2 of the variance each, of δ as
        # much.
        # as 10 times that
    ):
        assert hockey_stick(replaced, epsilon) <= 1.03 * exact


@given(sigma=sigmas, epsilon=epsilons, rate=st.floats(0.01, 1.0))
@settings(max_examples=8)
def test_two_reports_tell_at_most_what_is_computed(sigma, epsilon, rate):
    replaced = opposite_reports(noise_multiplier=sigma, num_users=2, sample_rate=rate)
    stick = hockey_stick(replaced, epsilon)
    assert two_reports(math.exp(epsilon), sigma, 1.0, -1.0, rate) * (1 - STEP) - 1e-12 <= stick


@pytest.mark.parametrize("sigma", [2.0, 10.0])
def test_what_is_computed_for_two_reports_is_close_to_what_they_tell(sigma):
    replaced = opposite_reports(noise_multiplier=sigma, num_users=2)
    unit = 2 ** math.floor(math.log2(replaced.scale))
    for epsilon in (0.0, unit, 2 * unit, 3 * unit):  # where there are slopes
        exact = two_reports(math.exp(epsilon), sigma, 1.0, -1.0)
        assert hockey_stick(replaced, epsilon) == pytest.approx(exact, rel=0.02)


@given(
    sigma=st.floats(0.3, 1000.0),
    users=st.integers(1, 300),
    rate=st.floats(1e-3, 1.0),
    factor=st.floats(1.0, 1.5),
)
@settings(max_examples=3)
def test_both_directions_are_equal(sigma, users, rate, factor):
    stick = opposite_reports(
        noise_multiplier=sigma, num_users=users, sample_rate=rate, factor=factor
    )
    for epsilon in (0.0, stick.scale, 4 * stick.scale):
        forward, reverse = hockey_stick(stick, epsilon), reverse_hockey_stick(stick, epsilon)
        assert forward == pytest.approx(reverse, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("users", [1, pytest.param(10, marks=pytest.mark.zoo), 1000])
@pytest.mark.parametrize("epsilon", [pytest.param(25.0, marks=pytest.mark.zoo), 15.0, 45.0])
@pytest.mark.parametrize("sigma", [0.1, 0.0465, 0.04])
def test_where_noise_is_little_an_attack_stays_below_at_every_epsilon(sigma, users, epsilon):
    """The attack asks whether some report is beyond a threshold, in standard deviations."""
    threshold = np.linspace(0, 1.6 / sigma, 1601)
    caught, by_chance = ndtr(1 / sigma - threshold), users * ndtr(-threshold)
    told = float(np.max(caught - math.exp(epsilon) * by_chance))
    replaced = opposite_reports(noise_multiplier=sigma, num_users=users)
    assert 0.3 < told <= hockey_stick(replaced, epsilon)


@given(sigma=st.floats(0.5, 20.0), users=st.integers(2, 100), rate=st.floats(0.05, 1.0))
@settings(max_examples=2)
def test_a_factor_multiplies_hockey_sticks_and_more_users_hide_better(sigma, users, rate):
    one, three, fewer = (
        opposite_reports(noise_multiplier=sigma, num_users=n, sample_rate=rate, factor=factor)
        for n, factor in ((users, 1.0), (users, 3.0), (max(1, users // 3), 1.0))
    )
    for epsilon in (one.scale, 3 * one.scale):
        assert hockey_stick(three, epsilon) == pytest.approx(
            min(3 * hockey_stick(one, epsilon), 1), rel=0.02
        )
        assert hockey_stick(fewer, epsilon) >= hockey_stick(one, epsilon)
