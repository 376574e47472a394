"""The one calibrator: it ends within the budget, close to it, or says why it cannot."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle import ShuffleGauss, ShuffleVectorSum, compute_epsilon, compute_noise_multiplier, sco
from opacus_shuffle.accountants import calibrate
from opacus_shuffle.accountants.bounds.registry import Answer, find_bound
from opacus_shuffle.accountants.calibrate import noise_within, smallest_noise
from opacus_shuffle.analysis import advanced_composition, gaussian, gaussian_clones

SHUFFLED = ("shuffle_gauss", "shuffled_checkin", "subsampled_shuffle")


@settings(deadline=None)
@given(st.floats(1e-4, 1e3), st.floats(1e-12, 0.1))
def test_calibration_ends_on_the_safe_side_and_close(target, delta):
    def epsilon(sigma):
        return gaussian.compute_epsilon(mu=1 / sigma, delta=delta)

    sigma = smallest_noise(epsilon, target_epsilon=target)
    assert epsilon(sigma) <= target
    assert sigma == 1e-3 or epsilon(sigma * (1 - 1e-6)) > target


@settings(deadline=None)
@given(st.floats(1e-3, 1e2), st.floats(0.01, 100), st.floats(0.2, 5), st.floats(1e-3, 0.5))
def test_rough_values_however_wrong_change_an_epsilon_by_one_in_ten_thousand(target, factor, power, flat):
    """ε = 3/σ² + flat/σ in place of what a bound would take its time for."""
    entry = find_bound(ShuffleGauss, "certified")

    def answer(rounds, *, delta, adjacency, orders):
        sigma = rounds[0][0].noise_multiplier
        asked.append(sigma)
        return Answer(3 / sigma**2 + flat / sigma)

    def rough(rounds, *, delta, adjacency):
        return factor * rounds[0][0].noise_multiplier ** -(2 * power)

    def noise(entry):
        return noise_within(
            entry, lambda sigma: [(ShuffleGauss(noise_multiplier=sigma, num_users=9), 1)], target_epsilon=target, delta=1e-6
        )

    asked = []
    sought = noise(dataclasses.replace(entry, function=answer, rough=None))
    asked = []
    found = noise(dataclasses.replace(entry, function=answer, rough=rough))
    assert found in asked
    assert target * (1 - 1e-4) <= 3 / found**2 + flat / found <= target
    assert found == pytest.approx(sought, rel=1.1e-4)


@pytest.mark.parametrize(
    ("mechanism", "bound", "target"),
    [
        ("shuffle_gauss", "certified", 0.3),
        ("shuffled_checkin", "pair", 1.0),
        # The rough values are wrong by more than a secant can mend.
        ("shuffled_checkin", "certified", 8.0),
        *(
            pytest.param(mechanism, bound, target, marks=pytest.mark.zoo)
            for mechanism in SHUFFLED
            for bound in ("certified", "pair")
            for target in (0.1, 1.7, 5.0, 30.0)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
def test_the_noise_of_costly_bounds_is_within_the_budget_and_close_to_it(mechanism, bound, target):
    sample = {"sample_rate": 0.1} if mechanism != "shuffle_gauss" else {}
    run = {"num_users": 900, "steps": 20, "bound": bound, **sample}
    sigma = compute_noise_multiplier(mechanism, target_epsilon=target, target_delta=1e-5, **run)
    assert compute_epsilon(mechanism, noise_multiplier=sigma, delta=1e-5, **run) <= target
    # ε is within 1e-4 of the target, or the multiplier within 1e-5 of the smallest one.
    less = compute_epsilon(mechanism, noise_multiplier=sigma * (1 - 2e-4), delta=1e-5, **run)
    assert less > target * (1 - 1e-4)


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


def test_a_target_of_next_to_nothing_is_met():
    """It failed an assertion: logarithms took 1e-300 for zero."""
    sigma = smallest_noise(lambda noise: max(0.0, 1 - noise / 100), target_epsilon=1e-308)
    assert sigma == pytest.approx(100, rel=1e-6)


@pytest.mark.zoo
@pytest.mark.parametrize("mechanism", ["shuffled_checkin", "shuffle_gauss", "subsampled_shuffle"])
def test_a_quadrillion_users_are_answered_for(mechanism):
    """Arrays of the square root of n entries, and more, before."""
    rate = {} if mechanism == "shuffle_gauss" else {"sample_rate": 0.1}
    run = {"noise_multiplier": 5.0, "steps": 10, "delta": 1e-5, **rate}
    assert 0 <= compute_epsilon(mechanism, num_users=10**15, **run) <= compute_epsilon(mechanism, num_users=10**6, **run)


@pytest.mark.parametrize("calibration", ["tight", "published"])
def test_a_protocol_for_next_to_no_epsilon_is_refused_by_name(calibration):
    """It hung, or divided by zero."""
    with pytest.raises(ValueError, match="epsilon must be at least 1e-09"):
        ShuffleVectorSum(100, 10, 1.0, epsilon=1e-308, delta=1e-5, calibration=calibration)


def test_bad_numbers_are_refused_where_nan_came_out():
    for bad in (
        lambda: advanced_composition.subsample(math.nan, sample_rate=0.1),
        lambda: advanced_composition.subsample(1.0, sample_rate=7),
        lambda: advanced_composition.compose([(math.nan, 1)], slack=1e-6),
        lambda: gaussian.log_delta(mu=math.nan, epsilon=1.0),
        lambda: gaussian.log_delta(mu=1.0, epsilon=math.nan),
        lambda: gaussian_clones.clone_probability(math.nan, 4.0),
        lambda: gaussian_clones.clone_probability(1.0, math.nan),
        lambda: sco.Problem(
            sco.logistic_loss,
            (torch.zeros(3, 2), torch.ones(3)),
            constraint=sco.L2Ball(1.0),
            lipschitz=1.0,
            smoothness=1e308,
            dimension=2,
        ),
    ):
        with pytest.raises(ValueError, match="must"):
            bad()


def test_a_target_that_nothing_lies_below_takes_a_noise_too():
    sigma = compute_noise_multiplier("shuffle_gauss", num_users=2, steps=1, target_epsilon=1e-320, target_delta=1e-5)
    assert compute_epsilon("shuffle_gauss", num_users=2, steps=1, noise_multiplier=sigma, delta=1e-5) <= 1e-320


@pytest.mark.parametrize("safe", [100.0, 77.7])
def test_noise_that_was_found_to_be_enough_is_kept_where_epsilon_jumps_beside_it(safe):
    def epsilon(noise):
        assert noise <= safe, "nothing above the noise that is known to be enough need be tried"
        return 0.9 if noise == safe else 2.0

    found = calibrate._smallest(epsilon, 1.0, lowest=1e-3, highest=100.0, tolerance=1e-7, known=(50.0, safe))
    assert found == (safe, 0.9)
