"""The one calibrator: it ends within the budget, close to it, or says why it cannot."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opacus_shuffle import compute_epsilon, compute_noise_multiplier
from opacus_shuffle.accountants.bounds.registry import find_bound
from opacus_shuffle.accountants.calibrate import noise_within, smallest_noise
from opacus_shuffle.accountants.mechanism import MECHANISMS
from opacus_shuffle.analysis import gaussian

SHUFFLED = ("shuffle_gauss", "shuffled_checkin", "subsampled_shuffle")


@given(st.floats(1e-4, 1e3), st.floats(1e-12, 0.1))
def test_calibration_ends_on_the_safe_side_and_close(target, delta):
    def epsilon(sigma):
        return gaussian.compute_epsilon(mu=1 / sigma, delta=delta)

    sigma = smallest_noise(epsilon, target_epsilon=target)
    assert epsilon(sigma) <= target
    assert sigma == 1e-3 or epsilon(sigma * (1 - 1e-6)) > target


@pytest.mark.parametrize(
    ("mechanism", "bound", "target"),
    [
        ("shuffle_gauss", "certified", 0.3),
        # The estimates are far from the answer.
        pytest.param("shuffled_checkin", "certified", 8.0, marks=pytest.mark.zoo),
        *(
            pytest.param(mechanism, bound, target, marks=pytest.mark.zoo)
            for mechanism in SHUFFLED
            for bound, target in (("certified", 0.1), ("pair", 30.0))
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
def test_the_noise_of_costly_bounds_is_within_the_budget_and_close_to_it(mechanism, bound, target):
    sample = {"sample_rate": 0.1} if mechanism != "shuffle_gauss" else {}
    run = {"num_users": 900, "steps": 20, "bound": bound, **sample}
    sigma = compute_noise_multiplier(mechanism, target_epsilon=target, target_delta=1e-5, **run)
    # ε is within 1e-4 of the target, or the multiplier within 1e-4 of the smallest one.
    enough, less = (
        compute_epsilon(mechanism, noise_multiplier=sigma * share, delta=1e-5, **run)
        for share in (1, 1 - 2e-4)
    )
    assert enough <= target
    assert less > target * (1 - 1e-4)


@pytest.mark.parametrize(
    ("epsilon", "target", "named"),
    [
        (lambda sigma: 0.5 + 1 / sigma, 0.1, "stays at"),
        (lambda sigma: 1.0001 + 1e-9 / sigma, 1.0, "stays at"),  # next to the target, and flat
        (lambda sigma: math.nan, 1.0, "NaN"),
        *((lambda sigma: 1 / sigma, bad, "target_epsilon") for bad in (0, -1, math.nan, math.inf)),
    ],
)
def test_what_cannot_be_met_is_refused_by_name(epsilon, target, named):
    with pytest.raises(ValueError, match=named):
        smallest_noise(epsilon, target_epsilon=target)


def test_a_target_of_next_to_nothing_is_met():
    """Estimates have no value below 1e-320."""
    run = {"num_users": 2, "steps": 1}
    sigma = compute_noise_multiplier(
        "shuffle_gauss", target_epsilon=1e-320, target_delta=1e-5, **run
    )
    spent = compute_epsilon("shuffle_gauss", noise_multiplier=sigma, delta=1e-5, **run)
    assert spent <= 1e-320


@pytest.mark.parametrize(
    ("epsilon", "least"),
    [
        (lambda sigma: 2.0 if sigma < 5 else 0.5, 5.0),  # a jump
        (lambda sigma: math.inf if sigma < 70 else 70 / sigma, 70.0),
        (lambda sigma: 0.0, 1e-3),
    ],
)
def test_calibration_finds_the_least_noise_where_epsilon_jumps(epsilon, least):
    sigma = smallest_noise(epsilon, target_epsilon=1.0)
    assert least <= sigma <= least * (1 + 1e-6)
    assert epsilon(sigma) <= 1.0


@pytest.mark.parametrize(
    "mechanism",
    ["shuffled_checkin", *(pytest.param(m, marks=pytest.mark.zoo) for m in SHUFFLED[::2])],
)
def test_a_slow_bound_is_evaluated_a_few_times_only(mechanism):
    """Its estimates, wrong by a factor of 2 at most here, say where to begin."""
    kind = MECHANISMS[mechanism]
    sample = {"sample_rate": 0.1} if mechanism != "shuffle_gauss" else {}
    certified, asked = find_bound(kind, "certified"), []

    def counted(rounds, **question):
        asked.append(rounds)
        return certified.function(rounds, **question)

    noise_within(
        dataclasses.replace(certified, function=counted),
        lambda sigma: [(kind.build(noise_multiplier=sigma, num_users=900, **sample), 20)],
        target_epsilon=1.0,
        delta=1e-5,
    )
    assert len(asked) <= 5


@pytest.mark.parametrize(
    ("mechanism", "least"), [("shuffled_checkin", 1e-3), ("secret_checkin", 0.2)]
)
def test_where_epsilon_is_zero_whatever_the_noise_the_least_noise_is_enough(mechanism, least):
    """The record takes part with a probability below δ."""
    run = {"num_users": 1000, "sample_rate": 1e-6, "steps": 1}
    budget = {"target_epsilon": 1.0, "target_delta": 1e-3}
    assert compute_noise_multiplier(mechanism, **run, **budget) == least
