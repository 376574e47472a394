"""The audits of mechanisms against closed distributions, and against the exact ε of pairs."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from helpers.report_ratios import RATIOS
from scipy import stats
from scipy.special import logsumexp

from opacus_shuffle.analysis.secret_checkin import SecretRound, zero_out_epsilon
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, pair_epsilon
from opacus_shuffle.audit import (
    audit_gaussian,
    audit_secret_checkin,
    audit_shuffle_gauss,
    mechanism_audits,
)
from opacus_shuffle.audit.mechanism_audits import (
    draw_reports,
    likelihood_ratios,
    log_sum_ratio,
)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def text_of(result):
    return " ".join(str(result).split())


def epsilon_of(result, name):
    return next(claim.epsilon for claim in result.claims if claim.bound == name)


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


def test_a_note_says_that_few_trials_cannot_show_a_large_epsilon():
    result = audit_gaussian(noise_multiplier=0.1, delta=1e-5, trials=1000, generator=seeded(1))
    assert "Counts from 500 runs cannot show an epsilon above 4.9" in str(result)
    assert result.findings[0].lower.epsilon <= math.log(500 / 3.68)


# the shuffle Gaussian and secret check-in

SHAPES = [("gaussian", 1.0), ("gaussian", 0.6), ("linear", 0.6), ("step", 0.6)]
every_shape = pytest.mark.parametrize(("report", "rate"), SHAPES)


def round_of(report, rate, sigma, users):
    return SecretRound(noise_multiplier=sigma, num_users=users, sample_rate=rate, report=report)


def of_reports(shape, present, absent, steps, *, others=0.0, sigma=1.0, users=5):
    """Returns a function that draws the scores of both values of user 1."""
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
    rounds, ratio = round_of(report, rate, sigma, 4), RATIOS[report](sigma)
    reports = v / sigma + np.random.default_rng(1).standard_normal((20, 4))

    def log_density(value):
        return np.log(1 - rate + rate * ratio(reports, value)) + stats.norm.logpdf(reports)

    # By the definition: a mean over which of the reports is user 1's.
    theirs = log_density(v)
    first, second = (
        logsumexp([theirs.sum(1) + own[:, user] - theirs[:, user] for user in range(4)], axis=0)
        for own in (log_density(a1), log_density(a0))
    )
    ratios = log_sum_ratio(rounds, reports, a1, v) - log_sum_ratio(rounds, reports, a0, v)
    np.testing.assert_allclose(ratios, first - second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rate", [1e-300, 0.5, 1 - 1e-16])
@pytest.mark.parametrize(
    ("report", "sigma"),
    [("gaussian", 1e-6), ("gaussian", 1e12), ("linear", 0.2), ("step", 0.2), ("linear", 1e12)],
)
def test_scores_are_finite_with_extreme_noise_or_rates(report, sigma, rate):
    draw = of_reports((report, rate), 1.0, -1.0, steps=2, others=-1.0, sigma=sigma)
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        assert np.isfinite(draw(trials=1000, rng=np.random.default_rng(1))).all()


@every_shape
@pytest.mark.parametrize(
    ("users", "absent", "others"), [(1, 0.0, 0.0), (1, -1.0, 0.0), (2, 0.0, -1.0), (2, -1.0, 0.4)]
)
def test_scores_of_one_and_two_users_have_the_hockey_sticks_of_discretised_reports(
    report, rate, users, absent, others
):
    """Each is a mean over 30,000 runs, within six standard errors.

    Discretising the reports loses an amount that decreases with the square of the cell width.
    """
    ratio, cells = RATIOS[report](0.7), np.array([-np.inf, *np.arange(-6.0, 8.0, 0.01), np.inf])

    def unordered(value):
        """Returns the probabilities of the unordered cells of both users, or of user 1's cell."""
        first, second = (
            (1 - rate) * ratio.masses(cells, 0.0) + rate * ratio.masses(cells, held)
            for held in (value, others)
        )
        ordered = first if users == 1 else np.outer(first, second)
        return (ordered + ordered.T) / 2

    draw = of_reports((report, rate), 1.0, absent, 1, others=others, sigma=0.7, users=users)
    null, alternative = draw(trials=30_000, rng=np.random.default_rng(1))
    here, there = unordered(1.0), unordered(absent)
    for p, q, losses in ((here, there, alternative), (there, here, -null)):
        drawn = np.maximum(1 - 1.5 * np.exp(-losses), 0)
        error = drawn.mean() - np.maximum(p - 1.5 * q, 0).sum()
        assert abs(error) <= 6 * drawn.std() / math.sqrt(30_000)


@pytest.mark.parametrize(
    "draw",
    [
        *(
            of_reports(SHAPES[0], *pair, steps)
            for pair in [(1.0, 0.0), (0.6, 0.3), (0.5, -0.5)]
            for steps in (1, 3)
        ),
        *(of_reports(shape, 0.5, -0.5, 3) for shape in SHAPES[1:]),
    ],
)
def test_the_scores_are_log_likelihood_ratios_of_the_runs(draw):
    # For any two distributions E₀ R = 1 and E₁ 1/R = 1. With the others between, R has moments
    # enough for a standard error.
    null, alternative = draw(trials=20_000, rng=np.random.default_rng(2))
    for ratios in (np.exp(null), np.exp(-alternative)):
        assert abs(ratios.mean() - 1) <= 6 * ratios.std() / math.sqrt(len(ratios))
    assert alternative.mean() > 0 > null.mean()


@pytest.mark.parametrize(
    ("run", "claims", "contradicted", "held"),
    [
        (
            {"noise_multiplier": 1.0, "num_users": 100, "delta": 1e-3, "trials": 50_000},
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
def test_others_at_the_edge_exceed_the_papers_pair_but_not_the_certified_bound(
    run, claims, contradicted, held
):
    result = audit_shuffle_gauss(**{"trials": 20_000, **run}, others=-1.0, generator=seeded(1))
    assert [claim.bound for claim in result.claims] == claims
    assert ("pair" in [claim.bound for claim in result.contradicted]) is contradicted
    assert result.largest.lower.epsilon < epsilon_of(result, "certified")
    assert f"all other users have the value -1, and one user has {held}." in text_of(result)


@pytest.mark.parametrize(
    ("sigma", "users", "steps", "delta"),
    [pytest.param(0.5, 20, 1, 0.01, marks=pytest.mark.zoo), (1.0, 10, 3, 0.01)],
)
def test_the_papers_pair_is_not_contradicted_and_nearly_reached(sigma, users, steps, delta):
    result = audit_shuffle_gauss(
        noise_multiplier=sigma,
        num_users=users,
        steps=steps,
        delta=delta,
        trials=100_000,
        generator=seeded(2),
    )
    lower, upper = pair_epsilon(
        [(ShuffledRound(noise_multiplier=sigma, num_users=users), steps)], delta=delta
    )
    assert result.largest.lower.epsilon <= upper
    # The exact test shows the exact ε; counts of 5e4 runs know rates of some per cent to some per
    # cent.
    assert result.largest.lower.epsilon >= 0.8 * lower
    assert result.contradicted == ()


@pytest.mark.parametrize("report", RATIOS)
@pytest.mark.parametrize(("adjacency", "absent"), [("zero_out", 0), ("replace", -1)])
def test_secret_check_in_is_audited_at_two_thirds_of_its_certified_bound_or_more(
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
    assert f"all other users have the value -1, and one user has 1 or {absent}." in text_of(
        opposite
    )


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("report", "sigma", "trials"), [("gaussian", 0.75, 40_000), ("linear", 0.5, 8000)]
)
def test_with_two_hundred_users_epsilon_is_at_least_85_percent_of_the_certified_bound(
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
        # The test of a step report only depends on the side of the threshold, for any noise.
        *((report, {"noise_multiplier": 0.4}) for report in ("gaussian", "linear")),
    ],
)
def test_a_mechanism_without_coins_or_with_less_noise_contradicts_its_claim(
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

    def faulty(rounds, *rest):
        return draw_reports(dataclasses.replace(rounds, **fault), *rest)

    monkeypatch.setattr(mechanism_audits, "draw_reports", faulty)
    assert [claim.bound for claim in audit(generator=seeded(1)).contradicted] == ["certified"]


# all of them

AUDITS = {
    audit_gaussian: {"noise_multiplier": 1.0, "delta": 1e-3, "trials": 2000},
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
def test_a_generator_repeats_an_audit_and_secret_generators_differ(audit):
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
    ],
)
def test_arguments_are_checked_by_name(audit, name, value):
    with pytest.raises(ValueError, match=name):
        audit(**{**AUDITS[audit], name: value})
