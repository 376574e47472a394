"""Binomial numbers by inversion have the binomial's chances, to 2⁻¹²⁸."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from opacus_shuffle.core.exact_binomials import binomials_on_gpu, exact_binomials
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
    ("trials", "probability"), [(1, 0.5), (7, 0.25), (40, 0.3), (3, 1 - 2**-30)]
)
def test_on_a_gpu_bits_next_to_a_step_are_decided_by_it(trials, probability, monkeypatch):
    """63 bits say the same as the step's own; the other 65 are drawn."""

    def lay(bits):
        begin, rest = divmod(bits, 2**65)
        words = [(rest >> 13 * place) % 2**13 for place in range(5)]
        monkeypatch.setattr(torch.Tensor, "random_", lambda self, **_: self.fill_(begin))
        monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(words))

    for number, step in enumerate(distribution_function(trials, probability)):
        for bits, expected in ((step - 2 * trials, number), (step + 2 * trials, number + 1)):
            lay(bits)
            drawn = binomials_on_gpu(trials, probability, 2, torch.Generator())
            assert drawn.tolist() == [expected] * 2


def on_gpu(trials, probability, count, stream):
    return binomials_on_gpu(trials, probability, count, stream).cpu().numpy()


@pytest.mark.parametrize("draw", [exact_binomials, on_gpu])
@pytest.mark.parametrize(
    ("trials", "probability"),
    [
        *((10, 0.5), (10**6 + 1, 0.999), (5 * 10**10 + 3, 0.3)),
        *(pytest.param(*case, marks=pytest.mark.zoo) for case in [(1000, 0.25), (10**7, 0.5)]),
    ],
)
def test_many_of_them_are_distributed_so(trials, probability, draw):
    """The last one in parts, whose sum has the same distribution."""
    there = "cuda" if draw is on_gpu and torch.cuda.is_available() else "cpu"
    stream = seeded_generator(there, trials, "binomials")
    draws = draw(trials, probability, 20_000, stream)
    edges = np.unique(stats.binom.ppf(np.linspace(0.1, 0.9, 9), trials, probability))
    chances = np.diff([0, *stats.binom.cdf(edges, trials, probability), 1])
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(chances))
    # χ² of 9 degrees exceeds 60 one time in 10⁹.
    assert ((counts - 20_000 * chances) ** 2 / (20_000 * chances)).sum() < 60
    neighbours = np.corrcoef(draws[1:], draws[:-1])[0, 1]
    assert abs(neighbours) < 6 / 20_000**0.5


@pytest.mark.parametrize("draw", [exact_binomials, on_gpu])
@pytest.mark.parametrize("trials", [2**33, 0])
def test_numbers_beyond_32_bits_and_none_at_all_are_fine(trials, draw):
    stream = SecretGenerator()
    assert draw(trials, 1.0, 3, stream).tolist() == [trials] * 3
    assert draw(trials, 0.0, 3, stream).tolist() == [0] * 3
