"""Zeroing and replacing a record under samples of fixed size, by enumeration.

All samples, values and noise of a small protocol are gone through.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from helpers.binomial_enumeration import binomial_distribution, both_ways

from opacus_shuffle.accountants.bounds.registry import compute_bound
from opacus_shuffle.accountants.mechanisms import ShuffledSums
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

DELTA, BATCH = 1e-3, 2
PROTOCOL = ShuffleVectorSum.with_noise_multiplier(
    BATCH, 1, 1.0, 1.5, delta=DELTA, rounding_share=1.0
)
PAIRS = {
    "zero_out": [(1.0, 0.0), (-1.0, 0.0), (0.7, 0.0)],
    "replace": [(1.0, -1.0), (0.3, -1.0), (1.0, 0.0)],
}


def rounds_of(users, steps):
    return [(ShuffledSums.of_protocol(PROTOCOL, num_users=users), steps)]


@functools.cache
def counts(values):
    """The distribution of one round's count.

    A uniform sample of two of these values, each rounded at random, and the noise.
    """
    grid, noise = PROTOCOL.granularity, PROTOCOL.sum_round.noise
    samples = list(itertools.combinations(values, BATCH))
    total = np.zeros(noise.trials + BATCH * (grid + 1) + 1)
    for sample in samples:
        masses = binomial_distribution(noise.trials, noise.probability)[1]
        for value in sample:
            place = (value + 1) * grid / 2
            whole = math.floor(place)
            rounded = np.zeros(grid + 2)
            rounded[whole : whole + 2] = 1 - (place - whole), place - whole
            masses = np.convolve(masses, rounded)
        total += masses / len(samples)
    return total


def exact_delta(users, steps, pair, others, epsilon):
    """The larger of both directions' δ, in ``steps`` rounds with fresh samples."""
    one, other = (counts((value, *others[: users - 1])) for value in pair)
    return both_ways([(one, other)] * steps, epsilon)


OTHERS = [(0.0,) * 5, (1.0,) * 5, (-1.0,) * 5, (1.0, -1.0, 0.2, -0.6, 1.0)]


@pytest.mark.parametrize(("users", "steps"), [(2, 1), (2, 2), (3, 1), (3, 2), (6, 1), (6, 2)])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_the_certified_epsilon_holds_for_its_adjacency_whoever_the_others_are(
    users, steps, adjacency
):
    epsilon = compute_bound(rounds_of(users, steps), delta=DELTA, adjacency=adjacency).epsilon
    for pair, others in itertools.product(PAIRS[adjacency], OTHERS):
        assert exact_delta(users, steps, pair, others, epsilon) <= DELTA


@pytest.mark.parametrize(("users", "steps"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_zeroing_is_not_answered_by_replacing(users, steps):
    """Some replacement is beyond the ε of zeroing, so that it is no ε of replacement's."""
    zeroing = compute_bound(rounds_of(users, steps), delta=DELTA, adjacency="zero_out").epsilon
    assert max(exact_delta(users, steps, (1.0, -1.0), others, zeroing) for others in OTHERS) > DELTA


@pytest.mark.parametrize("users", [2, 3, 6, 20, 60, 200])
def test_where_zeroing_costs_what_replacing_costs_the_meaning_says_so(users):
    """Hiding the samples is proved for replacement alone.

    Seen samples are proved for either by itself.
    """
    bounds = {
        neighbours.value: compute_bound(rounds_of(users, 40), delta=DELTA, adjacency=neighbours)
        for neighbours in Adjacency
    }
    zeroing, replacing = bounds["zero_out"], bounds["replace"]
    assert zeroing.epsilon <= replacing.epsilon
    same = "the same epsilon holds if the record is replaced"
    assert (same in zeroing.meaning) == (zeroing.epsilon == replacing.epsilon)
    assert same not in replacing.meaning
