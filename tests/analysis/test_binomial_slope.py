"""The Gaussian that covers binomial noise (docs/proofs/02_sums_with_binomial_noise.md), by sums over outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.binomial_enumeration import (
    ROUNDING,
    binomial_distribution,
    both_ways,
    delta_of_losses,
    direction,
    gaussian_delta,
    moved_pair,
)
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import binom

from opacus_shuffle.analysis import binomial_sums
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


def quantile(distribution, value, y):
    """Φ⁻¹(P(X_w ≤ y)), from the smaller tail."""
    first, masses = distribution

    def below(end):
        return masses[: max(end - first + 1, 0)].sum(), masses[max(end - first + 1, 0) :].sum()

    whole, u = math.floor(value), value - math.floor(value)
    (a, b), (c, d) = below(y - whole), below(y - whole - 1)
    low, high = (1 - u) * a + u * c, (1 - u) * b + u * d
    return ndtri(low) if low < 0.5 else -ndtri(high)


def kept_range(noise, distribution, tail):
    """The largest y with P(B ≤ y) ≤ tail/2 and the smallest with P(B > y) ≤ tail/2, by adding up."""
    first, masses = distribution
    assert first == 0
    low = int(np.searchsorted(np.cumsum(masses), tail / 2, side="right")) - 1
    high = (
        noise.trials
        - 1
        - (int(np.searchsorted(np.cumsum(masses[::-1]), tail / 2, side="right")) - 1)
    )
    return low, high


@given(drawn=small_noise, one=st.floats(0, 1), other=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_every_threshold_lies_on_or_above_the_gaussians_trade_off(drawn, one, other):
    noise, shift, tail, bound = bounded(drawn)
    distribution = binomial_distribution(noise.trials, noise.probability)
    low, high = kept_range(noise, distribution, tail)
    values = sorted((one * shift, other * shift))
    # Lemma 2.4 keeps, with lo = low − g and hi = high + g, the thresholds from lo + ⌈w′⌉ − 1 to hi
    # + ⌊w⌋, both included.
    for y in range(
        low - shift + math.ceil(values[1]) - 1, high + shift + math.floor(values[0]) + 1
    ):
        fall = quantile(distribution, values[0], y) - quantile(distribution, values[1], y)
        assert fall <= bound.slope * (values[1] - values[0]) + 1e-9


@given(drawn=small_noise, one=st.floats(0, 1), other=st.floats(0, 1), true=st.floats(0, 1))
@example(
    drawn=(150, 0.5, 1.0, 1e-6), one=0.0, other=1.0, true=1.0
)  # the outcome hi + ⌊w⌋ itself has a threshold of its own
@settings(max_examples=60, deadline=None)
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
    drawn=small_noise,
    one=st.floats(0, 1),
    other=st.floats(0, 1),
    epsilon=st.floats(0, 8),
)
@settings(max_examples=100, deadline=None)
def test_one_coordinate_never_exceeds_the_bound(drawn, one, other, epsilon):
    noise, shift, _, bound = bounded(drawn)
    _, p, q = moved_pair(
        binomial_distribution(noise.trials, noise.probability), one * shift, other * shift
    )
    limit = gaussian_delta(bound.slope * abs(one - other) * shift, epsilon) + bound.lost
    assert both_ways([(p, q)], epsilon) <= limit + ROUNDING * (1 + math.exp(epsilon))


@given(
    trials=st.integers(60, 400),
    probability=st.floats(0.25, 0.75),
    tail=st.sampled_from([1e-3, 0.02, 0.1]),
    share=st.floats(0.1, 1.2),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("dimension", [2, 3])
def test_two_and_three_coordinates_never_exceed_the_bound(
    dimension, trials, probability, tail, share, data
):
    noise = BinomialNoise(
        trials=trials if dimension == 2 else 60 + trials // 8, probability=probability
    )
    shift = max(1, round(share * math.sqrt(noise.variance)))
    bound = gaussian_bound(noise, shift=shift, tail=tail)
    assume(math.isfinite(bound.slope))
    values = [
        (shift * data.draw(st.floats(0, 1)), shift * data.draw(st.floats(0, 1)))
        for _ in range(dimension)
    ]
    epsilon = data.draw(st.floats(0, 5))
    distribution = binomial_distribution(noise.trials, noise.probability)
    pairs = [moved_pair(distribution, one, other)[1:] for one, other in values]
    distance = math.sqrt(sum((one - other) ** 2 for one, other in values))
    limit = gaussian_delta(bound.slope * distance, epsilon) + dimension * bound.lost
    assert both_ways(pairs, epsilon) <= limit + ROUNDING * (1 + math.exp(epsilon))


@pytest.mark.zoo
@pytest.mark.parametrize("probability", [0.5, 0.08])
@pytest.mark.parametrize("kind", ["diagonal", "signs", "random", "one large"])
def test_thirty_tiny_moves_together_stay_below_the_bound(kind, probability):
    rng = np.random.default_rng(7)
    noise = BinomialNoise(trials=4000 if probability == 0.5 else 14_000, probability=probability)
    shift = round(0.8 * math.sqrt(noise.variance))
    bound = gaussian_bound(noise, shift=shift, tail=1e-9)
    distribution = binomial_distribution(noise.trials, probability, reach=9)
    move = shift * direction(kind, 30, rng)
    start = rng.uniform(np.maximum(0, -move), np.minimum(shift, shift - move))
    pairs = [
        moved_pair(distribution, one, one + by)[1:] for one, by in zip(start, move, strict=True)
    ]
    epsilons = [0.1, 0.5, 1.0, 2.0, 3.0]
    for ends in (pairs, [(q, p) for p, q in pairs]):
        below, above = delta_of_losses(ends, epsilons, step=2e-4)
        limit = [gaussian_delta(bound.slope * shift, e) + 30 * bound.lost for e in epsilons]
        assert np.all(above <= limit)
        assert np.all(above - below <= 0.05 * above + 1e-9)


def slope_by_definition(noise, lowest, highest):
    """c of the docstring over all outcomes."""
    y = np.arange(lowest, highest + 1)
    z = np.where(
        binom.cdf(np.arange(lowest - 1, highest + 1), noise.trials, noise.probability) < 0.5,
        ndtri(binom.cdf(np.arange(lowest - 1, highest + 1), noise.trials, noise.probability)),
        -ndtri(binom.sf(np.arange(lowest - 1, highest + 1), noise.trials, noise.probability)),
    )
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(
        np.max(
            binom.pmf(y, noise.trials, noise.probability) / np.minimum(density[1:], density[:-1])
        )
    )


@pytest.mark.parametrize("blocks", [1, 3, 50, 333, 2**16])
@pytest.mark.parametrize(
    ("trials", "probability", "shift"),
    [(3000, 0.5, 20), (3001, 0.2, 9), (900, 0.7, 30), (5000, 0.05, 3)],
)
def test_blocks_of_outcomes_never_lower_the_slope(monkeypatch, blocks, trials, probability, shift):
    noise = BinomialNoise(trials=trials, probability=probability)
    low, high = kept_range(noise, binomial_distribution(trials, probability), 1e-3)
    exact = slope_by_definition(noise, low - shift, high + shift)
    monkeypatch.setattr(binomial_sums, "_BLOCKS", blocks)
    slope = gaussian_bound.__wrapped__(noise, shift=shift, tail=1e-3).slope
    assert slope >= exact
    if blocks == 2**16:
        assert slope == pytest.approx(exact, rel=2e-9)


def test_a_noise_too_small_for_the_shift_gives_no_bound():
    assert (
        gaussian_bound(BinomialNoise(trials=20, probability=0.5), shift=15, tail=1e-3).slope
        == math.inf
    )
    each = BinomialSum(noise=BinomialNoise(trials=20, probability=0.5), shift=15, dimension=2)
    assert compute_epsilon([(each, 1)], delta=1e-6) == math.inf
