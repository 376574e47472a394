"""Sums whose users decide by secret coins who is in them are Poisson-subsampled DP-SGD, proved and enumerated."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from opacus.accountants import PRVAccountant
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
def test_it_is_opacus_s_prv_accountant_at_the_sum_s_multiplier(multiplier, rate, steps):
    found = sampled_sums.compute_epsilon(
        [(coins(2 / multiplier, rate), steps)], delta=DELTA, zeroed=True
    )
    accountant = PRVAccountant()
    accountant.history = [(multiplier, rate, steps)]
    assert found == pytest.approx(accountant.get_epsilon(DELTA, eps_error=0.01), abs=0.02, rel=2e-3)
    rounds = [
        (
            ShuffledRound(
                noise_multiplier=multiplier, num_users=1, sample_rate=rate, sampling="poisson"
            ),
            steps,
        )
    ]
    assert found == pytest.approx(sampled_gaussian_epsilon(rounds, delta=DELTA), rel=1e-9)


def test_what_is_lost_is_taken_from_delta():
    rounds = [(coins(1.0, 0.1, 1e-9), 100)]
    lossless = [(coins(1.0, 0.1), 100)]
    found = sampled_sums.compute_epsilon(rounds, delta=DELTA, zeroed=True)
    assert found > sampled_sums.compute_epsilon(lossless, delta=DELTA, zeroed=True)
    assert found >= sampled_sums.compute_epsilon(lossless, delta=DELTA - 1e-7, zeroed=True) * (
        1 - 2e-3
    )
    assert (
        sampled_sums.compute_epsilon([(coins(1.0, 0.1, 1e-7), 100)], delta=DELTA, zeroed=True)
        == math.inf
    )


def test_under_replacement_coins_are_a_sample_of_fixed_size():
    fixed = SampledSum(mu=0.5, sample_rate=0.1)
    both = [
        sampled_sums.compute_epsilon([(each, 50)], delta=DELTA) for each in (fixed, coins(0.5, 0.1))
    ]
    assert both[0] == both[1]


# --- enumeration
# --------------------------------------------------------------------------------------------------------


def rounded(value, steps):
    """The distribution of one value in grid steps, rounded at random to a neighbour."""
    masses = np.zeros(steps + 2)
    low = math.floor(value)
    masses[low] += 1 - (value - low)
    masses[low + 1] += value - low
    return masses


def count_of(value, rate, steps):
    """One report's count without noise: its value with its coin's probability, else the middle of the grid."""
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
    """Subsampled Gaussians on cells whose masses are exact: cells can only hide something, by little."""
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
    """The bound is enlarged by what cells of a thousandth hide: a hockey stick changes by at most its slope on a cell."""
    trials, probability = noise
    bound = gaussian_bound(
        BinomialNoise(trials=trials, probability=probability), shift=steps, tail=1e-9
    )
    places = [steps / 2 * (1 + other) for other in others]
    for own in (steps, 0.0, 0.8 * steps):
        mu = bound.slope * abs(own - steps / 2)
        one = [
            sum_of([each, *places], rate, steps, trials, probability) for each in (own, steps / 2)
        ]
        pair = gaussian_pair(mu, rate)
        for rounds in (1, 2):
            p, q = (
                functools.reduce(lambda a, b: np.multiply.outer(a, b).ravel(), [each] * rounds)
                for each in one
            )
            fine = pair if rounds == 1 else gaussian_pair(mu, rate, 300)
            r, s = (
                functools.reduce(lambda a, b: np.multiply.outer(a, b).ravel(), [each] * rounds)
                for each in fine
            )
            for epsilon in (0.0, 0.1, 0.5, 1.0):
                hidden = (
                    (18 + mu) / (len(fine[0]) - 3) * mu * rounds
                )  # cell width times mu: how far a ratio moves on a cell
                assert (
                    exact_delta(p, q, epsilon)
                    <= exact_delta(r, s, epsilon) * (1 + hidden) + hidden**2 + rounds * bound.lost
                )


def test_two_coordinates_are_one_gaussian_mechanism_whatever_the_direction():
    """By enumeration of both coordinates' counts: user 1's vector points along the diagonal, and along an axis."""
    steps, trials, rate = 4, 150, 0.3
    bound = gaussian_bound(BinomialNoise(trials=trials, probability=0.5), shift=steps, tail=1e-9)
    noise = binom.pmf(np.arange(trials + 1), trials, 0.5)
    for direction in ((1.0, 0.0), (math.sqrt(0.5), math.sqrt(0.5)), (0.6, -0.8)):
        own = [np.convolve(noise, rounded(steps / 2 * (1 + each), steps)) for each in direction]
        zero = [np.convolve(noise, rounded(steps / 2, steps))] * 2
        absent = np.multiply.outer(*zero)
        present = rate * np.multiply.outer(*own) + (1 - rate) * absent
        mu = bound.slope * steps / 2
        for epsilon in (0.0, 0.2, 1.0):
            hidden = (18 + mu) / 1997 * mu
            allowed = (
                exact_delta(*gaussian_pair(mu, rate), epsilon) * (1 + hidden)
                + hidden**2
                + 2 * bound.lost
            )
            assert exact_delta(present, absent, epsilon) <= allowed
