"""The binomial distribution: SciPy's, to the error that every bound allows for."""

import math

import numpy as np
import pytest
from scipy import stats

from opacus_shuffle.analysis import binomial

CHANCES = (0.5, 0.9, 0.1, 3e-4, 1e-9)


@pytest.mark.parametrize("trials", [0, 1, 2, 17, 10_000, 10**9, 2**50])
def test_probabilities_and_tails_are_scipy_s(trials):
    for chance in CHANCES:
        deviation = math.sqrt(trials * chance * (1 - chance))
        places = np.round(trials * chance + deviation * np.linspace(-30, 30, 101))
        numbers = np.unique(np.clip(places, -1, trials + 1))
        for name in ("pmf", "cdf", "sf"):
            expected = getattr(stats.binom, name)(numbers, trials, chance)
            computed = getattr(binomial, name)(numbers, trials, chance)
            error = max(1e-9, 2e-14 * math.sqrt(trials))
            np.testing.assert_allclose(computed, expected, rtol=error, atol=1e-290)


@pytest.mark.parametrize("probability", [0.2, 1e-3, 1e-7, 1e-11, 1e-20])
def test_a_number_outside_the_likely_range_is_as_rare_as_promised(probability):
    for chance in CHANCES:
        trials = np.array([0, 1, 3, 50, 10_000, 10**9])
        low, high = binomial.likely_range(trials, chance, probability)
        assert np.all(stats.binom.cdf(low - 1, trials, chance) <= probability * (1 + 1e-6))
        assert np.all(stats.binom.sf(high, trials, chance) <= probability * (1 + 1e-6))
        fewest = binomial.fewest(trials, chance, probability)
        assert np.all(stats.binom.cdf(fewest, trials, chance) >= probability * (1 - 1e-6))
