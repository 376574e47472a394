"""Pairs of which the sum of the coordinates tells, which no permutation changes: equal but for one, or at 46 degrees."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, sampled_gaussian_epsilon
from opacus_shuffle.audit import audit_permuted_gaussian, audit_scores
from opacus_shuffle.audit.permuted_gaussian_audit import summed_coordinates

VIT = {"noise_multiplier": 0.27372, "dimension": 85_800_000, "steps": 500, "sample_rate": 0.02, "delta": 5e-6}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_the_score_is_the_likelihood_ratio_of_the_permuted_vector_s_sum():
    # By brute force: draw whole vectors, permute them, add them up; the sum's distribution must be the one that is drawn.
    d, sigma, runs = 7, 0.8, 40_000
    rng = np.random.default_rng(1)
    gradient = np.r_[0.0, np.full(d - 1, 1 / math.sqrt(d - 1))]
    vectors = rng.permuted(np.tile(gradient, (runs, 1)), axis=1) + sigma * rng.standard_normal((runs, d))
    sums = vectors.sum(1) / (sigma * math.sqrt(d))
    mean = math.sqrt((d - 1) / d) / sigma
    assert np.linalg.norm(gradient) == pytest.approx(1)
    direct = summed_coordinates(mean=mean, steps=1, sample_rate=1.0, trials=runs, rng=rng)[1]
    # Kolmogorov and Smirnov's distance of two samples of one distribution exceeds this once in a million.
    limit = math.sqrt(-0.5 * math.log(1e-6 / 2)) * math.sqrt(2 / runs)
    assert stats.ks_2samp(mean * sums - mean**2 / 2, direct).statistic <= limit


@pytest.mark.parametrize(("steps", "rate"), [(1, 1.0), (4, 0.3)])
def test_both_distributions_are_each_other_s_likelihood_ratio(steps, rate):
    null, alternative = summed_coordinates(
        mean=0.7, steps=steps, sample_rate=rate, trials=200_000, rng=np.random.default_rng(2)
    )
    for ratios in (np.exp(null), np.exp(-alternative)):
        assert abs(ratios.mean() - 1) <= 6 * ratios.std() / math.sqrt(len(ratios))
    assert alternative.mean() > null.mean()


def test_the_sum_tells_almost_all_that_unshuffled_dp_sgd_tells():
    # The pair's exact epsilon is DP-SGD's at a sigma larger by 1/2d; the audit must not exceed that; the claim is far below.
    result = audit_permuted_gaussian(**VIT, pair="all_but_one", trials=20_000, generator=seeded(1))
    assert [claim.name for claim in result.claims] == ["published", "certified"]
    assert [claim.name for claim in result.contradicted] == ["published"]
    # 10,000 counted runs of which none errs would show log(10,000/3.7): this test errs in a few.
    assert 5.0 < result.largest.lower <= math.log(10_000)
    assert "0 in one coordinate and the same in all others" in " ".join(str(result).split())


def test_a_gradient_beyond_what_the_paper_s_proof_sets_aside_is_above_its_formula_too():
    result = audit_permuted_gaussian(**VIT, pair="oblique", trials=20_000, generator=seeded(1))
    assert [claim.name for claim in result.contradicted] == ["published"]
    assert result.largest.lower > 4.0
    assert "46 degrees" in " ".join(str(result).split())


def test_audits_exceed_the_exact_epsilon_no_more_often_than_stated():
    dimension, sigma, steps, rate, delta = 4, 2.0, 3, 0.5, 0.02
    noise = sigma * math.sqrt(dimension / (dimension - 1))
    step = ShuffledRound(noise_multiplier=noise, num_users=1, sample_rate=rate, sampling="poisson")
    truth = sampled_gaussian_epsilon([(step, steps)], delta=delta)  # at most 0.1 % above the exact one
    rng = np.random.default_rng(3)
    audits, confidence = 300, 0.5
    distribution = {"mean": 1 / noise, "steps": steps, "sample_rate": rate}
    errors = sum(
        audit_scores(*summed_coordinates(**distribution, trials=2000, rng=rng), delta=delta, confidence=confidence) > truth
        for _ in range(audits)
    )
    assert errors <= stats.binom.isf(1e-9, audits, 1 - confidence)


def test_an_unknown_pair_and_a_single_coordinate_are_refused():
    with pytest.raises(ValueError, match="pair must be one of 'one_coordinate', 'all_but_one', 'oblique', got 'both'"):
        audit_permuted_gaussian(noise_multiplier=1.0, dimension=3, delta=1e-5, pair="both")
    with pytest.raises(ValueError, match="needs a dimension of at least 2"):
        audit_permuted_gaussian(noise_multiplier=1.0, dimension=1, delta=1e-5, pair="all_but_one")
