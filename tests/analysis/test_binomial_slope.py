"""The Gaussian that covers binomial noise (docs/proofs/02_sums_with_binomial_noise.md).

By sums over outcomes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.binomial_enumeration import (
    ROUNDING,
    binomial_distribution,
    both_ways,
    gaussian_delta,
    moved_pair,
)
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import binom

from opacus_shuffle.analysis.binomial_sums import (
    BinomialNoise,
    BinomialSum,
    compute_epsilon,
    gaussian_bound,
)

small_noise = st.tuples(
    st.integers(150, 2500),
    st.floats(0.1, 0.9),
    st.floats(0.05, 1.5),
    st.sampled_from([1e-6, 1e-3, 0.02, 0.2]),
)


def bounded(drawn):
    """Noise, shift and bound from Hypothesis' draw; only those where the bound says something."""
    trials, probability, share, tail = drawn
    noise = BinomialNoise(trials=trials, probability=probability)
    shift = max(1, round(share * math.sqrt(noise.variance)))
    bound = gaussian_bound(noise, shift=shift, tail=tail)
    assume(math.isfinite(bound.slope))
    return noise, shift, tail, bound


def kept_range(noise, distribution, tail):
    """The largest y with P(B ≤ y) ≤ tail/2 and the smallest with P(B > y) ≤ tail/2.

    By adding up.
    """
    first, masses = distribution
    assert first == 0
    low = int(np.searchsorted(np.cumsum(masses), tail / 2, side="right")) - 1
    high = (
        noise.trials
        - 1
        - (int(np.searchsorted(np.cumsum(masses[::-1]), tail / 2, side="right")) - 1)
    )
    return low, high


@given(drawn=small_noise, one=st.floats(0, 1), other=st.floats(0, 1), true=st.floats(0, 1))
@example(
    drawn=(150, 0.5, 1.0, 1e-6), one=0.0, other=1.0, true=1.0
)  # the outcome hi + ⌊w⌋ itself has a threshold of its own
@settings(max_examples=60)
def test_what_is_lost_covers_the_lumped_tails(drawn, one, other, true):
    noise, shift, tail, bound = bounded(drawn)
    first, _ = distribution = binomial_distribution(noise.trials, noise.probability)
    low, high = kept_range(noise, distribution, tail)
    values = sorted((one * shift, other * shift))
    value = values[0] + true * (values[1] - values[0])
    _, p, _ = moved_pair(distribution, value, value)
    outcomes = first + math.floor(value) + np.arange(len(p))
    lumped = (outcomes < low - shift + math.ceil(values[1])) | (
        outcomes > high + shift + math.floor(values[0])
    )
    assert p[lumped].sum() <= bound.lost * (1 + ROUNDING)
    assert bound.lost <= tail * (1 + 2e-9)


@given(
    trials=st.integers(60, 400),
    probability=st.floats(0.25, 0.75),
    tail=st.sampled_from([1e-3, 0.02, 0.1]),
    share=st.floats(0.1, 1.2),
    data=st.data(),
)
@settings(max_examples=50)
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_one_two_and_three_coordinates_never_exceed_the_bound(
    dimension, trials, probability, tail, share, data
):
    noise = BinomialNoise(
        trials=trials if dimension < 3 else 60 + trials // 8, probability=probability
    )
    shift = max(1, round(share * math.sqrt(noise.variance)))
    bound = gaussian_bound(noise, shift=shift, tail=tail)
    assume(math.isfinite(bound.slope))
    values = [
        (shift * data.draw(st.floats(0, 1)), shift * data.draw(st.floats(0, 1)))
        for _ in range(dimension)
    ]
    epsilon = data.draw(st.floats(0, 8))
    distribution = binomial_distribution(noise.trials, noise.probability)
    pairs = [moved_pair(distribution, one, other)[1:] for one, other in values]
    distance = math.sqrt(sum((one - other) ** 2 for one, other in values))
    limit = gaussian_delta(bound.slope * distance, epsilon) + dimension * bound.lost
    assert both_ways(pairs, epsilon) <= limit + ROUNDING * (1 + math.exp(epsilon))


def slope_by_definition(noise, lowest, highest):
    """c of the docstring over all outcomes."""
    outcomes = np.arange(lowest - 1, highest + 1)
    below, above = (
        tail(outcomes, noise.trials, noise.probability) for tail in (binom.cdf, binom.sf)
    )
    z = np.where(below < 0.5, ndtri(below), -ndtri(above))
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    masses = binom.pmf(outcomes[1:], noise.trials, noise.probability)
    return float(np.max(masses / np.minimum(density[1:], density[:-1])))


@pytest.mark.parametrize(
    ("trials", "probability", "shift", "largest_excess"),
    [
        *((trials, p, shift, 2e-9) for trials, p, shift in ((3000, 0.5, 20), (3001, 0.2, 9))),
        *((trials, p, shift, 2e-9) for trials, p, shift in ((900, 0.7, 30), (5000, 0.05, 3))),
        # More than 2^16 outcomes are taken in blocks, which the module says cost 0.3 % at most.
        (10**9, 0.5, 1000, 3e-3),
        pytest.param(2 * 10**9, 0.1, 20_000, 3e-3, marks=pytest.mark.zoo),
    ],
)
def test_the_slope_is_the_definition_s_or_in_blocks_of_outcomes_a_little_more(
    trials, probability, shift, largest_excess
):
    noise, tail = BinomialNoise(trials=trials, probability=probability), 1e-3
    # The largest y with P(B ≤ y) ≤ tail/2 and the smallest with P(B > y) ≤ tail/2.
    low = int(binom.ppf(tail / 2, trials, probability)) - 1
    high = int(binom.isf(tail / 2, trials, probability))
    exact = slope_by_definition(noise, low - shift, high + shift)
    slope = gaussian_bound(noise, shift=shift, tail=tail).slope
    assert exact <= slope <= exact * (1 + largest_excess)


def test_a_noise_too_small_for_the_shift_gives_no_bound():
    assert (
        gaussian_bound(BinomialNoise(trials=20, probability=0.5), shift=15, tail=1e-3).slope
        == math.inf
    )
    binomial_sum = BinomialSum(
        noise=BinomialNoise(trials=20, probability=0.5), shift=15, dimension=2
    )
    assert compute_epsilon([(binomial_sum, 1)], delta=1e-6) == math.inf
