"""Audits of the permuted Gaussian against full simulation and the exact ε of pairs."""

from __future__ import annotations

import math
import types

import mpmath
import numpy as np
import pytest
from permuted_audits import (
    audit_permuted_gaussian,
    audit_published_setting,
    largest_coordinates,
    largest_normal,
    summed_coordinates,
)
from scipy import stats

from opacus_shuffle.analysis.permuted_gaussian import pair_epsilon
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, sampled_gaussian_epsilon
from opacus_shuffle.audit import audit_scores


def fixed(values):
    """A source of given exponentials."""
    return types.SimpleNamespace(standard_exponential=lambda size: np.array(values[:size]))


@pytest.mark.parametrize("count", [1, 2, 1000, 85_800_000, 5 * 10**14])
def test_the_largest_normal_is_the_quantile_it_should_be_far_into_the_tail(count):
    exponential = [1e-16, 1e-9, 1e-3, 0.5, 3.0, 30.0]
    largest = largest_normal(count, len(exponential), fixed(exponential))
    with mpmath.workdps(60):
        for z, e in zip(largest, exponential, strict=True):
            # The log of the largest one's distribution function at z must be −e. A relative error η
            # of z changes it by η·|z|·count·φ(z)/Φ(z); scipy's inverse has an error of 1e-13.
            z = mpmath.mpf(float(z))
            slope = abs(z) * count * mpmath.npdf(z) / mpmath.ncdf(z)
            assert abs(count * mpmath.log1p(-mpmath.ncdf(-z)) + e) <= 1e-13 * slope + 1e-15 * e


def test_the_largest_coordinate_is_that_of_vectors_drawn_in_full():
    """The Kolmogorov-Smirnov test of two samples of one distribution fails once in 10⁹."""
    rng, runs, sigma, dimension, steps, rate = np.random.default_rng(2), 100_000, 0.5, 3, 4, 0.3
    vectors = sigma * rng.standard_normal((runs, steps, dimension))
    null = vectors.max(axis=(1, 2)) / sigma
    vectors[..., 0] += rng.random((runs, steps)) < rate
    alternative = vectors.max(axis=(1, 2)) / sigma
    run = {"shift": 1 / sigma, "dimension": dimension, "steps": steps, "sample_rate": rate}
    drawn = largest_coordinates(**run, trials=runs, rng=rng)
    for full, short in zip((null, alternative), drawn, strict=True):
        assert stats.ks_2samp(full, short).pvalue > 1e-9


def test_the_score_is_the_likelihood_ratio_of_the_sum_of_a_permuted_vector():
    """Whole vectors are drawn, permuted and added up."""
    d, sigma, runs, rng = 7, 0.8, 40_000, np.random.default_rng(1)
    gradient = np.r_[0.0, np.full(d - 1, 1 / math.sqrt(d - 1))]
    permuted = rng.permuted(np.tile(gradient, (runs, 1)), axis=1)
    sums = (permuted + sigma * rng.standard_normal((runs, d))).sum(1) / (sigma * math.sqrt(d))
    mean = math.sqrt((d - 1) / d) / sigma
    direct = summed_coordinates(mean=mean, steps=1, sample_rate=1.0, trials=runs, rng=rng)[1]
    assert stats.ks_2samp(mean * sums - mean**2 / 2, direct).pvalue > 1e-6


def largest_of_twenty():
    """The exact ε of a pair, δ, and a function that draws the scores of an audit."""
    step = ShuffledRound(noise_multiplier=0.5, num_users=20, sample_rate=0.5, sampling="poisson")
    _, exact = pair_epsilon([(step, 3)], delta=0.05)
    run = {"shift": 1 / 0.5, "dimension": 20, "steps": 3, "sample_rate": 0.5, "trials": 2000}
    return exact, 0.05, lambda rng: largest_coordinates(**run, rng=rng)


def sum_of_four():
    """The same for the sum of four coordinates, whose ε is at most 0.1 % above the exact one."""
    noise = 2.0 * math.sqrt(4 / 3)
    step = ShuffledRound(noise_multiplier=noise, num_users=1, sample_rate=0.5, sampling="poisson")
    exact = sampled_gaussian_epsilon([(step, 3)], delta=0.02)
    run = {"mean": 1 / noise, "steps": 3, "sample_rate": 0.5, "trials": 2000}
    return exact, 0.02, lambda rng: summed_coordinates(**run, rng=rng)


@pytest.mark.parametrize("pair", [largest_of_twenty, sum_of_four])
def test_audits_exceed_the_exact_epsilon_of_the_pair_no_more_often_than_stated(pair):
    exact, delta, draw = pair()
    rng, audits, confidence = np.random.default_rng(3), 300, 0.5
    errors = sum(
        audit_scores(*draw(rng), delta=delta, confidence=confidence).epsilon > exact
        for _ in range(audits)
    )
    assert errors <= stats.binom.isf(1e-9, audits, 1 - confidence)


@pytest.mark.parametrize(("pair", "least"), [("all_but_one", 5.0), ("oblique", 4.0)])
def test_the_sum_shows_more_than_the_formula_claims(pair, least):
    result = audit_published_setting(target_epsilon=0.5, pair=pair, trials=20_000, seed=1)
    assert [claim.bound for claim in result.claims] == ["published", "certified"]
    assert [claim.bound for claim in result.contradicted] == ["published"]
    # Without errors, 10,000 counted runs would show log(10,000/3.7).
    assert least < result.largest.lower.epsilon <= math.log(10_000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dimension", 1.5),
        ("steps", 0),
        ("sample_rate", 1.1),
        ("batch_clip", 0.0),
        ("trials", 999),
        ("pair", "both"),
        ("pair", "all_but_one"),  # One dimension has no such pair.
    ],
)
def test_arguments_are_checked_by_name(name, value):
    run = {"noise_multiplier": 0.5, "dimension": 1, "delta": 1e-3, "trials": 2000}
    with pytest.raises(ValueError, match=name):
        audit_permuted_gaussian(**{**run, name: value})
