"""Who takes part is drawn at the rate that is accounted, to 2⁻⁵³, however small it is; all samples are equally likely."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from opacus_shuffle.core.participation import bernoulli_indices, subset
from opacus_shuffle.core.randomness import SecretGenerator

GENERATORS = [lambda: torch.Generator().manual_seed(0), SecretGenerator, lambda: None]
every_generator = pytest.mark.parametrize(
    "generator", GENERATORS, ids=["seeded", "system", "global"]
)


@pytest.fixture
def fixed_draws(monkeypatch):
    """``torch.rand`` gives what is laid down for each precision."""
    laid = {}
    monkeypatch.setattr(torch, "rand", lambda count, dtype, **_: laid[dtype][:count].to(dtype))
    return laid


@pytest.mark.parametrize("rate", [1e-9, 2.0**-53, 1 / 3, 0.01, 1 / 93, 1 - 2.0**-53])
def test_a_coin_of_a_user_s_own_generator_is_opacus_s_to_53_bits(rate, fixed_draws):
    threshold = math.floor(rate * 2**53)
    for number in (0, max(0, threshold - 1), threshold, min(threshold + 1, 2**53 - 1), 2**53 - 1):
        coarse, fine = divmod(number, 2**29)
        fixed_draws[torch.float32] = torch.tensor([coarse / 2**24])
        fixed_draws[torch.float64] = torch.tensor([fine / 2**29], dtype=torch.float64)
        assert bernoulli_indices(1, rate, torch.Generator()) == (
            [0] if number < threshold else []
        ), number


@pytest.mark.parametrize("rate", [1 / 3, 0.5, 1 / 10, 1 - 2.0**-53])
def test_a_coin_that_often_shows_heads_is_one_of_53_bits(rate, monkeypatch):
    threshold = math.floor(rate * 2**53)
    for number in (0, max(0, threshold - 1), threshold, 2**53 - 1):
        words = np.array([number << 11 | 0x7FF], dtype=np.uint64)
        monkeypatch.setattr(SecretGenerator, "words", lambda self, count, words=words: words)
        assert bernoulli_indices(1, rate, SecretGenerator()) == ([0] if number < threshold else [])


@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_every_sample_of_coins_has_its_own_chance(rate):
    """All 2^5 samples of five coins, of which each kind has the chance rate^k (1 - rate)^(5 - k)."""
    draws, counts = SecretGenerator(), dict.fromkeys(itertools.product((False, True), repeat=5), 0)
    for _ in range(8000):
        shown = bernoulli_indices(5, rate, draws)
        assert shown == sorted(set(shown))
        counts[tuple(place in shown for place in range(5))] += 1
    rest = 0.0, 0
    chi_square, cells = 0.0, 0
    for sample, count in counts.items():
        expected = 8000 * rate ** sum(sample) * (1 - rate) ** (5 - sum(sample))
        if expected < 5:
            rest = rest[0] + expected, rest[1] + count
        else:
            chi_square, cells = chi_square + (count - expected) ** 2 / expected, cells + 1
    chi_square += (rest[1] - rest[0]) ** 2 / rest[0] if rest[0] else 0.0
    assert stats.chi2(cells).sf(chi_square) > 1e-7


def test_a_batch_costs_numbers_in_proportion_to_its_size(monkeypatch):
    drawn, words = [], SecretGenerator.words
    monkeypatch.setattr(
        SecretGenerator, "words", lambda self, count: drawn.append(count) or words(self, count)
    )
    assert 900 < len(bernoulli_indices(10**7, 1e-4, SecretGenerator())) < 1100
    assert sum(drawn) < 2000


@every_generator
def test_rates_of_nothing_and_of_all(generator):
    assert bernoulli_indices(1000, 0.0, generator()) == []
    assert bernoulli_indices(1000, 1.0, generator()) == list(range(1000))


@every_generator
def test_as_many_show_heads_as_should(generator):
    shown = len(bernoulli_indices(400_000, 0.01, generator()))
    assert abs(shown - 4000) < 6 * math.sqrt(4000)


def test_at_a_rate_of_1e_9_nobody_of_a_hundred_million_is_there_sixty_times_too_often():
    draws = torch.Generator().manual_seed(0)
    shown = sum(len(bernoulli_indices(10_000_000, 1e-9, draws)) for _ in range(10))
    assert shown <= 3  # 0.1 are expected; by float32 numbers it were six


@every_generator
def test_samples_hold_no_record_twice_and_all_are_equally_likely(generator):
    draws, counts = generator(), dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(6000):
        counts[tuple(subset(4, 2, draws))] += 1
    # chi-square with 11 degrees of freedom exceeds 50 with probability 1e-6
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 50
    assert sorted(subset(50, 50, draws)) == list(range(50))
