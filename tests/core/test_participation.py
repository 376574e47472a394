"""Who takes part is drawn at the accounted rate to 2⁻⁵³; all samples are equally likely."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from opacus_shuffle.core.participation import bernoulli_indices, subset
from opacus_shuffle.core.randomness import SecretGenerator

every_generator = pytest.mark.parametrize(
    "generator",
    [torch.Generator().manual_seed(0), SecretGenerator(), None],
    ids=["seeded", "secret", "default"],
)


@pytest.mark.parametrize("rate", [1 / 3, 0.5, 1 / 10, 1 - 2.0**-53])
def test_a_coin_that_often_shows_heads_is_one_of_53_bits(rate, monkeypatch):
    threshold = math.floor(rate * 2**53)
    for number in (0, max(0, threshold - 1), threshold, 2**53 - 1):
        words = np.array([number << 11 | 0x7FF], dtype=np.uint64)
        monkeypatch.setattr(SecretGenerator, "words", lambda self, count, words=words: words)
        assert bernoulli_indices(1, rate, SecretGenerator()) == ([0] if number < threshold else [])


@pytest.mark.parametrize("rate", [1e-9, 2.0**-53, 1 / 3, 1 - 2.0**-53])
def test_a_coin_of_a_user_s_own_generator_is_opacus_s_to_53_bits(rate, monkeypatch):
    threshold = math.floor(rate * 2**53)
    for number in (0, max(0, threshold - 1), threshold, min(threshold + 1, 2**53 - 1), 2**53 - 1):
        coarse, fine = divmod(number, 2**29)
        bits = {torch.float32: coarse / 2**24, torch.float64: fine / 2**29}
        monkeypatch.setattr(
            torch,
            "rand",
            lambda count, dtype, bits=bits, **_: torch.full((count,), bits[dtype], dtype=dtype),
        )
        heads = bernoulli_indices(1, rate, torch.Generator())
        assert heads == ([0] if number < threshold else []), number


@pytest.mark.parametrize("rate", [pytest.param(0.05, marks=pytest.mark.zoo), 0.4])
def test_every_sample_of_coins_has_its_own_chance(rate):
    """All 2^5 samples of five coins, each of which has the chance rate^k (1 - rate)^(5 - k)."""
    samples = {kind: 0 for size in range(6) for kind in itertools.combinations(range(5), size)}
    draws = SecretGenerator()
    for _ in range(8000):
        samples[tuple(bernoulli_indices(5, rate, draws))] += 1
    expected = [8000 * rate ** len(kind) * (1 - rate) ** (5 - len(kind)) for kind in samples]
    assert_of_chances(list(samples.values()), expected)


def assert_of_chances(counts, expected):
    """χ², those expected fewer than five times together; a right one fails one time in 10⁷."""
    counts, expected = np.array(counts, dtype=float), np.array(expected)
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum() or 1e-9)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert stats.chi2(often.sum()).sf(statistic) > 1e-7


@every_generator
def test_as_many_show_heads_as_should(generator):
    assert bernoulli_indices(1000, 0.0, generator) == []
    assert bernoulli_indices(1000, 1.0, generator) == list(range(1000))
    shown = len(bernoulli_indices(400_000, 0.01, generator))
    assert abs(shown - 4000) < 6 * math.sqrt(4000)


@every_generator
def test_samples_hold_no_record_twice_and_all_are_equally_likely(generator):
    counts = dict.fromkeys(itertools.permutations(range(5), 2), 0)
    for _ in range(2000):
        counts[tuple(subset(5, 2, generator))] += 1
    assert_of_chances(list(counts.values()), [100] * 20)
    assert sorted(subset(50, 50, generator)) == list(range(50))
