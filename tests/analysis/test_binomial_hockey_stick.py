"""One coordinate under binomial noise (docs/proofs/02_sums_with_binomial_noise.md).

Its hockey stick, by sums over outcomes.
"""

from __future__ import annotations

import math

import mpmath
import pytest
from helpers.binomial_enumeration import (
    ROUNDING,
    binomial_distribution,
    both_ways,
    moved_pair,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus_shuffle.analysis.binomial_sums import BinomialNoise, hockey_stick


@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.2, 1.0, 5.0, 15.0, 800.0])
@pytest.mark.parametrize(
    ("trials", "probability", "shift"),
    [
        (60, 0.5, 1),
        (60, 0.5, 7),
        (60, 0.3, 5),
        (200, 0.02, 3),
        (200, 0.97, 12),
        (40, 0.11, 40),
        (40, 0.5, 41),
        (1, 0.5, 1),
        (3, 1e-6, 2),
        (300, 0.5, 250),
    ],
)
def test_the_hockey_stick_is_the_sum_over_all_outcomes_rounded_up(
    trials, probability, shift, epsilon
):
    with mpmath.workdps(50):
        p = mpmath.mpf(probability)
        masses = [
            mpmath.binomial(trials, y) * p**y * (1 - p) ** (trials - y) for y in range(trials + 1)
        ]
        factor, pad = mpmath.exp(epsilon), mpmath.mpf("1.01e-9")
        padded = masses + [mpmath.mpf(0)] * shift
        moved = [mpmath.mpf(0)] * shift + masses
        truth = max(
            sum(max(a - factor * b, 0) for a, b in zip(moved, padded, strict=True)),
            sum(max(b - factor * a, 0) for a, b in zip(moved, padded, strict=True)),
        )
        # Each tail may be enlarged or reduced by 1e-9 of itself, at whichever threshold.
        limit = mpmath.mpf(0)
        for one, other in ((moved, padded), (padded[::-1], moved[::-1])):
            tail_one = tail_other = mpmath.mpf(0)
            for a, b in zip(reversed(one), reversed(other), strict=True):
                tail_one, tail_other = tail_one + a, tail_other + b
                limit = max(limit, tail_one * (1 + pad) - factor * tail_other * (1 - pad))
        delta = hockey_stick(
            BinomialNoise(trials=trials, probability=probability), shift=shift, epsilon=epsilon
        )
        assert (
            truth * (1 - mpmath.mpf(2) ** -52)
            <= delta
            <= min(limit * (1 + mpmath.mpf(2) ** -50), 1)
        )


def precise_tail_at_huge_trials(trials, probability, y):
    """P(B > y), by the midpoint rule's Euler–Maclaurin series for the sum.

    The next term is below 1e-20 of it.
    """
    m, p, end = mpmath.mpf(trials), mpmath.mpf(probability), mpmath.mpf(y) + mpmath.mpf(1) / 2

    def mass(x):
        logs = mpmath.loggamma(m + 1) - mpmath.loggamma(x + 1) - mpmath.loggamma(m - x + 1)
        return mpmath.exp(logs + x * mpmath.log(p) + (m - x) * mpmath.log(1 - p))

    deviation = mpmath.sqrt(m * p * (1 - p))
    start = max(end, m * p + 14 * deviation) + 2 * deviation
    cuts = [end + (start - end) * k / 24 for k in range(25)]
    return mpmath.quad(mass, cuts) + mpmath.diff(mass, end) / 24


@pytest.mark.parametrize(
    ("trials", "shift", "epsilon"),
    [
        (10**10, 50_000, 1.0),
        pytest.param(10**12, 500_000, 1.0, marks=pytest.mark.zoo),
        (10**12, 500_000, 7.5),
        (10**14, 6_310_250, 6.065719541085232),
        pytest.param(2**50, 16_777_216, 1.0, marks=pytest.mark.zoo),
        (2**50, 22_492_398, 6.690480365315447),
    ],
)
def test_the_hockey_stick_is_rounded_up_at_huge_trials(trials, shift, epsilon):
    noise = BinomialNoise(trials=trials, probability=0.5)
    delta = hockey_stick(noise, shift=shift, epsilon=epsilon)
    with mpmath.workdps(40):
        # Any threshold gives a value that the supremum is not below; near the best one they agree
        # to second order.
        y = round(trials / 2 + shift / 2 + epsilon / shift * noise.variance)
        truth = precise_tail_at_huge_trials(trials, 0.5, y - shift)
        truth -= mpmath.exp(epsilon) * precise_tail_at_huge_trials(trials, 0.5, y)
        assert delta >= truth, f"below by {float(1 - delta / truth):.2g} of it"


@given(
    trials=st.integers(1, 300),
    probability=st.floats(0.01, 0.99),
    shift=st.integers(0, 60),
    one=st.floats(0, 1),
    other=st.floats(0, 1),
    epsilon=st.floats(0, 6),
)
@settings(max_examples=150)
def test_no_two_values_within_the_shift_are_told_apart_better_than_its_ends(
    trials, probability, shift, one, other, epsilon
):
    distribution = binomial_distribution(trials, probability)
    _, p, q = moved_pair(distribution, one * shift, other * shift)
    assert both_ways([(p, q)], epsilon) <= hockey_stick(
        BinomialNoise(trials=trials, probability=probability), shift=shift, epsilon=epsilon
    ) + ROUNDING * (1 + math.exp(epsilon))
