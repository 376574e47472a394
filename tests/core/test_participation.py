"""Who takes part is drawn at the rate that is accounted, to 2⁻⁵³, however small it is; all samples are equally likely."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from opacus_shuffle.core.participation import heads, subset
from opacus_shuffle.core.system_randomness import SystemGenerator

GENERATORS = [lambda: torch.Generator().manual_seed(0), SystemGenerator, lambda: None]
every_generator = pytest.mark.parametrize("generator", GENERATORS, ids=["seeded", "system", "global"])


@pytest.fixture
def fixed_draws(monkeypatch):
    """``torch.rand`` gives what is laid down for each precision."""
    laid = {}
    monkeypatch.setattr(torch, "rand", lambda count, dtype, **_: laid[dtype][:count].to(dtype))
    return laid


@pytest.mark.parametrize("rate", [1e-9, 2.0**-53, 1 / 3, 0.01, 1 / 93, 1 - 2.0**-53])
def test_a_coin_of_53_bits_decides(rate, fixed_draws):
    threshold = math.floor(rate * 2**53)
    for number in (0, max(0, threshold - 1), threshold, min(threshold + 1, 2**53 - 1), 2**53 - 1):
        coarse, fine = divmod(number, 2**29)
        fixed_draws[torch.float32] = torch.tensor([coarse / 2**24])
        fixed_draws[torch.float64] = torch.tensor([fine / 2**29], dtype=torch.float64)
        assert heads(1, rate, None) == ([0] if number < threshold else []), number


@pytest.mark.parametrize("rate", [1e-9, 2.0**-53, 1 / 3, 1 - 2.0**-53])
def test_a_coin_of_the_system_has_the_same_threshold(rate, monkeypatch):
    threshold = math.floor(rate * 2**53)
    for number in (0, max(0, threshold - 1), threshold, 2**53 - 1):
        words = np.array([number << 11 | 0x7FF], dtype=np.uint64)
        monkeypatch.setattr(SystemGenerator, "words", lambda self, count, words=words: words)
        assert heads(1, rate, SystemGenerator()) == ([0] if number < threshold else [])


@every_generator
def test_rates_of_nothing_and_of_all(generator):
    assert heads(1000, 0.0, generator()) == []
    assert heads(1000, 1.0, generator()) == list(range(1000))


@every_generator
def test_as_many_show_heads_as_should(generator):
    shown = len(heads(400_000, 0.01, generator()))
    assert abs(shown - 4000) < 6 * math.sqrt(4000)


@pytest.mark.slow
def test_at_a_rate_of_1e_9_nobody_of_a_hundred_million_is_there_sixty_times_too_often():
    draws = torch.Generator().manual_seed(0)
    shown = sum(len(heads(10_000_000, 1e-9, draws)) for _ in range(10))
    assert shown <= 3  # 0.1 are expected; by float32 numbers it were six


@every_generator
def test_samples_hold_no_record_twice_and_all_are_equally_likely(generator):
    draws, counts = generator(), dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(6000):
        counts[tuple(subset(4, 2, draws))] += 1
    # chi-square with 11 degrees of freedom exceeds 50 with probability 1e-6
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 50
    assert sorted(subset(50, 50, draws)) == list(range(50))
