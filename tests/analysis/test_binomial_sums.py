"""Rounds of sums under binomial noise (docs/proofs/02_sums_with_binomial_noise.md).

By sums over outcomes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.binomial_enumeration import (
    binomial_distribution,
    both_ways,
    delta_of_losses,
    moved_pair,
)

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.binomial_sums import (
    BinomialNoise,
    BinomialSum,
    compute_epsilon,
    gaussian_bound,
    lower_epsilon,
)


@pytest.mark.parametrize("delta", [0.1, 1e-5])
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.zoo), 12])
@pytest.mark.parametrize(
    ("trials", "probability", "shift"),
    [
        (2500, 0.85, 9),
        *(pytest.param(*case, marks=pytest.mark.zoo) for case in [(2000, 0.5, 6), (3000, 0.2, 4)]),
    ],
)
def test_rounds_together_cost_between_the_lower_and_the_upper_value(
    trials, probability, shift, count, delta
):
    binomial_sum = BinomialSum(
        noise=BinomialNoise(trials=trials, probability=probability), shift=shift, dimension=4
    )
    upper, lower = (
        compute_epsilon([(binomial_sum, count)], delta=delta),
        lower_epsilon([(binomial_sum, count)], delta=delta),
    )
    assert 0 <= lower <= upper < math.inf
    _, p, q = moved_pair(binomial_distribution(trials, probability, reach=9), 0, shift)
    # Outcomes that one window of 9 standard deviations leaves out, in all rounds: below
    # count·2.3e-19·few.
    above = [
        delta_of_losses([ends], [upper, lower], step=2e-4 / math.sqrt(count), repeats=count)[1]
        for ends in ((p, q), (q, p))
    ]
    at_upper, at_lower = np.max(above, axis=0)
    assert at_upper <= delta
    assert lower == 0 or at_lower >= delta


def test_rounds_of_two_kinds_cost_no_more_than_computed():
    kinds = [
        (BinomialNoise(trials=2000, probability=0.5), 5, 3),
        (BinomialNoise(trials=900, probability=0.4), 2, 2),
    ]
    rounds = [
        (BinomialSum(noise=noise, shift=shift, dimension=1), count) for noise, shift, count in kinds
    ]
    pairs = []
    for noise, shift, count in kinds:
        pairs += count * [
            moved_pair(binomial_distribution(noise.trials, noise.probability, reach=9), 0, shift)[
                1:
            ]
        ]
    for delta in (0.05, 1e-4):
        upper, lower = compute_epsilon(rounds, delta=delta), lower_epsilon(rounds, delta=delta)
        above = [
            delta_of_losses(ends, [upper, lower], step=1e-4)[1]
            for ends in (pairs, [x[::-1] for x in pairs])
        ]
        assert np.max(above, axis=0)[0] <= delta <= np.max(above, axis=0)[1]


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_the_lower_value_of_a_sampled_user_is_that_of_a_mixture(rate):
    binomial_sum = BinomialSum(
        noise=BinomialNoise(trials=2000, probability=0.3), shift=12, dimension=1
    )
    lower = lower_epsilon([(binomial_sum, 1)], delta=1e-3, sample_rate=rate)
    worst = 0.0
    for start, end in ((0, 12), (12, 0)):
        _, p, q = moved_pair(binomial_distribution(2000, 0.3, reach=12), start, end)
        worst = max(worst, both_ways([((1 - rate) * p + rate * q, p)], lower))
    assert lower > 0
    assert worst >= 1e-3


@pytest.mark.parametrize("delta", [0.4, 1e-2, 1e-6, 1e-100])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 15.0])
def test_the_largest_mu_is_just_private_enough(epsilon, delta):
    mu = gaussian.largest_mu(epsilon=epsilon, delta=delta)
    assert gaussian.log_delta(mu=mu, epsilon=epsilon) <= math.log(delta)
    assert gaussian.log_delta(mu=mu * (1 + 1e-6), epsilon=epsilon) > math.log(delta)


@pytest.mark.parametrize("probability", [0.5, 0.07, 0.9])
@pytest.mark.parametrize("trials", [5000, 10**7])
def test_only_slopes_that_are_too_steep_are_left_out(trials, probability):
    noise = BinomialNoise(trials=trials, probability=probability)
    bound = gaussian_bound(noise, shift=3, tail=1e-9)
    assert math.isfinite(bound.slope)
    assert 0.5e-9 < bound.lost <= 1e-9  # one outcome more or less changes the tails by less
    assert gaussian_bound(noise, shift=3, tail=1e-9, steepest=bound.slope) == bound
    # It is above that of a normal distribution, which is 1 over the deviation.
    steep = gaussian_bound(noise, shift=3, tail=1e-9, steepest=1 / noise.variance**0.5)
    assert steep.slope == math.inf
