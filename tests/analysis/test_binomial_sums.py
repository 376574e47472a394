"""Sums under binomial noise (docs/proofs/02_sums_with_binomial_noise.md), by sums over outcomes.

The hockey stick of one coordinate, the Gaussian that covers it, and rounds of such sums.
"""

import math

import mpmath
import numpy as np
import pytest
from helpers.binomial_enumeration import (
    ROUNDING,
    binomial_distribution,
    both_ways,
    delta_of_losses,
    gaussian_delta,
    moved_pair,
)
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import binom

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.analysis.binomial_sums import (
    BinomialNoise,
    BinomialSum,
    compute_epsilon,
    gaussian_bound,
    hockey_stick,
    lower_epsilon,
)


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
        pytest.param(10**10, 50_000, 1.0, marks=pytest.mark.zoo),
        pytest.param(10**12, 500_000, 1.0, marks=pytest.mark.zoo),
        (10**12, 500_000, 7.5),
        pytest.param(10**14, 6_310_250, 6.065719541085232, marks=pytest.mark.zoo),
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
def test_no_two_values_within_the_shift_are_told_apart_better_than_its_ends(
    trials, probability, shift, one, other, epsilon
):
    distribution = binomial_distribution(trials, probability)
    _, p, q = moved_pair(distribution, one * shift, other * shift)
    assert both_ways([(p, q)], epsilon) <= hockey_stick(
        BinomialNoise(trials=trials, probability=probability), shift=shift, epsilon=epsilon
    ) + ROUNDING * (1 + math.exp(epsilon))


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


OTHERS = st.floats(0, 1, exclude_max=True)
"""The fractional part of the others' sum, where a whole sum is rounded."""


@given(
    drawn=small_noise,
    others=OTHERS,
    one=st.floats(0, 1),
    other=st.floats(0, 1),
    true=st.floats(0, 1),
)
@example(
    drawn=(150, 0.5, 1.0, 1e-6), others=0.0, one=0.0, other=1.0, true=1.0
)  # the outcome hi + ⌊w⌋ itself has a threshold of its own
@example(drawn=(1000, 0.5, 0.06, 0.02), others=0.9, one=0.0, other=1.0, true=1.0)
def test_what_is_lost_covers_the_lumped_tails(drawn, others, one, other, true):
    noise, shift, tail, bound = bounded(drawn)
    first, _ = distribution = binomial_distribution(noise.trials, noise.probability)
    low, high = kept_range(noise, distribution, tail)
    masses = distribution[1]
    if masses[: max(low - shift + 1, 0)].sum() + masses[high:].sum() > tail:
        high += 1  # of shifts by very few steps
    values = sorted((others + one * shift, others + other * shift))
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
        tuple(others + shift * data.draw(st.floats(0, 1)) for _ in range(2))
        for others in (data.draw(OTHERS) for _ in range(dimension))
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
        (10**8, 0.5, 300, 3e-3),
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


@pytest.mark.parametrize("delta", [pytest.param(0.1, marks=pytest.mark.zoo), 1e-5])
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
