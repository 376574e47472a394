"""The exchange behind truncated clones (Theorems 1.6 and 9.2 of docs/proofs) with one clone.

By quadrature.

Everything is in standard deviations of a report: z ~ N(record/σ, 1), the clone is N(0, 1) where
``side``·z ≥ −t.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr

POINTS, HALF = 450, 9.0
"""Midpoints of cells 0.04 wide, which end where the events below do.

Probabilities of these are exact to 3e-4 of themselves.
"""
Z = (np.arange(POINTS) + 0.5) / POINTS * 2 * HALF - HALF
SIDES = (1, -1)
TAUS = (0.2, 0.9, 1.0, 1.1, 3.0, 10.0)


def slack_of(sigma, t):
    start = max(t, 0.5 / sigma)
    return ndtr(1 / sigma - start) - ndtr(-start), ndtr(-t) - ndtr(-t - 1 / sigma)


def hockey_stick(masses, p, q, tau):
    return float((masses * np.maximum(p - tau * q, 0)).sum())


def two_slots(sigma, t, side, records):
    """The law g of the slots, user 1's densities relative to it after the exchange.

    Beside them stand those of the pair with two users.
    """
    weights = np.exp(-Z * Z / 2)
    weights /= weights.sum()
    inside = side * Z >= -t
    clone = np.where(inside, weights, 0)
    ratios = [np.exp(record * Z / sigma - record**2 / sigma**2 / 2) for record in records]
    after = [(x[:, None] + np.where(inside[:, None], x[None, :], x[:, None])) / 2 for x in ratios]
    alone = [(x[:, None] + x[None, :]) / 2 for x in ratios]
    return np.outer(weights, clone / clone.sum()), after, np.outer(weights, weights), alone


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("records", [(1.0, 0.0), (0.5, 0.0), (1.0, -1.0), (0.5, -1.0)])
@pytest.mark.parametrize(
    ("sigma", "t"), [(0.6, 0.8), (1.0, 1.6), (1.0, 2.4), (3.0, 0.8), (3.0, 2.4)]
)
def test_what_the_exchange_shows_is_the_pair_of_two_users_and_the_slack(sigma, t, records, side):
    g, after, both, alone = two_slots(sigma, t, side, records)
    a, b = slack_of(sigma, t)

    def allowed(first, second, tau):
        if tau < 1:
            return 1 - tau + tau * allowed(second, first, 1 / tau)
        slack = a + tau * b if 0.0 not in records else a if first == 0 else tau * b
        return hockey_stick(both, alone[first], alone[second], tau) / ndtr(t) + slack

    for tau in TAUS:
        for first, second in ((0, 1), (1, 0)):
            assert hockey_stick(g, after[first], after[second], tau) <= allowed(first, second, tau)


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_slack_that_grows_from_one_adds_up_over_rounds_as_in_1_12(share, rounds):
    # Two reports for an answer that is right with probability p; a share of the rounds tells it
    # with certainty or not at all, as often as makes up the same total variation. The hockey stick
    # of a round grows by (τ − 1)·C at most, and by exactly that up to τ = p/(1 − p).
    p = 0.8
    right, told = p, 2 * p - 1
    answer = np.array([right, 1 - right, 0.0, 0.0, 0.0])
    truth = (1 - share) * answer + share * np.array([0.0, 0.0, told, 0.0, 1 - told])
    c = rounds * share * (1 - p)
    pairs = [(x, x[[1, 0, 3, 2, 4]]) for x in (answer, truth)]

    def composed(instead):
        views = np.ones(1), np.ones(1)
        for number in range(rounds):
            views = [
                np.outer(*both).ravel()
                for both in zip(views, pairs[number >= instead], strict=True)
            ]
        return views

    for tau in TAUS[2:]:
        sticks = [hockey_stick(1.0, *composed(instead), tau) for instead in range(rounds + 1)]
        added = sticks[0] - sticks[-1]  # all as they are, over none
        assert added <= c * (tau - 1 + 2 * max(sticks))
        if rounds > 1 and tau == 1:
            assert added > c * (tau - 1)  # over rounds that alone would not do
