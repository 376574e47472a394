"""The one calibrator: it ends within the budget, close to it, or says why it cannot."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle import ShuffleGauss, compute_epsilon, compute_noise_multiplier
from opacus_shuffle.accountants.bounds.registry import Answer, find_bound
from opacus_shuffle.accountants.calibrate import noise_within, smallest_noise
from opacus_shuffle.analysis import gaussian

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
def test_rough_values_however_wrong_change_an_epsilon_by_one_in_ten_thousand(
    target, factor, power, flat
):
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
            entry,
            lambda sigma: [(ShuffleGauss(noise_multiplier=sigma, num_users=9), 1)],
            target_epsilon=target,
            delta=1e-6,
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


@pytest.mark.parametrize(
    ("epsilon", "target", "named"),
    [
        (lambda sigma: 0.5 + 1 / sigma, 0.1, "stays at"),
        (lambda sigma: math.nan, 1.0, "NaN"),
        *(
            (lambda sigma: 1 / sigma, target, "target_epsilon")
            for target in (0, -1, math.nan, math.inf)
        ),
    ],
)
def test_what_cannot_be_met_is_refused_by_name(epsilon, target, named):
    with pytest.raises(ValueError, match=named):
        smallest_noise(epsilon, target_epsilon=target)


def test_a_target_of_next_to_nothing_is_met():
    """It failed an assertion: logarithms took 1e-300 for zero."""
    sigma = smallest_noise(lambda noise: max(0.0, 1 - noise / 100), target_epsilon=1e-308)
    assert sigma == pytest.approx(100, rel=1e-6)


def test_a_target_that_nothing_lies_below_takes_a_noise_too():
    sigma = compute_noise_multiplier(
        "shuffle_gauss", num_users=2, steps=1, target_epsilon=1e-320, target_delta=1e-5
    )
    assert (
        compute_epsilon("shuffle_gauss", num_users=2, steps=1, noise_multiplier=sigma, delta=1e-5)
        <= 1e-320
    )
