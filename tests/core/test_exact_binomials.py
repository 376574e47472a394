"""Binomial numbers by inversion have the binomial's chances, to 2⁻¹²⁸."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from opacus_shuffle.core.exact_binomials import _guide, _steps, exact_binomials
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


@pytest.mark.parametrize(("trials", "probability"), [(1, 0.5), (7, 0.25), (40, 0.3), (3, 1 - 2**-30)])
def test_the_steps_are_the_distribution_function(trials, probability):
    first, high, low = _steps(trials, probability)
    share, reached = Fraction(probability), Fraction(0)
    assert first == 0
    for number, (upper, lower) in enumerate(zip(high.tolist(), low.tolist(), strict=True)):
        reached += math.comb(trials, number) * share**number * (1 - share) ** (trials - number)
        assert abs(Fraction(upper * 2**64 + lower, 2**128) - reached) < Fraction(trials, 2**127)


@pytest.mark.parametrize(("trials", "probability"), [(10, 0.5), (1000, 0.25), (10**7, 0.5)])
def test_many_of_them_are_distributed_so(trials, probability):
    draws = exact_binomials(trials, probability, 20_000, SecretGenerator())
    edges = np.unique(stats.binom.ppf(np.linspace(0.1, 0.9, 9), trials, probability))
    chances = np.diff([0, *stats.binom.cdf(edges, trials, probability), 1])
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(chances))
    assert ((counts - 20_000 * chances) ** 2 / (20_000 * chances)).sum() < 60  # chi-square, 9 degrees: 1e-9


def test_bits_that_end_exactly_at_a_step_are_decided_by_the_lower_half(monkeypatch):
    _, high, low = _steps(7, 0.25)
    for step in range(len(high)):
        for shift in (-1, 0):
            begin, rest = divmod(int(high[step]) * 2**64 + int(low[step]) + shift, 2**112)
            middle, end = divmod(rest, 2**64)
            given = iter([[begin], [middle << 16, end], []])
            monkeypatch.setattr(
                SecretGenerator, "words", lambda self, count, given=given: np.array(next(given)[:count], dtype=np.uint64)
            )
            assert exact_binomials(7, 0.25, 1, SecretGenerator())[0] == step + 1 + shift


@pytest.mark.parametrize(("trials", "probability"), [(7, 0.25), (72_000, 0.5), (4000, 0.003)])
def test_sixteen_bits_decide_exactly_where_no_step_begins_with_them(trials, probability):
    """For every beginning: the number that its least and its greatest continuation mean, by the whole numbers themselves."""
    _, high, low = _steps(trials, probability)
    steps = [upper * 2**64 + lower for upper, lower in zip(high.tolist(), low.tolist(), strict=True)]
    for begin, passed in enumerate(_guide(trials, probability).tolist()):
        least = bisect.bisect_right(steps, begin * 2**112)
        greatest = bisect.bisect_right(steps, (begin + 1) * 2**112 - 1)
        if passed == -1:
            assert greatest > 0
        else:
            assert passed == least == greatest


def test_a_seeded_generator_and_the_operating_system_draw_one_distribution():
    protocol = ShuffleVectorSum(25, 4000, 1.0, epsilon=1.0, delta=1e-5)
    trials = 25 * protocol.noise_bits
    for generator in (torch.Generator().manual_seed(3), SecretGenerator()):
        draws = protocol.draw_noise(25, generator).numpy()
        edges = np.unique(stats.binom.ppf(np.linspace(0.1, 0.9, 9), trials, 0.5))
        chances = np.diff([0, *stats.binom.cdf(edges, trials, 0.5), 1])
        counts = np.bincount(np.searchsorted(edges, draws), minlength=len(chances))
        assert ((counts - 4000 * chances) ** 2 / (4000 * chances)).sum() < 60  # chi-square, 9 degrees: 1e-9


def test_nothing_and_all_are_certain():
    assert exact_binomials(0, 0.5, 3, SecretGenerator()).tolist() == [0, 0, 0]


def test_a_table_of_millions_of_steps_is_refused():
    with pytest.raises(ValueError, match="secure_mode=True draws binomials up to"):
        exact_binomials(10**13, 0.5, 1, SecretGenerator())


def test_a_protocol_draws_all_of_a_sum_from_it():
    protocol = ShuffleVectorSum(25, 4000, 1.0, epsilon=1.0, delta=1e-5)
    found = protocol.simulate(torch.zeros(25, 4000), SecretGenerator(secure=True))
    assert float(found.std()) == pytest.approx(protocol.variance**0.5, rel=0.1)
