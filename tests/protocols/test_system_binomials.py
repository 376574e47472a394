"""Binomial numbers of the operating system's bytes have the binomial's chances, to 2⁻¹²⁸."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from opacus_shuffle.core.system_randomness import SystemGenerator
from opacus_shuffle.protocols.system_binomials import _steps, system_binomials
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
    draws = system_binomials(trials, probability, 20_000, SystemGenerator())
    edges = np.unique(stats.binom.ppf(np.linspace(0.1, 0.9, 9), trials, probability))
    chances = np.diff([0, *stats.binom.cdf(edges, trials, probability), 1])
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(chances))
    assert ((counts - 20_000 * chances) ** 2 / (20_000 * chances)).sum() < 60  # chi-square, 9 degrees: 1e-9


def test_bits_that_end_exactly_at_a_step_are_decided_by_the_lower_half(monkeypatch):
    _, high, low = _steps(7, 0.25)
    for step in range(len(high)):
        for shift in (-1, 0):
            words = np.array(divmod(int(high[step]) * 2**64 + int(low[step]) + shift, 2**64), dtype=np.uint64)
            monkeypatch.setattr(SystemGenerator, "words", lambda self, count, words=words: words)
            assert system_binomials(7, 0.25, 1, SystemGenerator())[0] == step + 1 + shift


def test_nothing_and_all_are_certain():
    assert system_binomials(0, 0.5, 3, SystemGenerator()).tolist() == [0, 0, 0]


def test_a_table_of_millions_of_steps_is_refused():
    with pytest.raises(ValueError, match="secure_mode=True draws binomials up to"):
        system_binomials(10**13, 0.5, 1, SystemGenerator())


def test_a_protocol_draws_all_of_a_sum_from_it():
    protocol = ShuffleVectorSum(25, 4000, 1.0, epsilon=1.0, delta=1e-5)
    found = protocol.simulate(torch.zeros(25, 4000), SystemGenerator())
    assert float(found.std()) == pytest.approx(protocol.variance**0.5, rel=0.1)
