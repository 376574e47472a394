"""Lower bounds against scipy's limits, closed forms, and mechanisms with an exact ε.

A lower bound at confidence c errs in a fraction of at most 1 − c of independent audits. So among N
of them the number that errs is at most Bin(N, 1 − c), and exceeds ``most_errors(N, c)`` with
probability 1e-9 at most (and the seeds are fixed).
"""

import functools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from opacus_shuffle.analysis import gaussian
from opacus_shuffle.audit import audit_scores, epsilon_lower_bound
from opacus_shuffle.audit.lower_bounds import (
    RELATIVE_ERROR,
    SELECTION_ERROR,
    choose_threshold,
    lower_limit,
    upper_limit,
)

COUNTS = "clopper_pearson"


def most_errors(audits, confidence):
    return int(stats.binom.isf(1e-9, audits, 1 - confidence))


def counted(null, alternative, threshold):
    return int((null > threshold).sum()), int((alternative <= threshold).sum())


# the limits

RATES = [
    (0, 1),
    (1, 1),
    (0, 10),
    (3, 10),
    (10, 10),
    (5, 1000),
    (999, 1000),
    (0, 5_000_000),
    (17, 5_000_000),
    (4_999_892, 5_000_000),
]


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(("count", "trials"), RATES)
def test_the_limits_are_those_of_scipy_rounded_to_the_safe_side(count, trials, confidence):
    interval = stats.binomtest(count, trials).proportion_ci(confidence, method="exact")
    upper, lower = (
        float(limit(count, trials, tail=(1 - confidence) / 2))
        for limit in (upper_limit, lower_limit)
    )
    root = 2e-12  # scipy's limits are brentq roots with its default xtol, an absolute one
    assert (
        interval.high - root <= upper <= min(1.0, (interval.high + root) * (1 + 2 * RELATIVE_ERROR))
    )
    assert (interval.low - root) * (1 - 2 * RELATIVE_ERROR) <= lower <= interval.low + root


# Eq. 45


@pytest.mark.parametrize("trials", [100, 1000, 5_000_000])
def test_without_false_positives_the_bound_has_a_closed_form(trials):
    with mpmath.workdps(40):
        alpha = 1 - mpmath.mpf("0.025") ** (mpmath.mpf(1) / trials)
        truth = mpmath.log((1 - alpha - mpmath.mpf(1e-5)) / alpha)
        bound = epsilon_lower_bound(0, 0, trials, delta=1e-5)
        assert truth * (1 - 1e-8) <= mpmath.mpf(bound.epsilon) <= truth


@pytest.mark.parametrize(("wrong", "trials"), [((3, 700), (1000, 1000)), ((3, 70), (1000, 100))])
def test_both_kinds_of_errors_count_equally(wrong, trials):
    bound, other = (
        epsilon_lower_bound(*wrong, trials, 1e-5),
        epsilon_lower_bound(*wrong[::-1], trials[::-1], 1e-5),
    )
    assert bound.epsilon == other.epsilon > 0
    assert (bound.false_positives, bound.false_negatives, bound.trials) == (*wrong, trials)


@given(
    counts=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    delta=st.floats(1e-9, 0.3),
    confidence=st.floats(0.1, 0.99),
    method=st.sampled_from(["clopper_pearson", "gdp"]),
)
def test_the_bound_decreases_with_errors_delta_and_confidence(counts, delta, confidence, method):
    bound = epsilon_lower_bound(*counts, 60, delta, confidence, method=method).epsilon
    assert 0 <= bound < math.inf
    for wrong, larger, surer in [
        ((counts[0] + 1, counts[1]), delta, confidence),
        ((counts[0], counts[1] + 1), delta, confidence),
        (counts, delta * 1.5, confidence),
        (counts, delta, 1 - (1 - confidence) / 2),
    ]:
        # Rounding is downwards, by less than this.
        assert epsilon_lower_bound(*wrong, 60, larger, surer, method=method).epsilon <= bound + 1e-6


@pytest.mark.parametrize("method", ["clopper_pearson", "gdp"])
def test_a_test_that_guesses_shows_nothing(method):
    for counts in ((500, 500), (0, 1000), (1000, 0), (1000, 1000), (900, 90)):
        assert epsilon_lower_bound(*counts, 1000, 1e-5, method=method).epsilon == 0


def test_a_small_power_keeps_its_precision():
    # β = 1 − 1e-9, so 1 − β must not be a rounding error.
    trials = 2**53
    power = round(1e-9 * trials)
    bound = epsilon_lower_bound(power // 100, trials - power, trials, 1e-15)
    assert bound.epsilon == pytest.approx(
        math.log((1e-9 - 1e-15) / 1e-11), abs=0.02
    )  # counts of 90,000: 2 sigma are 0.7 %


# Gaussian trade-off curves


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
@pytest.mark.parametrize("mistakes", [(50, 800), (300, 300), (900, 10)])
def test_gdp_turns_the_limits_into_mu_and_mu_into_epsilon(mistakes, delta):
    bound = epsilon_lower_bound(*mistakes, 1000, delta, method="gdp")
    alpha, beta = (
        stats.binomtest(count, 1000).proportion_ci(0.95, method="exact").high for count in mistakes
    )
    mu = stats.norm.isf(alpha) - stats.norm.ppf(beta)
    assert mu * (1 - 1e-8) <= bound.mu <= mu
    exact = gaussian.compute_epsilon(mu=mu, delta=delta)
    assert exact * (1 - 1e-6) <= bound.epsilon <= exact
    if bound.epsilon > 0:  # rounded down: at this ε the curve of the stated μ is still above δ
        assert gaussian.log_delta(mu=bound.mu, epsilon=bound.epsilon) >= math.log(delta) - 1e-12
    assert epsilon_lower_bound(*mistakes, 1000, delta).mu is None


# confidence


def randomised_response_epsilon(epsilon, delta):
    """Returns ε at δ of (ε, 0)-DP randomised response, which the best test attains."""
    return math.log(math.exp(epsilon) - delta * (1 + math.exp(epsilon)))


@pytest.mark.parametrize("confidence", [0.95, 0.5])
@pytest.mark.parametrize("epsilon", [pytest.param(0.1, marks=pytest.mark.zoo), 1.0, 4.0])
def test_counts_of_randomised_response_err_no_more_often_than_stated(epsilon, confidence):
    rng = np.random.default_rng(1)
    audits, runs, delta = 1000, 300, 1e-3
    truth = randomised_response_epsilon(epsilon, delta)
    counts = rng.binomial(runs, 1 / (1 + math.exp(epsilon)), (audits, 2))
    errors = sum(
        epsilon_lower_bound(*map(int, pair), runs, delta, confidence).epsilon > truth
        for pair in counts
    )
    assert errors <= most_errors(audits, confidence)
    if confidence == 0.5:
        assert errors > 0  # the test above could fail: the bound is not merely far below the truth


def of_a_gaussian(rng, mu):
    return rng.standard_normal(300), rng.standard_normal(400) + mu


def of_randomised_response(rng, epsilon):
    return (rng.random(600) < 1 / (1 + math.exp(sign * epsilon)) for sign in (1, -1))


@pytest.mark.parametrize("confidence", [0.95, 0.5])
@pytest.mark.parametrize(
    ("draw", "delta", "method", "truth"),
    [
        (
            functools.partial(of_randomised_response, epsilon=1.0),
            1e-3,
            COUNTS,
            randomised_response_epsilon(1.0, 1e-3),
        ),
        *(
            pytest.param(
                functools.partial(of_a_gaussian, mu=mu),
                delta,
                method,
                gaussian.compute_epsilon(mu=mu, delta=delta),
                marks=pytest.mark.zoo,
            )
            for mu, delta in [(0.5, 1e-2), (2.0, 1e-2), (2.0, 1e-5)]
            for method in (COUNTS, "gdp")
        ),
    ],
)
def test_scores_err_no_more_often_than_stated(draw, delta, method, truth, confidence):
    rng, audits = np.random.default_rng(2), 400
    bounds = [
        audit_scores(*draw(rng), delta=delta, confidence=confidence, method=method)
        for _ in range(audits)
    ]
    assert sum(bound.epsilon > truth for bound in bounds) <= most_errors(audits, confidence)


# the threshold


@pytest.mark.parametrize("delta", [pytest.param(1e-2, marks=pytest.mark.zoo), 1e-5])
@pytest.mark.parametrize("mu", [0.5, 1.5, 4.0])
def test_the_threshold_is_nearly_the_best_of_all(mu, delta):
    rng = np.random.default_rng(5)
    size = 1000
    null, alternative = rng.standard_normal(size), rng.standard_normal(size) + mu

    def bound(*wrong):
        return epsilon_lower_bound(*wrong, size, delta, 1 - 0.05 * SELECTION_ERROR).epsilon

    chosen = bound(
        *counted(
            null,
            alternative,
            choose_threshold(
                null, alternative, delta=delta, confidence=0.95, method="clopper_pearson"
            ),
        )
    )
    wrong = max(
        {counted(null, alternative, t) for t in np.concatenate([null, alternative])},
        key=lambda pair: bound(*pair),
    )
    # Ranks are at most 7 % (or 1) apart in each sample, so the next candidate above the best
    # threshold loses at most that share of the true positives and gains no false one; the next one
    # below loses as much of the true negatives.
    true_positives, true_negatives = (
        math.floor((size - count) / 1.07) - 1 for count in reversed(wrong)
    )
    assert bound(*wrong) > 0
    assert chosen >= min(
        bound(wrong[0], size - true_positives), bound(size - true_negatives, wrong[1])
    )


@pytest.mark.parametrize("method", ["clopper_pearson", "gdp"])
def test_the_threshold_does_not_move_when_the_counted_half_changes(method):
    """The counted half of one sample locates the threshold, for any counted half of the other."""
    rng = np.random.default_rng(8)
    chosen_by, probes = (
        (rng.standard_normal(500), rng.standard_normal(500) + 1.5),
        np.linspace(-4, 6, 500),
    )

    def bound(null, alternative):
        halves = (np.concatenate(pair) for pair in zip(chosen_by, (null, alternative), strict=True))
        return audit_scores(*halves, delta=1e-5, method=method)

    others = [np.full(500, value) for value in (-math.inf, -1.0, 0.0, 1.0, math.inf)]
    above = {bound(probes, other).false_positives for other in others}
    below = {bound(other, probes).false_negatives for other in others}
    assert len(above) == len(below) == 1
    assert above.pop() + below.pop() == 500  # one threshold


@pytest.mark.parametrize(("rare", "counts"), [(1.0, (0, 900)), (-1.0, (900, 0))])
def test_the_threshold_may_lie_beyond_all_scores_of_one_side(rare, counts):
    scores = np.where(
        np.arange(2000) % 10 == 0, rare, 0.0
    )  # one run in ten shows whose it is, and never the others
    halves = (np.zeros(2000), scores) if rare > 0 else (scores, np.zeros(2000))
    bound = audit_scores(*halves, delta=1e-5)
    assert bound == epsilon_lower_bound(*counts, 1000, 1e-5)


def test_scores_may_be_integers_booleans_or_infinite():
    for present, absent in ((1, 0), (True, False), (math.inf, -math.inf), (math.inf, 0.0)):
        bound = audit_scores([absent] * 200, [present] * 200, delta=1e-5)
        assert bound == epsilon_lower_bound(0, 0, 100, 1e-5)
        assert bound.epsilon > 3
    halves = torch.tensor([0.0, 1.0], dtype=torch.bfloat16, requires_grad=True)
    assert audit_scores(halves, halves, delta=1e-5).epsilon == 0


# the object, and what is refused


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"false_positives": 101}, r"false_positives .*at most 100\), got 101"),
        (
            {"false_negatives": 101, "trials": (1000, 100)},
            r"false_negatives .*at most 100\), got 101",
        ),
        ({"false_positives": -1}, "false_positives"),
        ({"false_negatives": 1.5}, "false_negatives"),
        ({"false_positives": math.nan}, "false_positives"),
        ({"trials": 0}, "trials"),
        ({"trials": (100, 100, 100)}, "trials"),
        ({"trials": (100, 2.5)}, "trials"),
        ({"trials": "many"}, "trials"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"confidence": 1.0}, "confidence"),
        ({"confidence": 95}, "confidence"),
        ({"method": "bayes"}, "method"),
    ],
)
def test_invalid_counts_are_refused_by_name(changed, named):
    arguments = {
        "false_positives": 1,
        "false_negatives": 1,
        "trials": 100,
        "delta": 1e-5,
        **changed,
    }
    with pytest.raises(ValueError, match=named):
        epsilon_lower_bound(**arguments)
    test = {
        name: value for name, value in changed.items() if name in ("delta", "confidence", "method")
    }
    if test:
        with pytest.raises(ValueError, match=named):
            audit_scores([0.0, 1.0], [0.0, 1.0], **{"delta": 1e-5, **test})


@pytest.mark.parametrize(
    ("scores", "named"),
    [
        ([0.0, math.nan], "not contain NaN, got 1"),
        ([0.0], "at least 2 scores"),
        ([], "at least 2 scores"),
        ([[0.0, 1.0], [2.0, 3.0]], "1-D"),
        (["a", "b"], "real numbers"),
        ([1j, 2j], "real numbers"),
        (3.0, "1-D"),
    ],
)
def test_invalid_scores_are_refused_by_name(scores, named):
    for name, other in (
        ("null_scores", "alternative_scores"),
        ("alternative_scores", "null_scores"),
    ):
        with pytest.raises(ValueError, match=f"^{name} .*{named}"):
            audit_scores(**{name: scores, other: [0.0, 1.0]}, delta=1e-5)
