"""Binomial numbers by inversion have the binomial's chances, to 2⁻¹²⁸."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from opacus_shuffle.core.exact_binomials import exact_binomials
from opacus_shuffle.core.randomness import SecretGenerator


def distribution_function(trials: int, probability: float) -> list[int]:
    """The chances to be at most 0, 1, ..., in units of 2⁻¹²⁸, by exact fractions."""
    share, reached, steps = Fraction(probability), Fraction(0), []
    for number in range(trials):
        reached += math.comb(trials, number) * share**number * (1 - share) ** (trials - number)
        steps.append(math.floor(reached * 2**128))
    return steps


def drawn_by(words: list, trials: int, probability: float, count: int, monkeypatch) -> list[int]:
    """The numbers that are drawn by these words, of which each call gets the next ones."""
    given = iter(words)
    monkeypatch.setattr(
        SecretGenerator, "words", lambda self, size: np.array(next(given)[:size], dtype=np.uint64)
    )
    return exact_binomials(trials, probability, count, SecretGenerator()).tolist()


@pytest.mark.parametrize(
    ("trials", "probability"), [(1, 0.5), (7, 0.25), (40, 0.3), (3, 1 - 2**-30)]
)
def test_bits_next_to_a_step_of_the_distribution_function_are_decided_by_it(
    trials, probability, monkeypatch
):
    """Steps are rounded to 2⁻¹²⁸, and their sum's error is less than two of these for each of the trials."""
    for number, step in enumerate(distribution_function(trials, probability)):
        for bits, expected in ((step - 2 * trials, number), (step + 2 * trials, number + 1)):
            begin, rest = divmod(bits, 2**112)
            middle, end = divmod(rest, 2**64)
            words = [[begin], [middle << 16, end]]
            assert drawn_by(words, trials, probability, 1, monkeypatch) == [expected]


@pytest.mark.parametrize(("trials", "probability"), [(10, 0.5), (1000, 0.25), (10**7, 0.5)])
def test_many_of_them_are_distributed_so(trials, probability):
    draws = exact_binomials(trials, probability, 20_000, SecretGenerator())
    edges = np.unique(stats.binom.ppf(np.linspace(0.1, 0.9, 9), trials, probability))
    chances = np.diff([0, *stats.binom.cdf(edges, trials, probability), 1])
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(chances))
    assert (
        (counts - 20_000 * chances) ** 2 / (20_000 * chances)
    ).sum() < 60  # chi-square, 9 degrees: 1e-9


@pytest.mark.parametrize(("trials", "probability"), [(7, 0.3), (40, 0.3), (25, 0.05)])
@pytest.mark.parametrize("rest", [0, 1])
def test_all_beginnings_of_sixteen_bits_are_decided_by_the_distribution_function(
    trials, probability, rest, monkeypatch
):
    """With nothing but zeros or ones behind them, which no step of these has."""
    steps, begins = distribution_function(trials, probability), np.arange(2**16, dtype=np.uint16)
    words = [begins.view(np.uint64), np.full(2**17, rest * (2**64 - 1), np.uint64)]
    expected = [
        bisect.bisect_right(steps, begin * 2**112 + rest * (2**112 - 1)) for begin in range(2**16)
    ]
    assert drawn_by(words, trials, probability, 2**16, monkeypatch) == expected


def test_nothing_and_all_are_certain():
    assert exact_binomials(0, 0.5, 3, SecretGenerator()).tolist() == [0, 0, 0]


def test_a_table_of_millions_of_steps_is_refused():
    with pytest.raises(ValueError, match="secure_mode=True draws binomials up to"):
        exact_binomials(10**13, 0.5, 1, SecretGenerator())
