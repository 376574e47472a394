"""ε of noised sums on secret samples, of a fixed size or by secret coins.

The distribution of one round, its composition, and enumerated sums whose users flip coins, which
are Poisson-subsampled DP-SGD.
"""

import functools
import itertools
import math

import numpy as np
import pytest
from helpers.binomial_enumeration import both_ways, rounded
from helpers.hockey_sticks import hockey_stick, reverse_hockey_stick
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import binom, norm

from opacus_shuffle.analysis import gaussian, sampled_sums
from opacus_shuffle.analysis.binomial_sums import BinomialNoise, gaussian_bound
from opacus_shuffle.analysis.sampled_sums import (
    SampledSum,
    compute_epsilon,
    largest_mu,
    sampled_distribution,
)
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, sampled_gaussian_epsilon


def gaussian_stick(mu, alpha):
    """H_α of N(μ, 1) against N(0, 1)."""
    return norm.cdf(mu / 2 - np.log(alpha) / mu) - alpha * norm.cdf(-mu / 2 - np.log(alpha) / mu)


def profile(mu, rate, alpha):
    """h of the module's text."""
    if alpha >= 1:
        return rate * gaussian_stick(mu, 1 + (alpha - 1) / rate)
    return alpha * profile(mu, rate, 1 / alpha) + 1 - alpha


# --- one round
# ----------------------------------------------------------------------


@given(
    mu=st.floats(0.01, 6.0),
    rate=st.floats(1e-4, 1.0),
    share=st.floats(0.0, 3.0),
)
def test_the_law_s_sticks_are_just_above_the_profile_in_both_directions(mu, rate, share):
    distribution = sampled_distribution(mu=mu, sample_rate=rate)
    epsilon = share * math.log1p(rate * math.expm1(mu))
    true = profile(mu, rate, math.exp(epsilon))
    for stick in (hockey_stick(distribution, epsilon), reverse_hockey_stick(distribution, epsilon)):
        assert stick >= true * (1 - 1e-9) - 1e-15
        # The distribution's stick is the chord between grid points: above it by at most width²/8
        # times the density of R. A step of 0.03μ (half as much more 9 deviations out) in log W, W
        # of density φ(z)/(μw): rate·μ·(1.5·0.03)²·w·φ(z)/8, w·φ(z) being at most 0.4 times
        # e^{0.06μ} from one end of a cell to the other.
        assert stick <= true + rate * mu * 0.045**2 * 0.4 / 8 * math.exp(0.06 * mu)


# --- composition
# ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mu", "rate", "epsilon"), [(1.0, 0.3, 0.2), (2.5, 0.1, 0.4), (0.4, 0.7, 0.1), (1.0, 1.0, 1.0)]
)
def test_two_rounds_are_the_composition_of_the_profile_by_quadrature(mu, rate, epsilon):
    """H_α of a product is the integral of r·h(α/r) over the other factor's distribution of R."""
    alpha = math.exp(epsilon)

    def integrand(z):  # above 1: R = r at z ~ N(0, 1); below 1: R = 1/r with density r·φ(z)
        r = 1 - rate + rate * math.exp(mu * z - mu**2 / 2)
        return norm.pdf(z) * (r * profile(mu, rate, alpha / r) + profile(mu, rate, alpha * r))

    value, error = quad(integrand, mu / 2, mu + 12, limit=400, epsabs=1e-13, epsrel=1e-10)
    delta = value + (1 - rate) * (2 * norm.cdf(mu / 2) - 1) * profile(mu, rate, alpha)
    if rate == 1:
        assert math.log(delta) == pytest.approx(
            gaussian.log_delta(mu=mu * math.sqrt(2), epsilon=epsilon), abs=1e-8
        )
    stick = compute_epsilon([(SampledSum(mu=mu, sample_rate=rate), 2)], delta=delta - error)
    # The two grids' steps, 0.03 and 0.05 standard deviations, add (0.03² + 0.05²)/6 = 6e-4 to the
    # variance of the loss, 3e-4 to its deviation; ε at a fixed δ grows by a few times that.
    assert epsilon * (1 - 1e-7) <= stick <= epsilon * 1.01


def test_lost_counts_with_the_sampling_rate_and_never_leaks_infinity():
    plain = compute_epsilon([(SampledSum(mu=0.5, sample_rate=0.1), 10)], delta=1e-5)
    lossy = compute_epsilon([(SampledSum(mu=0.5, sample_rate=0.1, lost=5e-6), 10)], delta=1e-5)
    smaller = compute_epsilon(
        [(SampledSum(mu=0.5, sample_rate=0.1), 10)], delta=1e-5 - 10 * 0.1 * 5e-6 * 1.0001
    )
    assert plain < lossy == pytest.approx(smaller, rel=1e-3)


@pytest.mark.parametrize(("rate", "lost"), [(1.0, 0.0), (1.0, 4e-9), (0.02, 0.0)])
def test_the_largest_mu_meets_the_budget_and_a_little_more_does_not(rate, lost):
    mu = largest_mu(epsilon=1.0, delta=1e-6, rounds=100, sample_rate=rate, lost=lost)
    for share, within in ((1, True), (1.001, False)):
        rounds = [(SampledSum(mu=mu * share, sample_rate=rate, lost=lost), 100)]
        assert (compute_epsilon(rounds, delta=1e-6) <= 1.0) is within


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


def count_of(value, rate, steps):
    """One report's count without noise.

    Its value with its coin's probability, else the middle of the grid.
    """
    return rate * rounded(value, steps + 2) + (1 - rate) * rounded(steps / 2, steps + 2)


def sum_of(values, rate, steps, trials, probability):
    total = binom.pmf(np.arange(trials + 1), trials, probability)
    for value in values:
        total = np.convolve(total, count_of(value, rate, steps))
    return total


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
            assert both_ways([pair], replaced) <= delta
        for view in views[1:]:  # the first record is the middle of the grid, which is zero
            assert both_ways([(view, views[0])], zeroed) <= delta


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_among_many_bits_the_opposite_record_is_close_to_the_bound(rate):
    """The slope at the tails, six deviations out, is too steep by about 6/√100,000."""
    steps, trials = 300, 100_000
    repeated = [(covering(steps, trials, 0.5, rate), 1)]
    epsilon = sampled_sums.compute_epsilon(repeated, delta=DELTA)
    own, opposite = (sum_of([end], rate, steps, trials, 0.5) for end in (steps, 0.0))
    pairs = [(own, opposite)]
    assert both_ways(pairs, epsilon) <= DELTA < both_ways(pairs, 0.9 * epsilon)
