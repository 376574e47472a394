"""The Gaussian that covers sums under binomial noise (docs/proofs/02_sums_with_binomial_noise.md), by sums over outcomes."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from helpers.binomial_enumeration import (
    ROUNDING,
    binomial_distribution,
    both_ways,
    delta_of_losses,
    exact_delta,
    gaussian_delta,
    moved_pair,
)
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import binom

from opacus_shuffle.analysis import binomial_sums, gaussian
from opacus_shuffle.analysis.binomial_sums import (
    BinomialNoise,
    BinomialSum,
    compute_epsilon,
    gaussian_bound,
    hockey_stick,
    largest_mu,
    lower_epsilon,
)

# ---- one coordinate ---------------------------------------------------------------------------------------------------------


def precise_tails(trials, probability):
    """P(B > y) for y from −1 to ``trials``, 50 digits."""
    p = mpmath.mpf(probability)
    masses = [mpmath.binomial(trials, y) * p**y * (1 - p) ** (trials - y) for y in range(trials + 1)]
    tails = [mpmath.mpf(0)]
    for mass in reversed(masses):
        tails.append(tails[-1] + mass)
    return tails[::-1], masses


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
def test_the_hockey_stick_is_the_sum_over_all_outcomes_rounded_up(trials, probability, shift, epsilon):
    with mpmath.workdps(50):
        _, masses = precise_tails(trials, probability)
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
        found = hockey_stick(BinomialNoise(trials=trials, probability=probability), shift=shift, epsilon=epsilon)
        assert truth * (1 - mpmath.mpf(2) ** -52) <= found <= min(limit * (1 + mpmath.mpf(2) ** -50), 1)


def precise_tail_at_huge_trials(trials, probability, y):
    """P(B > y), by the midpoint rule's Euler–Maclaurin series for the sum: the next term is below 1e-20 of it."""
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
        (10**12, 500_000, 1.0),
        (10**12, 500_000, 7.5),
        (10**14, 6_310_250, 6.065719541085232),
        (2**50, 16_777_216, 1.0),
        (2**50, 22_492_398, 6.690480365315447),
    ],
)
def test_the_hockey_stick_is_rounded_up_at_huge_trials(trials, shift, epsilon):
    noise = BinomialNoise(trials=trials, probability=0.5)
    found = hockey_stick(noise, shift=shift, epsilon=epsilon)
    with mpmath.workdps(40):
        # Any threshold gives a value that the supremum is not below; near the best one they agree to second order.
        y = round(trials / 2 + shift / 2 + epsilon / shift * noise.variance)
        truth = precise_tail_at_huge_trials(trials, 0.5, y - shift)
        truth -= mpmath.exp(epsilon) * precise_tail_at_huge_trials(trials, 0.5, y)
        assert found >= truth, f"below by {float(1 - found / truth):.2g} of it"


@pytest.mark.parametrize("probability", [0.5, 0.01])
def test_at_a_trillion_trials_the_hockey_stick_is_finite_monotone_and_near_the_gaussians(probability):
    noise = BinomialNoise(trials=10**12, probability=probability)
    deviation = math.sqrt(noise.variance)
    shifts = [round(deviation * share) for share in (0.01, 0.1, 0.5, 1.0, 2.0)]
    table = np.array([[hockey_stick(noise, shift=s, epsilon=e) for e in (0.0, 0.1, 1.0, 3.0)] for s in shifts])
    assert np.all(np.isfinite(table))
    assert np.all(np.diff(table, axis=0) >= 0)
    assert np.all(np.diff(table, axis=1) <= 0)
    for row, shift in zip(table, shifts, strict=True):
        for found, epsilon in zip(row, (0.0, 0.1, 1.0, 3.0), strict=True):
            # Berry–Esseen for a binomial, constant 0.4748·(p² + q²)/√(mpq), in either tail.
            slack = 0.4748 * (probability**2 + (1 - probability) ** 2) / deviation * (1 + math.exp(epsilon))
            assert abs(found - gaussian_delta(shift / deviation, epsilon)) <= slack + 1e-8


@given(
    trials=st.integers(1, 300),
    probability=st.floats(0.01, 0.99),
    shift=st.integers(0, 60),
    one=st.floats(0, 1),
    other=st.floats(0, 1),
    epsilon=st.floats(0, 6),
)
@settings(max_examples=150, deadline=None)
def test_no_two_values_within_the_shift_are_told_apart_better_than_its_ends(trials, probability, shift, one, other, epsilon):
    distribution = binomial_distribution(trials, probability)
    _, p, q = moved_pair(distribution, one * shift, other * shift)
    assert both_ways([(p, q)], epsilon) <= hockey_stick(
        BinomialNoise(trials=trials, probability=probability), shift=shift, epsilon=epsilon
    ) + ROUNDING * (1 + math.exp(epsilon))


def test_both_directions_count_where_they_differ():
    few, many = BinomialNoise(trials=40, probability=0.1), BinomialNoise(trials=40, probability=0.9)
    _, p, q = moved_pair(binomial_distribution(40, 0.1), 0, 3)
    one, other = exact_delta([(p, q)], 1.0), exact_delta([(q, p)], 1.0)
    assert abs(one - other) > 0.01
    assert hockey_stick(few, shift=3, epsilon=1.0) == pytest.approx(max(one, other), rel=1e-8)
    assert hockey_stick(many, shift=3, epsilon=1.0) == pytest.approx(max(one, other), rel=1e-8)


# ---- the Gaussian that covers -----------------------------------------------------------------------------------------------

small_noise = st.tuples(
    st.integers(150, 2500), st.floats(0.1, 0.9), st.floats(0.05, 1.5), st.sampled_from([1e-6, 1e-3, 0.02, 0.2])
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
    high = noise.trials - 1 - (int(np.searchsorted(np.cumsum(masses[::-1]), tail / 2, side="right")) - 1)
    return low, high


@given(drawn=small_noise, one=st.floats(0, 1), other=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_every_threshold_lies_on_or_above_the_gaussians_trade_off(drawn, one, other):
    noise, shift, tail, bound = bounded(drawn)
    distribution = binomial_distribution(noise.trials, noise.probability)
    low, high = kept_range(noise, distribution, tail)
    values = sorted((one * shift, other * shift))
    # Lemma 2.4 keeps, with lo = low − g and hi = high + g, the thresholds from lo + ⌈w′⌉ − 1 to hi + ⌊w⌋, both included.
    for y in range(low - shift + math.ceil(values[1]) - 1, high + shift + math.floor(values[0]) + 1):
        fall = quantile(distribution, values[0], y) - quantile(distribution, values[1], y)
        assert fall <= bound.slope * (values[1] - values[0]) + 1e-9


@given(drawn=small_noise, one=st.floats(0, 1), other=st.floats(0, 1), true=st.floats(0, 1))
@example(drawn=(150, 0.5, 1.0, 1e-6), one=0.0, other=1.0, true=1.0)  # the outcome hi + ⌊w⌋ itself has a threshold of its own
@settings(max_examples=60, deadline=None)
def test_what_is_lost_covers_the_lumped_tails(drawn, one, other, true):
    noise, shift, tail, bound = bounded(drawn)
    first, _ = distribution = binomial_distribution(noise.trials, noise.probability)
    low, high = kept_range(noise, distribution, tail)
    values = sorted((one * shift, other * shift))
    value = values[0] + true * (values[1] - values[0])
    _, p, _ = moved_pair(distribution, value, value)
    outcomes = first + math.floor(value) + np.arange(len(p))
    lumped = (outcomes < low - shift + math.ceil(values[1])) | (outcomes > high + shift + math.floor(values[0]))
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
    _, p, q = moved_pair(binomial_distribution(noise.trials, noise.probability), one * shift, other * shift)
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
def test_two_and_three_coordinates_never_exceed_the_bound(dimension, trials, probability, tail, share, data):
    noise = BinomialNoise(trials=trials if dimension == 2 else 60 + trials // 8, probability=probability)
    shift = max(1, round(share * math.sqrt(noise.variance)))
    bound = gaussian_bound(noise, shift=shift, tail=tail)
    assume(math.isfinite(bound.slope))
    values = [(shift * data.draw(st.floats(0, 1)), shift * data.draw(st.floats(0, 1))) for _ in range(dimension)]
    epsilon = data.draw(st.floats(0, 5))
    distribution = binomial_distribution(noise.trials, noise.probability)
    pairs = [moved_pair(distribution, one, other)[1:] for one, other in values]
    distance = math.sqrt(sum((one - other) ** 2 for one, other in values))
    limit = gaussian_delta(bound.slope * distance, epsilon) + dimension * bound.lost
    assert both_ways(pairs, epsilon) <= limit + ROUNDING * (1 + math.exp(epsilon))


def direction(kind, dimension, rng):
    """A unit vector."""
    move = {
        "axis": np.eye(dimension)[0],
        "diagonal": np.ones(dimension),
        "signs": rng.choice([-1.0, 1.0], dimension),
        "random": rng.standard_normal(dimension),
        "one large": np.concatenate([[3.0], rng.standard_normal(dimension - 1) * 0.3]),
    }[kind]
    return move / np.linalg.norm(move)


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
    pairs = [moved_pair(distribution, one, one + by)[1:] for one, by in zip(start, move, strict=True)]
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
    return float(np.max(binom.pmf(y, noise.trials, noise.probability) / np.minimum(density[1:], density[:-1])))


@pytest.mark.parametrize("blocks", [1, 3, 50, 333, 2**16])
@pytest.mark.parametrize(("trials", "probability", "shift"), [(3000, 0.5, 20), (3001, 0.2, 9), (900, 0.7, 30), (5000, 0.05, 3)])
def test_blocks_of_outcomes_never_lower_the_slope(monkeypatch, blocks, trials, probability, shift):
    noise = BinomialNoise(trials=trials, probability=probability)
    low, high = kept_range(noise, binomial_distribution(trials, probability), 1e-3)
    exact = slope_by_definition(noise, low - shift, high + shift)
    monkeypatch.setattr(binomial_sums, "_BLOCKS", blocks)
    slope = gaussian_bound.__wrapped__(noise, shift=shift, tail=1e-3).slope
    assert slope >= exact
    if blocks == 2**16:
        assert slope == pytest.approx(exact, rel=2e-9)


@pytest.mark.parametrize("trials", [10**9, 10**12])
def test_blocks_cost_what_a_density_changes_in_one(trials):
    noise = BinomialNoise(trials=trials, probability=0.5)
    deviation = math.sqrt(noise.variance)
    slope = gaussian_bound(noise, shift=round(deviation / 2), tail=1e-16).slope
    # 2^16 blocks over twice 8.3 + 0.5 standard deviations (5e-17 lies beyond 8.3), and log φ falls by z a unit there.
    reach = 8.8 + 1e-3
    block = 2 * reach / 2**16
    assert 1 <= slope * deviation <= math.exp(block * reach) * (1 + 20 / math.sqrt(trials))


def test_a_noise_too_small_for_the_shift_gives_no_bound():
    assert gaussian_bound(BinomialNoise(trials=20, probability=0.5), shift=15, tail=1e-3).slope == math.inf
    each = BinomialSum(noise=BinomialNoise(trials=20, probability=0.5), shift=15, dimension=2)
    assert compute_epsilon([(each, 1)], delta=1e-6) == math.inf


# ---- rounds -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.1, 1e-5])
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.zoo), 12])
@pytest.mark.parametrize(
    ("trials", "probability", "shift"),
    [(2000, 0.5, 6), pytest.param(3000, 0.2, 4, marks=pytest.mark.zoo), (2500, 0.85, 9)],
)
def test_rounds_together_cost_between_the_lower_and_the_upper_value(trials, probability, shift, count, delta):
    each = BinomialSum(noise=BinomialNoise(trials=trials, probability=probability), shift=shift, dimension=4)
    upper, lower = compute_epsilon([(each, count)], delta=delta), lower_epsilon([(each, count)], delta=delta)
    assert 0 <= lower <= upper < math.inf
    _, p, q = moved_pair(binomial_distribution(trials, probability, reach=9), 0, shift)
    # Outcomes that one window of 9 standard deviations leaves out, in all rounds: below count·2.3e-19·few.
    above = [
        delta_of_losses([ends], [upper, lower], step=2e-4 / math.sqrt(count), repeats=count)[1] for ends in ((p, q), (q, p))
    ]
    at_upper, at_lower = np.max(above, axis=0)
    assert at_upper <= delta
    assert lower == 0 or at_lower >= delta


@pytest.mark.parametrize("kind", ["axis", "diagonal", "signs", "random", "one large"])
def test_rounds_with_any_direction_cost_no_more_than_computed(kind):
    rng = np.random.default_rng(11)
    each = BinomialSum(noise=BinomialNoise(trials=3000, probability=0.5), shift=9, dimension=8)
    distribution = binomial_distribution(3000, 0.5, reach=9)
    move = 9 * direction(kind, 8, rng)
    start = rng.uniform(np.maximum(0, -move), np.minimum(9, 9 - move))
    pairs = [moved_pair(distribution, one, one + by)[1:] for one, by in zip(start, move, strict=True)]
    for delta in (0.05, 1e-4):
        epsilon = compute_epsilon([(each, 5)], delta=delta)
        for ends in (pairs, [(q, p) for p, q in pairs]):
            assert delta_of_losses(ends, [epsilon], step=3e-4, repeats=5)[1][0] <= delta


def test_rounds_of_two_kinds_cost_no_more_than_computed():
    kinds = [(BinomialNoise(trials=2000, probability=0.5), 5, 3), (BinomialNoise(trials=900, probability=0.4), 2, 2)]
    rounds = [(BinomialSum(noise=noise, shift=shift, dimension=1), count) for noise, shift, count in kinds]
    pairs = []
    for noise, shift, count in kinds:
        pairs += count * [moved_pair(binomial_distribution(noise.trials, noise.probability, reach=9), 0, shift)[1:]]
    for delta in (0.05, 1e-4):
        upper, lower = compute_epsilon(rounds, delta=delta), lower_epsilon(rounds, delta=delta)
        above = [delta_of_losses(ends, [upper, lower], step=1e-4)[1] for ends in (pairs, [x[::-1] for x in pairs])]
        assert np.max(above, axis=0)[0] <= delta <= np.max(above, axis=0)[1]


def test_a_value_that_becomes_zero_costs_no_more_than_computed():
    each = BinomialSum(noise=BinomialNoise(trials=2000, probability=0.5), shift=20, dimension=2)
    epsilon = compute_epsilon([(each, 1)], delta=1e-3, distance=0.5)
    assert epsilon < compute_epsilon([(each, 1)], delta=1e-3)
    distribution = binomial_distribution(2000, 0.5, reach=9)
    for angle in np.linspace(0, math.pi / 2, 7):
        x, y = 10 * math.cos(angle), 10 * math.sin(angle)
        pairs = [moved_pair(distribution, 10, 10 + x)[1:], moved_pair(distribution, 10, 10 - y)[1:]]
        assert both_ways(pairs, epsilon) <= 1e-3


@given(
    trials=st.integers(1000, 10**7),
    probability=st.floats(0.05, 0.95),
    share=st.floats(0.001, 1.0),
    dimension=st.integers(1, 1000),
    count=st.integers(1, 50),
    delta=st.sampled_from([0.3, 1e-2, 1e-6]),
)
@settings(max_examples=15, deadline=None)
def test_the_lower_value_never_exceeds_the_upper(trials, probability, share, dimension, count, delta):
    shift = max(1, round(share * math.sqrt(trials * probability * (1 - probability))))
    each = BinomialSum(noise=BinomialNoise(trials=trials, probability=probability), shift=shift, dimension=dimension)
    lower, upper = lower_epsilon([(each, count)], delta=delta), compute_epsilon([(each, count)], delta=delta)
    assert not math.isnan(lower)
    assert not math.isnan(upper)
    assert 0 <= lower <= upper


@pytest.mark.parametrize(("trials", "shift"), [(1, 1), (1, 2), (5, 3), (5, 5), (5, 9), (40, 40), (40, 41)])
def test_noise_that_hides_little_has_a_lower_value(trials, shift):
    each = BinomialSum(noise=BinomialNoise(trials=trials, probability=0.5), shift=shift, dimension=1)
    lower = lower_epsilon([(each, 1)], delta=1e-3)
    assert lower >= 0
    _, p, q = moved_pair(binomial_distribution(trials, 0.5), 0, shift)
    assert lower == math.inf or exact_delta([(p, q)], lower * (1 - 1e-6)) >= 1e-3


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_the_lower_value_of_a_sampled_user_is_that_of_a_mixture(rate):
    each = BinomialSum(noise=BinomialNoise(trials=2000, probability=0.3), shift=12, dimension=1)
    lower = lower_epsilon([(each, 1)], delta=1e-3, sample_rate=rate)
    worst = 0.0
    for start, end in ((0, 12), (12, 0)):
        _, p, q = moved_pair(binomial_distribution(2000, 0.3, reach=12), start, end)
        worst = max(worst, both_ways([((1 - rate) * p + rate * q, p)], lower))
    assert lower > 0
    assert worst >= 1e-3


@pytest.mark.parametrize("delta", [0.4, 1e-2, 1e-6, 1e-100])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 15.0])
def test_the_largest_mu_is_just_private_enough(epsilon, delta):
    mu = largest_mu(epsilon=epsilon, delta=delta)
    assert gaussian.log_delta(mu=mu, epsilon=epsilon) <= math.log(delta)
    assert gaussian.log_delta(mu=mu * (1 + 1e-6), epsilon=epsilon) > math.log(delta)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: BinomialNoise(trials=0, probability=0.5), "trials.*0"),
        (lambda: BinomialNoise(trials=True, probability=0.5), "trials.*True"),
        (lambda: BinomialNoise(trials=10, probability=1.0), "probability.*1.0"),
        (lambda: BinomialNoise(trials=10, probability=math.nan), "probability.*nan"),
        (lambda: BinomialSum(noise=BinomialNoise(trials=9, probability=0.5), shift=0, dimension=1), "shift.*0"),
        (lambda: BinomialSum(noise=BinomialNoise(trials=9, probability=0.5), shift=1, dimension=1.5), "dimension.*1.5"),
        (lambda: hockey_stick(BinomialNoise(trials=9, probability=0.5), shift=-1, epsilon=1.0), "shift.*-1"),
        (lambda: hockey_stick(BinomialNoise(trials=9, probability=0.5), shift=1, epsilon=-1.0), "epsilon.*-1.0"),
        (lambda: gaussian_bound(BinomialNoise(trials=9, probability=0.5), shift=1, tail=0.0), "tail.*0.0"),
        (lambda: compute_epsilon([], delta=1.0), "delta.*1.0"),
        (lambda: lower_epsilon([], delta=0.0), "delta.*0.0"),
        (lambda: largest_mu(epsilon=math.inf, delta=0.1), "epsilon.*inf"),
    ],
)
def test_bad_numbers_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()
