"""Sums whose users decide by secret coins who is in them are Poisson-subsampled DP-SGD.

Proved and enumerated.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from opacus_shuffle.analysis import sampled_sums
from opacus_shuffle.analysis.binomial_sums import BinomialNoise, gaussian_bound
from opacus_shuffle.analysis.sampled_sums import SampledSum
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, sampled_gaussian_epsilon

DELTA = 1e-6


def coins(mu, rate, lost=0.0):
    return SampledSum(mu=mu, sample_rate=rate, lost=lost, sampling="poisson")


@pytest.mark.parametrize(
    ("multiplier", "rate", "steps"), [(1.1, 0.01, 1000), (0.8, 0.1, 50), (4.0, 0.5, 200)]
)
def test_it_is_dp_sgd_at_the_sum_s_multiplier(multiplier, rate, steps):
    """And shuffled_fw's, which tests/accountants/test_shuffled_fw.py holds against Opacus."""
    epsilon = sampled_sums.compute_epsilon(
        [(coins(2 / multiplier, rate), steps)], delta=DELTA, zeroed=True
    )
    rounds = [
        (
            ShuffledRound(
                noise_multiplier=multiplier, num_users=1, sample_rate=rate, sampling="poisson"
            ),
            steps,
        )
    ]
    assert epsilon == pytest.approx(sampled_gaussian_epsilon(rounds, delta=DELTA), rel=1e-9)


def test_one_replaced_round_is_two_opposite_subsampled_gaussians():
    """The ratio of the two grows with the outcome, so the best test is a threshold."""
    mu, rate = 1.7, 0.2
    epsilon = sampled_sums.compute_epsilon([(coins(mu, rate), 1)], delta=DELTA)
    thresholds = np.linspace(0, 9, 90_001)
    own, opposite = (
        (1 - rate) * norm.sf(thresholds) + rate * norm.sf(thresholds - place)
        for place in (mu / 2, -mu / 2)
    )
    assert np.max(own - math.exp(epsilon) * opposite) <= DELTA
    assert np.max(own - math.exp(0.999 * epsilon) * opposite) > DELTA


@pytest.mark.parametrize(("mu", "count"), [(2.0, 1), (0.3, 500)])
def test_replaced_coins_cost_more_the_more_often_and_less_than_samples_of_fixed_size(mu, count):
    """From nothing to what everyone costs."""
    rates = (1e-12, 1e-3, 0.1, 0.5, 1 - 1e-9, 1.0)
    costs, fixed = (
        [
            sampled_sums.compute_epsilon(
                [(SampledSum(mu=mu, sample_rate=rate, sampling=sampling), count)], delta=DELTA
            )
            for rate in rates
        ]
        for sampling in ("poisson", "fixed_size")
    )
    # Chords of the curve cost less than a thousandth.
    assert costs[0] <= 1e-6
    assert costs[-2] == pytest.approx(costs[-1], rel=1e-3)
    dearer = np.minimum([*costs[1:], math.inf], fixed)
    assert np.all(np.array(costs) <= dearer * (1 + 1e-3))


# --- enumeration
# ----------------------------------------------------------------------


def rounded(value, steps):
    """The distribution of one value in grid steps, rounded at random to a neighbour."""
    masses = np.zeros(steps + 2)
    low = math.floor(value)
    masses[low] += 1 - (value - low)
    masses[low + 1] += value - low
    return masses


def count_of(value, rate, steps):
    """One report's count without noise.

    Its value with its coin's probability, else the middle of the grid.
    """
    return rate * rounded(value, steps) + (1 - rate) * rounded(steps / 2, steps)


def sum_of(values, rate, steps, trials, probability):
    total = binom.pmf(np.arange(trials + 1), trials, probability)
    for value in values:
        total = np.convolve(total, count_of(value, rate, steps))
    return total


def exact_delta(p, q, epsilon):
    return max(
        np.maximum(p - math.exp(epsilon) * q, 0).sum(),
        np.maximum(q - math.exp(epsilon) * p, 0).sum(),
    )


CASES = list(
    itertools.product((2, 5), ((200, 0.5), (400, 0.3)), (0.1, 0.5, 1.0), ((), (1.0,), (-1.0, 0.4)))
)


def covering(steps, trials, probability, rate):
    """The round that the bound takes for one coordinate's sum."""
    bound = gaussian_bound(
        BinomialNoise(trials=trials, probability=probability), shift=steps, tail=1e-9
    )
    return coins(bound.slope * steps, rate, bound.lost)


@pytest.mark.parametrize(("steps", "noise", "rate", "others"), CASES)
def test_no_record_is_above_the_bound_in_one_coordinate_and_two_rounds(steps, noise, rate, others):
    places = [steps / 2 * (1 + other) for other in others]
    records = (steps / 2, 0.0, 0.3 * steps, 0.8 * steps, steps)
    sums = [sum_of([record, *places], rate, steps, *noise) for record in records]
    for rounds, delta in itertools.product((1, 2), (1e-6, 1e-3)):
        repeated = [(covering(steps, *noise, rate), rounds)]
        replaced, zeroed = (
            sampled_sums.compute_epsilon(repeated, delta=delta, zeroed=zeroed)
            for zeroed in (False, True)
        )
        views = [
            functools.reduce(lambda a, b: np.multiply.outer(a, b).ravel(), [one] * rounds)
            for one in sums
        ]
        for pair in itertools.combinations(views, 2):
            assert exact_delta(*pair, replaced) <= delta
        for view in views[1:]:  # the first record is the middle of the grid, which is zero
            assert exact_delta(view, views[0], zeroed) <= delta


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_among_many_bits_the_opposite_record_is_close_to_the_bound(rate):
    """The slope at the tails, six deviations out, is too steep by about 6/√100,000."""
    steps, trials = 300, 100_000
    repeated = [(covering(steps, trials, 0.5, rate), 1)]
    epsilon = sampled_sums.compute_epsilon(repeated, delta=DELTA)
    own, opposite = (sum_of([end], rate, steps, trials, 0.5) for end in (steps, 0.0))
    assert exact_delta(own, opposite, epsilon) <= DELTA < exact_delta(own, opposite, 0.9 * epsilon)
