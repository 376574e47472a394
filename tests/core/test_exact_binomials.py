"""Binomial numbers by inversion have the binomial's chances, to 2⁻¹²⁸."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from opacus_shuffle.core.exact_binomials import exact_binomials
from opacus_shuffle.core.randomness import SecretGenerator, seeded_generator


def distribution_function(trials, probability):
    """The chances to be at most 0, 1, ..., in units of 2⁻¹²⁸, by exact fractions."""
    share, reached, steps = Fraction(probability), Fraction(0), []
    for number in range(trials):
        reached += math.comb(trials, number) * share**number * (1 - share) ** (trials - number)
        steps.append(math.floor(reached * 2**128))
    return steps


class Words:
    """A stream of these words, of which each call gets the next ones."""

    def __init__(self, *laid):
        self.laid = iter(laid)

    def words(self, size, room=None):
        return np.array(next(self.laid)[:size], dtype=np.uint64)


@pytest.mark.parametrize(
    ("trials", "probability"), [(1, 0.5), (7, 0.25), (40, 0.3), (3, 1 - 2**-30)]
)
def test_bits_next_to_a_step_of_the_distribution_function_are_decided_by_it(trials, probability):
    """Steps are rounded to 2⁻¹²⁸, and their sum errs by less than two of these for each trial."""
    for number, step in enumerate(distribution_function(trials, probability)):
        for bits, expected in ((step - 2 * trials, number), (step + 2 * trials, number + 1)):
            begin, rest = divmod(bits, 2**112)
            middle, end = divmod(rest, 2**64)
            words = Words([begin], [middle << 16, end])
            assert exact_binomials(trials, probability, 1, words).tolist() == [expected]


@pytest.mark.parametrize(
    ("trials", "probability"),
    [(10, 0.5), (1000, 0.25), (10**7, 0.5), (10**6 + 1, 0.999), (5 * 10**10 + 3, 0.3)],
)
def test_many_of_them_are_distributed_so(trials, probability):
    """The last one in parts, whose sum has the same distribution."""
    stream = seeded_generator("cpu", trials, "binomials")
    draws = exact_binomials(trials, probability, 20_000, stream)
    edges = np.unique(stats.binom.ppf(np.linspace(0.1, 0.9, 9), trials, probability))
    chances = np.diff([0, *stats.binom.cdf(edges, trials, probability), 1])
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(chances))
    # χ² of 9 degrees exceeds 60 one time in 10⁹.
    assert ((counts - 20_000 * chances) ** 2 / (20_000 * chances)).sum() < 60
    neighbours = np.corrcoef(draws[1:], draws[:-1])[0, 1]
    assert abs(neighbours) < 6 / 20_000**0.5


@pytest.mark.parametrize("trials", [2**33, 0])
def test_numbers_beyond_32_bits_and_none_at_all_are_fine(trials):
    stream = SecretGenerator()
    assert exact_binomials(trials, 1.0, 3, stream).tolist() == [trials] * 3
    assert exact_binomials(trials, 0.0, 3, stream).tolist() == [0] * 3
