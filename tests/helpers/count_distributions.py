"""The distribution of a coordinate's count, by hand, a χ² test of counts, and bits by hand."""

import dataclasses
import functools
import math

import numpy as np
from published_sums import with_plan
from scipy.stats import chi2

from helpers import binomial_enumeration
from helpers.binomial_enumeration import rounded
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.protocols.calibration import GridPlan
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

UNLIKELY = 1e-6


PLAN = GridPlan(41, 6, 0.3, 4)

# Beyond 14 standard deviations lies less than 1e-40.
binomial_distribution = functools.partial(binomial_enumeration.binomial_distribution, reach=14)


def small_protocol(dimension, users=4, plan=PLAN, fraction=1.0):
    """A protocol with a grid coarse and noise small enough to see every rounding."""
    protocol = ShuffleVectorSum(users, dimension, 1.0, 1.0, 1e-2, honest_fraction=fraction)
    return with_plan(
        protocol, dataclasses.replace(plan, honest_users=math.ceil(users * fraction - 1e-9))
    )


def count_distribution(values, plan, reports):
    """(first, probabilities) of a coordinate's count: everybody's rounding, and the noise."""
    first, distribution = binomial_distribution(reports * plan.noise_bits, plan.bit_probability)
    for value in values:
        place = (value + 1) * plan.granularity / 2
        first += math.floor(place)
        distribution = np.convolve(distribution, rounded(place - math.floor(place), 2))
    return first, distribution


def assert_of_distribution(counts, first, distribution):
    """χ² over the outcomes, those expected fewer than 10 times together."""
    counts = np.asarray(counts).ravel()
    assert counts.min() >= first
    assert counts.max() < first + len(distribution)
    seen = np.bincount(counts - first, minlength=len(distribution)).astype(float)
    expected = len(counts) * distribution / distribution.sum()
    rare = expected < 10
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:
        assert seen[-1] <= 12
        seen, expected = seen[:-1], expected[:-1]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, len(seen) - 1) > UNLIKELY


class AllBeginnings(SecretGenerator):
    """Words that hold every number of 16 bits once, as the upper half of 32 bits."""

    def words(self, count, room=None):
        beginnings = np.arange(2**16, dtype=np.uint32) << 16
        return (beginnings | 2**15)[: 2 * count].view(np.uint64)
