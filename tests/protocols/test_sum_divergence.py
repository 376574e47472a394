"""No two neighbours are told apart better than promised: exact distributions of all messages.

Every coordinate's distribution is built from scratch (neighbouring binomial probabilities, the
user's random rounding); outcomes that a window leaves out count in full towards δ.
"""

import math

import numpy as np
import pytest
from helpers.binomial_enumeration import both_ways, delta_of_losses, moved_pair
from helpers.count_distributions import binomial_distribution
from published_sums import published_vector_sum, with_plan

from opacus_shuffle.protocols.calibration import GridPlan
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


def views(protocol, x, other, *, reports=None):
    """Per coordinate in which two vectors differ: the count's distributions, by so many users."""
    if reports is None:
        reports = math.ceil(protocol.honest_fraction * protocol.num_users - 1e-9)
    noise = binomial_distribution(reports * protocol.noise_bits, protocol.bit_probability)
    steps = protocol.granularity / (2 * protocol.max_norm)
    return [
        moved_pair(noise, *(steps * (value + protocol.max_norm) for value in pair))[1:]
        for pair in zip(x, other, strict=True)
        if pair[0] != pair[1]
    ]


def deltas(pairs, epsilon, step=1e-4, rounds=1):
    """Two values that enclose δ(ε) of independent coordinates, in the larger direction."""
    ways = (pairs, [(q, p) for p, q in pairs])
    return np.max([delta_of_losses(way, [epsilon], step, rounds) for way in ways], axis=0)[:, 0]


def test_the_enumeration_agrees_with_a_sum_over_every_pair_of_outcomes():
    protocol = with_plan(ShuffleVectorSum(2, 2, 1.0, 1.0, 0.1), GridPlan(5, 40, 0.3, 2))
    pairs = views(protocol, [0.6, -0.3], [-0.4, 0.55])
    for epsilon in (0.0, 0.5, 2.0):
        lower, upper = deltas(pairs, epsilon)
        assert lower <= both_ways(pairs, epsilon) <= upper <= lower * 1.002 + 2e-9


def neighbours(dimension, rng):
    """Pairs of vectors in the unit ball that one user may hold."""
    e = np.eye(dimension)
    diagonal = np.ones(dimension) / math.sqrt(dimension)
    signs = np.where(np.arange(dimension) % 2, -1.0, 1.0) / math.sqrt(dimension)
    tilted = np.linspace(1, 0.2, dimension) / np.linalg.norm(np.linspace(1, 0.2, dimension))
    pairs = [
        (e[0], -e[0]),
        (-e[0], e[0]),
        (diagonal, -diagonal),
        (signs, -signs),
        (tilted, -tilted),
        (e[0], np.zeros(dimension)),
        (0.9999 * e[0], -0.99995 * e[0]),
        (0.003 * diagonal, -0.0041 * diagonal),
        (0.5 * e[0], 0.5 * e[0] - 0.013 * diagonal),
    ]
    if dimension > 1:
        pairs += [(e[0], e[1]), (e[0], -tilted)]
    for _ in range(3):
        ends = rng.standard_normal((2, dimension))
        ends /= np.linalg.norm(ends, axis=1, keepdims=True)
        pairs.append(tuple(ends * rng.uniform(0.3, 1, (2, 1))))
    return pairs


CASES = [
    # users, dimension, ε, δ, fraction
    (10, 1, 1.0, 1e-2, 1.0),
    (3, 1, 0.5, 1e-3, 1 / 3),
    (1, 1, 3.0, 1e-2, 1.0),
    (7, 2, 1.0, 1e-2, 1.0),
    (10, 2, 3.0, 1e-3, 0.55),
    (5, 2, 0.5, 2e-2, 1 / 3),
    pytest.param(12, 3, 2.0, 1e-2, 1.0, marks=pytest.mark.slow),
    (9, 3, 1.0, 2e-2, 0.4),
]


# SCO Definition 2.1, SCO Definition 2.6.
@pytest.mark.parametrize(("users", "dimension", "epsilon", "delta", "fraction"), CASES)
def test_no_two_neighbours_are_told_apart_better_than_promised_when_tight(
    users, dimension, epsilon, delta, fraction
):
    protocol = ShuffleVectorSum(users, dimension, 1.0, epsilon, delta, honest_fraction=fraction)
    rng = np.random.default_rng(users)
    pairs = neighbours(dimension, rng)
    if dimension == 3:
        pairs = pairs[:5] + pairs[-2:]
    worst = [deltas(views(protocol, x, other), epsilon) for x, other in pairs]
    assert max(upper for _, upper in worst) <= delta
    # Moving from end to end of one coordinate nearly takes it all: 5 % in variance, and what a
    # lattice leaves.
    assert worst[0][0] >= 0.75 * delta


# SCO Definition A.7, SCO Corollary A.9.
@pytest.mark.parametrize("reports", [4, 7, 10])
def test_who_stays_is_protected_whoever_drops_out(reports):
    protocol = ShuffleVectorSum(10, 2, 1.0, 1.0, 1e-2, honest_fraction=0.4)
    worst = [
        deltas(views(protocol, x, y, reports=reports), 1.0)
        for x, y in neighbours(2, np.random.default_rng(1))
    ]
    assert max(upper for _, upper in worst) <= 1e-2
    assert reports > 4 or max(lower for lower, _ in worst) >= 0.75e-2


# SCO Lemma 3.3, SCO Lemma A.3.
@pytest.mark.parametrize("dimension", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_moves_along_many_coordinates_stay_within_delta(dimension):
    protocol = ShuffleVectorSum(20, dimension, 1.0, 1.0, 1e-3)
    rng = np.random.default_rng(dimension)
    diagonal = np.ones(dimension) / math.sqrt(dimension)
    ends = rng.standard_normal(dimension)
    ends /= np.linalg.norm(ends)
    for x, other in ((diagonal, -diagonal), (ends, -ends), (ends, -0.8 * diagonal)):
        step = 1e-4 if dimension == 5 else 3e-5
        assert deltas(views(protocol, x, other), 1.0, step)[1] <= 1e-3


# SCO Definition 2.9: what all rounds show.
@pytest.mark.parametrize("rounds", [2, 10])
def test_rounds_with_the_same_users_stay_within_delta_together(rounds):
    epsilon, delta = 1.0, 1e-3
    protocol = ShuffleVectorSum(8, 2, 1.0, epsilon, delta, rounds=rounds)
    step = 1e-3 / rounds
    for x, other in (([1.0, 0.0], [-1.0, 0.0]), ([0.6, 0.8], [-0.6, -0.8])):
        _, upper = deltas(views(protocol, x, other), epsilon, step, rounds)
        assert 0.7 * delta <= upper <= delta
    lower, upper = protocol.exact_epsilon()
    pairs = views(protocol, [1.0, 0.0], [-1.0, 0.0])
    assert 0.9 < lower <= upper <= epsilon
    assert deltas(pairs, upper, step, rounds)[1] <= delta <= deltas(pairs, lower, step, rounds)[1]


# SCO Theorem 3.2: privacy.
@pytest.mark.parametrize("make", [ShuffleVectorSum, published_vector_sum])
def test_exact_epsilon_brackets_the_enumerated_value(make):
    protocol = make(6, 2, 1.0, 4.0, 0.05)
    for delta in (0.05, 1e-3):
        lower, upper = protocol.exact_epsilon(delta)
        assert 0 <= lower <= upper
        pairs = views(protocol, [1.0, 0.0], [-1.0, 0.0])
        assert both_ways(pairs, lower) >= delta * (1 - 1e-6) or lower == 0
        assert both_ways(pairs, upper) <= delta
    assert protocol.exact_epsilon()[1] <= protocol.epsilon


# SCO Definition 2.2, SCO Fact 2.3: of all events those of the largest ratios are the worst.
@pytest.mark.parametrize("delta", [0.05, 1e-3])
def test_the_exact_epsilon_is_the_approximate_max_divergence(delta):
    protocol = ShuffleVectorSum(6, 1, 1.0, 4.0, 0.05)
    [(p, q)] = views(protocol, [1.0], [-1.0])
    order = np.argsort(-p[p > 0] / np.maximum(q[p > 0], 1e-300))
    of_p, of_q = np.cumsum(p[p > 0][order]), np.cumsum(q[p > 0][order])
    divergence = np.log((of_p - delta)[of_p > delta] / of_q[of_p > delta]).max()
    lower, upper = protocol.exact_epsilon(delta)
    assert lower * (1 - 1e-6) <= divergence <= upper
