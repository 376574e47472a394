"""The mechanisms' audits against full simulation, closed distributions, and pairs' exact ε.

A count out of N independent runs lies within Bin(N, p)'s 1e-9 quantiles, p being the exact
probability (seeds are fixed).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types

import mpmath
import numpy as np
import pytest
import torch
from helpers.report_ratios import RATIOS
from scipy import stats
from scipy.special import logsumexp

from opacus_shuffle.analysis.permuted_gaussian import pair_epsilon as permuted_pair
from opacus_shuffle.analysis.secret_checkin import SecretRound, zero_out_epsilon
from opacus_shuffle.analysis.shuffled_rounds import (
    ShuffledRound,
    pair_epsilon,
    sampled_gaussian_epsilon,
)
from opacus_shuffle.audit import (
    audit_gaussian,
    audit_permuted_gaussian,
    audit_scores,
    audit_secret_checkin,
    audit_shuffle_gauss,
    mechanism_audits,
)
from opacus_shuffle.audit.mechanism_audits import (
    draw_reports,
    largest_coordinates,
    largest_normal,
    likelihood_ratios,
    log_sum_ratio,
    summed_coordinates,
)

VIT = {
    "noise_multiplier": 0.27372,
    "dimension": 85_800_000,
    "steps": 500,
    "sample_rate": 0.02,
    "delta": 5e-6,
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def assert_counted(count, runs, probability):
    low, high = stats.binom.ppf(1e-9, runs, probability), stats.binom.isf(1e-9, runs, probability)
    assert low <= count <= high, (count, low, high)


def epsilon_of(result, name):
    return next(claim.epsilon for claim in result.claims if claim.name == name)


# the largest of many normals


def fixed(values):
    """A source of randomness that is none."""
    return types.SimpleNamespace(standard_exponential=lambda size: np.array(values[:size]))


@pytest.mark.parametrize("count", [1, 2, 1000, 85_800_000, 10**12, 5 * 10**14])
def test_the_largest_normal_is_the_quantile_it_should_be_far_into_the_tail(count):
    exponential = [1e-16, 1e-9, 1e-3, 0.5, 3.0, 30.0]
    largest = largest_normal(count, len(exponential), fixed(exponential))
    with mpmath.workdps(60):
        for z, e in zip(largest, exponential, strict=True):
            # The logarithm of the largest one's distribution function at z must be −e. A relative
            # error η of z moves it by η·|z|·count·φ(z)/Φ(z): scipy's inverse is taken to have 1e-13
            # of it.
            z = mpmath.mpf(float(z))
            slope = abs(z) * count * mpmath.npdf(z) / mpmath.ncdf(z)
            assert abs(count * mpmath.log1p(-mpmath.ncdf(-z)) + e) <= 1e-13 * slope + 1e-15 * e


# the Gaussian mechanism


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_a_gaussian_step_is_found_within_three_tenths_by_both_methods(sigma):
    result = audit_gaussian(noise_multiplier=sigma, delta=1e-5, generator=seeded(1))
    truth = epsilon_of(result, "certified")
    counts, gdp = (finding.lower for finding in result.findings)
    assert (counts.method, gdp.method) == ("clopper_pearson", "gdp")
    assert 0.7 * truth <= counts.epsilon <= truth
    assert 0.97 * truth <= gdp.epsilon <= truth
    assert result.contradicted == ()


def test_few_trials_are_said_to_be_too_few_for_a_large_epsilon():
    result = audit_gaussian(noise_multiplier=0.1, delta=1e-5, trials=1000, generator=seeded(1))
    assert "Counts alone, from 500 runs, cannot show an epsilon above 4.9" in str(result)
    assert result.findings[0].lower.epsilon <= math.log(500 / 3.68)


# permuted Gaussian


def test_the_largest_coordinate_is_that_of_vectors_drawn_in_full():
    """From the mechanism's words: d coordinates of noise a step, and the record's in one of them.

    Kolmogorov and Smirnov's distance of two samples of one distribution refuses once in 10⁹.
    """
    rng, runs, sigma, dimension, steps, rate = np.random.default_rng(2), 100_000, 0.5, 3, 4, 0.3
    vectors = sigma * rng.standard_normal((runs, steps, dimension))
    null = vectors.max(axis=(1, 2)) / sigma
    vectors[..., 0] += rng.random((runs, steps)) < rate
    alternative = vectors.max(axis=(1, 2)) / sigma
    run = {"shift": 1 / sigma, "dimension": dimension, "steps": steps, "sample_rate": rate}
    drawn = largest_coordinates(**run, trials=runs, rng=rng)
    for full, short in zip((null, alternative), drawn, strict=True):
        assert stats.ks_2samp(full, short).pvalue > 1e-9


# WS Table VI.
@pytest.mark.zoo
def test_the_papers_vit_run_has_more_than_its_formula_says():
    result = audit_permuted_gaussian(**VIT, generator=seeded(1))
    assert result.largest.lower.epsilon > 0.5
    assert [claim.name for claim in result.contradicted] == ["published"]
    assert [claim.name for claim in result.claims] == ["published", "pair", "certified"]
    assert result.largest.lower.epsilon <= epsilon_of(result, "pair")
    assert "could not contradict certified" in " ".join(str(result).split())


def largest_of_twenty():
    """The exact ε of a pair, and how the scores of an audit of it are drawn."""
    step = ShuffledRound(noise_multiplier=0.5, num_users=20, sample_rate=0.5, sampling="poisson")
    _, truth = permuted_pair([(step, 3)], delta=0.05)
    distribution = {"shift": 1 / 0.5, "dimension": 20, "steps": 3, "sample_rate": 0.5}
    return truth, 0.05, lambda rng: largest_coordinates(**distribution, trials=2000, rng=rng)


def sum_of_four():
    """The same of the sum of four coordinates, which is DP-SGD with a larger σ.

    Its ε is at most 0.1 % above the exact one.
    """
    noise = 2.0 * math.sqrt(4 / 3)
    step = ShuffledRound(noise_multiplier=noise, num_users=1, sample_rate=0.5, sampling="poisson")
    truth = sampled_gaussian_epsilon([(step, 3)], delta=0.02)
    return (
        truth,
        0.02,
        lambda rng: summed_coordinates(
            mean=1 / noise, steps=3, sample_rate=0.5, trials=2000, rng=rng
        ),
    )


@pytest.mark.parametrize("pair", [largest_of_twenty, sum_of_four])
def test_audits_exceed_the_exact_epsilon_of_the_pair_no_more_often_than_stated(pair):
    truth, delta, draw = pair()
    rng, audits, confidence = np.random.default_rng(3), 300, 0.5
    errors = sum(
        audit_scores(*draw(rng), delta=delta, confidence=confidence).epsilon > truth
        for _ in range(audits)
    )
    assert errors <= stats.binom.isf(1e-9, audits, 1 - confidence)


def test_a_smaller_batch_clip_is_a_smaller_record():
    small = {"noise_multiplier": 0.25, "dimension": 1000, "delta": 1e-3, "trials": 20_000}

    def found(**changed):
        return audit_permuted_gaussian(
            **{**small, **changed}, generator=seeded(1)
        ).largest.lower.epsilon

    assert found(batch_clip=0.5) == found(noise_multiplier=0.5) > 0
    # A larger one leaves the record as it is.
    assert found(batch_clip=1.0) == found(batch_clip=2.0) > found(batch_clip=0.5)


# sums of coordinates


def test_the_score_is_the_likelihood_ratio_of_the_permuted_vector_s_sum():
    # By brute force: draw whole vectors, permute them, add them up; the sum's distribution must be
    # the one that is drawn.
    d, sigma, runs = 7, 0.8, 40_000
    rng = np.random.default_rng(1)
    gradient = np.r_[0.0, np.full(d - 1, 1 / math.sqrt(d - 1))]
    vectors = rng.permuted(np.tile(gradient, (runs, 1)), axis=1) + sigma * rng.standard_normal(
        (runs, d)
    )
    sums = vectors.sum(1) / (sigma * math.sqrt(d))
    mean = math.sqrt((d - 1) / d) / sigma
    assert np.linalg.norm(gradient) == pytest.approx(1)
    direct = summed_coordinates(mean=mean, steps=1, sample_rate=1.0, trials=runs, rng=rng)[1]
    # Kolmogorov and Smirnov's distance of two samples of one distribution exceeds this once in a
    # million.
    limit = math.sqrt(-0.5 * math.log(1e-6 / 2)) * math.sqrt(2 / runs)
    assert stats.ks_2samp(mean * sums - mean**2 / 2, direct).statistic <= limit


@pytest.mark.parametrize(
    ("pair", "least", "words"),
    [
        ("all_but_one", 5.0, "0 in one coordinate and the same in all others"),
        ("oblique", 4.0, "46 degrees"),
    ],
)
def test_the_sum_tells_almost_all_that_unshuffled_dp_sgd_tells_and_the_formula_is_below_it(
    pair, least, words
):
    # The pair's exact epsilon is DP-SGD's at a larger sigma; the audit must not exceed that; the
    # claim is far below.
    result = audit_permuted_gaussian(**VIT, pair=pair, trials=20_000, generator=seeded(1))
    assert [claim.name for claim in result.claims] == ["published", "certified"]
    assert [claim.name for claim in result.contradicted] == ["published"]
    # 10,000 counted runs of which none errs would show log(10,000/3.7): this test errs in a few.
    assert least < result.largest.lower.epsilon <= math.log(10_000)
    assert words in " ".join(str(result).split())


# shuffle Gaussian, where all take part, and secret check-in

SHAPES = [("gaussian", 1.0), ("gaussian", 0.6), ("linear", 0.6), ("step", 0.6)]
every_shape = pytest.mark.parametrize(("report", "rate"), SHAPES)


def round_of(report, rate, sigma, users):
    return SecretRound(noise_multiplier=sigma, num_users=users, sample_rate=rate, report=report)


def of_reports(shape, present, absent, steps, *, others=0.0, sigma=1.0, users=5):
    """Draws scores of user 1's two values, once it is told how many and by which generator."""
    pair = {"present": present, "absent": absent, "others": others, "steps": steps}
    return functools.partial(likelihood_ratios, round_of(*shape, sigma, users), **pair)


@every_shape
@pytest.mark.parametrize(
    ("v", "a1", "a0"), [(0.0, 1.0, 0.0), (-1.0, 1.0, 0.0), (-1.0, 1.0, -1.0), (0.3, -0.5, 0.5)]
)
@pytest.mark.parametrize("sigma", [0.05, 0.7, 5.0])
def test_the_statistic_is_the_likelihood_ratio_of_the_unordered_reports(
    report, rate, v, a1, a0, sigma
):
    sigma = sigma if report == "gaussian" else max(sigma, 0.2)
    kind, ratio = round_of(report, rate, sigma, 4), RATIOS[report](sigma)
    reports = v / sigma + np.random.default_rng(1).standard_normal((20, 4))

    def log_density(value):
        return np.log(1 - rate + rate * ratio(reports, value)) + stats.norm.logpdf(reports)

    # By the definition: a mean over which of the reports is user 1's.
    theirs = log_density(v)
    first, second = (
        logsumexp([theirs.sum(1) + own[:, user] - theirs[:, user] for user in range(4)], axis=0)
        for own in (log_density(a1), log_density(a0))
    )
    ratios = log_sum_ratio(kind, reports, a1, v) - log_sum_ratio(kind, reports, a0, v)
    np.testing.assert_allclose(ratios, first - second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rate", [1e-300, 0.5, 1 - 1e-16])
@pytest.mark.parametrize(
    ("report", "sigma"),
    [("gaussian", 1e-6), ("gaussian", 1e12), ("linear", 0.2), ("step", 0.2), ("linear", 1e12)],
)
def test_no_score_is_lost_with_extreme_noise_or_rates(report, sigma, rate):
    draw = of_reports((report, rate), 1.0, -1.0, steps=2, others=-1.0, sigma=sigma)
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        assert np.isfinite(draw(trials=1000, rng=np.random.default_rng(1))).all()


@every_shape
@pytest.mark.parametrize(
    ("users", "absent", "others"), [(1, 0.0, 0.0), (1, -1.0, 0.0), (2, 0.0, -1.0), (2, -1.0, 0.4)]
)
def test_scores_of_one_and_two_users_have_the_hockey_sticks_that_sums_over_cells_have(
    report, rate, users, absent, others
):
    """Each is a mean over 60,000 runs, within six standard errors.

    Reports seen in cells tell next to all: what is lost falls with the square of their width.
    """
    ratio, cells = RATIOS[report](0.7), np.array([-np.inf, *np.arange(-6.0, 8.0, 0.01), np.inf])

    def unordered(value):
        """Probabilities of both users' cells, whoever is in which, or of user 1's alone."""
        first, second = (
            (1 - rate) * ratio.masses(cells, 0.0) + rate * ratio.masses(cells, held)
            for held in (value, others)
        )
        ordered = first if users == 1 else np.outer(first, second)
        return (ordered + ordered.T) / 2

    draw = of_reports((report, rate), 1.0, absent, 1, others=others, sigma=0.7, users=users)
    null, alternative = draw(trials=60_000, rng=np.random.default_rng(1))
    here, there = unordered(1.0), unordered(absent)
    for p, q, losses in ((here, there, alternative), (there, here, -null)):
        drawn = np.maximum(1 - 1.5 * np.exp(-losses), 0)
        error = drawn.mean() - np.maximum(p - 1.5 * q, 0).sum()
        assert abs(error) <= 6 * drawn.std() / math.sqrt(60_000)


@pytest.mark.parametrize(
    "draw",
    [
        *(
            of_reports(SHAPES[0], *pair, steps)
            for pair in [(1.0, 0.0), (0.6, 0.3), (0.5, -0.5)]
            for steps in (1, 3)
        ),
        *(of_reports(shape, 0.5, -0.5, 3) for shape in SHAPES[1:]),
        functools.partial(summed_coordinates, mean=0.7, steps=1, sample_rate=1.0),
        functools.partial(summed_coordinates, mean=0.7, steps=4, sample_rate=0.3),
    ],
)
def test_the_scores_are_log_likelihood_ratios_of_the_runs(draw):
    # For any two distributions E₀ R = 1 and E₁ 1/R = 1. With the others between, R has moments
    # enough for a standard error.
    null, alternative = draw(trials=50_000, rng=np.random.default_rng(2))
    for ratios in (np.exp(null), np.exp(-alternative)):
        assert abs(ratios.mean() - 1) <= 6 * ratios.std() / math.sqrt(len(ratios))
    assert alternative.mean() > 0 > null.mean()


@pytest.mark.parametrize(
    ("run", "claims", "contradicted", "held"),
    [
        (
            {"noise_multiplier": 1.0, "num_users": 100, "delta": 1e-3, "trials": 100_000},
            ["published", "pair", "certified"],
            True,
            "1 or 0",
        ),
        (
            {"noise_multiplier": 2.0, "num_users": 50, "delta": 1e-2, "adjacency": "replace"},
            ["certified"],
            False,
            "1 or -1",
        ),
    ],
)
def test_others_at_the_edge_show_more_than_the_papers_pair_has_and_no_more_than_the_certificate(
    run, claims, contradicted, held
):
    result = audit_shuffle_gauss(**{"trials": 20_000, **run}, others=-1.0, generator=seeded(1))
    assert [claim.name for claim in result.claims] == claims
    assert ("pair" in [claim.name for claim in result.contradicted]) is contradicted
    assert result.largest.lower.epsilon < epsilon_of(result, "certified")
    assert f"Audited: all other users hold -1, and one user holds {held}." in str(result)


@pytest.mark.parametrize(
    ("sigma", "users", "steps", "delta"), [(0.5, 20, 1, 0.01), (1.0, 10, 3, 0.01)]
)
def test_the_papers_pair_is_not_contradicted_and_nearly_reached(sigma, users, steps, delta):
    result = audit_shuffle_gauss(
        noise_multiplier=sigma,
        num_users=users,
        steps=steps,
        delta=delta,
        trials=200_000,
        generator=seeded(2),
    )
    lower, upper = pair_epsilon(
        [(ShuffledRound(noise_multiplier=sigma, num_users=users), steps)], delta=delta
    )
    assert result.largest.lower.epsilon <= upper
    # The exact test shows the exact ε; counts of 1e5 runs know rates of some per cent to some per
    # cent.
    assert result.largest.lower.epsilon >= 0.8 * lower
    assert result.contradicted == ()


@pytest.mark.parametrize("report", RATIOS)
@pytest.mark.parametrize(("adjacency", "absent"), [("zero_out", 0), ("replace", -1)])
def test_secret_check_in_is_found_at_two_thirds_of_its_certificate_and_never_above(
    report, adjacency, absent
):
    audit = functools.partial(
        audit_secret_checkin,
        noise_multiplier=0.7,
        num_users=2,
        sample_rate=0.8,
        delta=0.02,
        report=report,
        adjacency=adjacency,
        trials=30_000,
    )
    opposite, zero, alike = (audit(others=others, generator=seeded(1)) for others in (-1, 0, 1))
    found = [result.largest.lower.epsilon for result in (opposite, zero, alike)]
    assert 2 / 3 <= max(found) / epsilon_of(opposite, "certified") <= 1
    assert f"all other users hold -1, and one user holds 1 or {absent}." in str(opposite)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("report", "sigma", "trials"), [("gaussian", 0.75, 40_000), ("linear", 0.5, 8000)]
)
def test_among_two_hundred_users_the_truth_is_85_percent_of_the_certificate_or_more(
    report, sigma, trials
):
    """The setting of page 12, others at −1: a hockey stick is above δ by three standard errors."""
    _, epsilon = zero_out_epsilon([(round_of(report, 0.75, sigma, 200), 1)], delta=1e-3)
    draw = of_reports((report, 0.75), 1.0, 0.0, 1, others=-1.0, sigma=sigma, users=200)
    null, alternative = draw(trials=trials, rng=np.random.default_rng(1))
    sticks = [np.maximum(1 - np.exp(0.85 * epsilon + x), 0) for x in (null, -alternative)]
    assert max(stick.mean() - 3 * stick.std() / math.sqrt(trials) for stick in sticks) > 1e-3


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        *((report, {"sample_rate": 1.0}) for report in RATIOS),
        # Whatever the noise, a step's test asks only on which side of the threshold a report is.
        *((report, {"noise_multiplier": 0.4}) for report in ("gaussian", "linear")),
    ],
)
def test_a_mechanism_that_tosses_no_coins_or_adds_less_noise_contradicts_its_claim(
    report, fault, monkeypatch
):
    audit = functools.partial(
        audit_secret_checkin,
        noise_multiplier=0.8,
        num_users=3,
        sample_rate=0.3,
        delta=0.02,
        report=report,
        trials=20_000,
    )
    assert audit(generator=seeded(1)).contradicted == ()

    def faulty(kind, *rest):
        return draw_reports(dataclasses.replace(kind, **fault), *rest)

    monkeypatch.setattr(mechanism_audits, "draw_reports", faulty)
    assert [claim.name for claim in audit(generator=seeded(1)).contradicted] == ["certified"]


# all of them

AUDITS = {
    audit_gaussian: {"noise_multiplier": 1.0, "delta": 1e-3, "trials": 2000},
    audit_permuted_gaussian: {
        "noise_multiplier": 0.5,
        "dimension": 100,
        "delta": 1e-3,
        "trials": 2000,
    },
    audit_shuffle_gauss: {"noise_multiplier": 1.0, "num_users": 10, "delta": 1e-3, "trials": 2000},
    audit_secret_checkin: {
        "noise_multiplier": 1.0,
        "num_users": 10,
        "sample_rate": 0.5,
        "delta": 1e-3,
        "trials": 2000,
    },
}
all_audits = pytest.mark.parametrize("audit", AUDITS, ids=lambda audit: audit.__name__)


@all_audits
def test_the_generator_decides_and_without_one_chance_does(audit):
    once, again, other = (
        audit(**AUDITS[audit], generator=seeded(seed)).findings for seed in (1, 1, 2)
    )
    assert once == again != other
    first, second = (audit(**AUDITS[audit], confidence=0.5).findings for _ in range(2))
    assert first != second  # counts of 1000 runs, which two secret generators hardly ever share
    assert first[0].lower.confidence == 0.5
    assert first[0].lower.trials == (1000, 1000)


@pytest.mark.parametrize(
    ("audit", "name", "value"),
    [
        *((audit, "noise_multiplier", value) for audit in AUDITS for value in (0.0, math.nan)),
        *((audit, "delta", value) for audit in AUDITS for value in (0.0, 1)),
        *((audit, "trials", value) for audit in AUDITS for value in (999, 2000.5)),
        *((audit, "confidence", value) for audit in AUDITS for value in (0, 95)),
        *((audit, "generator", 7) for audit in AUDITS),
        (audit_permuted_gaussian, "dimension", 0),
        (audit_permuted_gaussian, "dimension", 1.5),
        (audit_permuted_gaussian, "steps", 0),
        (audit_permuted_gaussian, "sample_rate", 0.0),
        (audit_permuted_gaussian, "sample_rate", 1.1),
        (audit_permuted_gaussian, "batch_clip", 0.0),
        (audit_shuffle_gauss, "num_users", 0),
        (audit_shuffle_gauss, "num_users", 10_000_001),
        (audit_shuffle_gauss, "steps", 0),
        (audit_shuffle_gauss, "others", 1.1),
        (audit_shuffle_gauss, "adjacency", "add_remove"),
        (audit_secret_checkin, "sample_rate", 0.0),
        (audit_secret_checkin, "sample_rate", 1.0),
        (audit_secret_checkin, "report", "laplace"),
        (audit_secret_checkin, "noise_multiplier", 0.1),  # too little for linear reports
        (audit_secret_checkin, "num_users", 10_000_001),
        (audit_secret_checkin, "others", -1.1),
        (audit_secret_checkin, "steps", 0),
        (audit_permuted_gaussian, "pair", "both"),
        (audit_permuted_gaussian, "pair", "all_but_one"),
    ],
)
def test_what_an_audit_takes_is_checked_by_name(audit, name, value):
    alone = {"dimension": 1} if value == "all_but_one" else {}  # which has no other pair
    with pytest.raises(ValueError, match=name):
        audit(**{**AUDITS[audit], **alone, name: value})
