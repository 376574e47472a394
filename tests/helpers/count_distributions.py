"""The distribution of a coordinate's count, by hand, a χ² test of counts, and bits by hand."""

import dataclasses
import functools
import math

import numpy as np
import torch
from published_sums import with_plan
from scipy.stats import chi2

from helpers import binomial_enumeration
from helpers.binomial_enumeration import rounded
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


class AllBeginnings:
    """Words whose first bits, of as many entries, are every number once; later ones all the same.

    ``kind``, an unsigned integer, has as many bits as decide for most entries.
    """

    def __init__(self, later, kind=np.uint16):
        self.later, self.kind, self.asked = later, kind, []

    def words(self, count, room=None):
        return np.arange(8 * count // self.kind().nbytes).astype(self.kind).view(np.uint64)

    def uniforms(self, count):
        self.asked.append(count)
        return torch.full((count,), self.later, dtype=torch.float64)
