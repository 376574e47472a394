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


def test_under_replacement_coins_are_a_sample_of_fixed_size():
    fixed = SampledSum(mu=0.5, sample_rate=0.1)
    both = [
        sampled_sums.compute_epsilon([(kind, 50)], delta=DELTA) for kind in (fixed, coins(0.5, 0.1))
    ]
    assert both[0] == both[1]


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


@functools.cache
def gaussian_pair(mu, rate, cells=2000):
    """Subsampled Gaussians on cells whose masses are exact.

    Cells can only hide something, by little.
    """
    edges = np.concatenate([[-np.inf], np.linspace(-9, 9 + mu, cells), [np.inf]])
    alone = np.diff(norm.cdf(edges))
    return (1 - rate) * alone + rate * np.diff(norm.cdf(edges - mu)), alone


CASES = list(
    itertools.product((2, 5), ((200, 0.5), (400, 0.3)), (0.1, 0.5, 1.0), ((), (1.0,), (-1.0, 0.4)))
)


@pytest.mark.parametrize(("steps", "noise", "rate", "others"), CASES)
def test_no_small_case_is_above_the_bound_in_one_coordinate_and_two_rounds(
    steps, noise, rate, others
):
    """The bound is enlarged by what cells of a thousandth hide.

    A hockey stick changes by at most its slope on a cell.
    """
    trials, probability = noise
    bound = gaussian_bound(
        BinomialNoise(trials=trials, probability=probability), shift=steps, tail=1e-9
    )
    places = [steps / 2 * (1 + other) for other in others]
    for own in (steps, 0.0, 0.8 * steps):
        mu = bound.slope * abs(own - steps / 2)
        one = [
            sum_of([kind, *places], rate, steps, trials, probability) for kind in (own, steps / 2)
        ]
        pair = gaussian_pair(mu, rate)
        for rounds in (1, 2):
            p, q = (
                functools.reduce(lambda a, b: np.multiply.outer(a, b).ravel(), [kind] * rounds)
                for kind in one
            )
            fine = pair if rounds == 1 else gaussian_pair(mu, rate, 300)
            r, s = (
                functools.reduce(lambda a, b: np.multiply.outer(a, b).ravel(), [kind] * rounds)
                for kind in fine
            )
            for epsilon in (0.0, 0.1, 0.5, 1.0):
                hidden = (
                    (18 + mu) / (len(fine[0]) - 3) * mu * rounds
                )  # cell width times mu: how far a ratio moves on a cell
                assert (
                    exact_delta(p, q, epsilon)
                    <= exact_delta(r, s, epsilon) * (1 + hidden) + hidden**2 + rounds * bound.lost
                )
