"""What an audit's result says, for claims above and below what was found."""

from __future__ import annotations

import json

import pytest

from opacus_shuffle import Guarantee, PrivacyBound
from opacus_shuffle.audit import AuditResult, Claim, Finding, epsilon_lower_bound
from opacus_shuffle.core.rounding import round_down

DELTA = 1e-5
WEAK = Finding(
    "as released", epsilon_lower_bound(490, 500, 1000, DELTA), "sees the permuted weights"
)
STRONG = Finding(
    "re-aligned",
    epsilon_lower_bound(0, 500, 1000, DELTA),
    "undoes the <permutation>",
    recovered=0.9987,
)


def claim(name, epsilon, guarantee, covers, delta=DELTA, **options):
    bound = PrivacyBound(
        "a mechanism", name, epsilon, delta, "zero_out", guarantee, covers, rounds=1, **options
    )
    return Claim(bound)


PUBLISHED = claim("published", 0.50001, Guarantee.ESTIMATE, "a formula")
PAIR = claim("pair", 1.9, Guarantee.PAIR, "one pair")
CERTIFIED = claim("certified", 107.94, Guarantee.PROVED, "every data set", proof="mended clones")


def result(*, claims=(PUBLISHED, PAIR, CERTIFIED), findings=(WEAK, STRONG), **changed):
    return AuditResult(
        **{"title": "a <run>", "delta": DELTA, "claims": claims, "findings": findings, **changed}
    )


def text_of(answer):
    """The printed result in one line."""
    return " ".join(str(answer).split())


def test_the_largest_finding_contradicts_what_lies_below_it():
    assert result().largest is STRONG
    assert result().contradicted == (PUBLISHED, PAIR)
    assert result(findings=(WEAK,)).contradicted == ()
    assert result(claims=()).contradicted == ()


def test_a_claim_that_equals_the_finding_is_not_contradicted():
    exactly = claim("same", STRONG.lower.epsilon, Guarantee.PAIR, "x")
    assert result(claims=(exactly,)).contradicted == ()


def test_several_findings_are_true_together_less_surely_than_each():
    assert result(findings=(STRONG,)).confidence == pytest.approx(0.95)
    assert result().confidence == pytest.approx(0.90)
    assert (
        "epsilon of at least 4.846 with at least 90 % confidence (the 2 findings together)"
        in text_of(result())
    )
    assert "epsilon of at least 4.846 with 95 % confidence." in text_of(result(findings=(STRONG,)))
    careless = Finding("careless", epsilon_lower_bound(0, 500, 1000, DELTA, 0.3), "x")
    assert result(findings=(careless, careless)).confidence == 0


def test_claims_are_printed_rounded_up_and_findings_down():
    text = text_of(result())
    assert "claimed: published <= 0.5001" in text
    assert "claimed: certified <= 108.0" in text
    printed = next(
        line for line in str(result()).splitlines() if line.startswith("found: re-aligned")
    )
    value = float(printed.split(">=")[1].split()[0])
    assert STRONG.lower.epsilon - 1e-3 < value <= STRONG.lower.epsilon


def test_the_text_says_what_was_counted_and_what_follows():
    text = text_of(result(notes=("A last word.",)))
    assert (
        "Found (as released; adversary: sees the permuted weights): 490 false positives in 1,000 "
        "runs" in text
    )
    assert "500 true positives in 1,000 with it (counts of mistakes)" in text
    assert "99.87 % of the permuted rows put back" in text
    assert (
        "Bound 'published' says at most 0.5001 (a formula: an approximation, no guarantee). The "
        "audit is above it" in text
    )
    assert "that value is no upper bound here" in text
    assert (
        "Bound 'certified' (mended clones) says at most 108.0 (every data set: a "
        "differential-privacy guarantee for every "
        "data set)." in text
    )
    assert "It is not contradicted." in text
    assert "what it does not contradict it does not prove" in text
    assert text.endswith("A last word.")
    assert max(len(line) for line in str(result()).splitlines()) <= 100


def test_a_proved_bound_below_the_audit_puts_the_run_in_doubt_and_not_the_proof():
    text = text_of(result(claims=(claim("certified", 1.0, Guarantee.PROVED, "every data set"),)))
    assert (
        "either what was audited is not what the bound was computed for, or this is one of the "
        "rare audits that err" in text
    )
    assert "does not prove" not in text


def test_an_audit_that_shows_nothing_says_so():
    nothing = Finding("guess", epsilon_lower_bound(500, 500, 1000, DELTA), "guesses")
    text = text_of(result(findings=(nothing,)))
    assert "found: guess >= 0 " in text
    assert "this test showed nothing" in text
    assert "has epsilon of at least" not in text


def test_a_finding_that_assumes_a_curve_says_so():
    assumed = Finding(
        "gdp", epsilon_lower_bound(10, 500, 1000, DELTA, method="gdp"), "sees the sum"
    )
    text = text_of(result(findings=(assumed,)))
    assert "if its trade-off curve is Gaussian" in text
    assert f"mu of at least {round_down(assumed.lower.mu)}" in text


def test_a_claim_is_held_against_the_adversaries_it_speaks_of_alone():
    narrow = Claim(
        claim("published", 0.5, Guarantee.ESTIMATE, "a formula").bound, against=(WEAK.name,)
    )
    answer = result(claims=(narrow,), findings=(WEAK, STRONG))
    assert WEAK.lower.epsilon <= narrow.epsilon < STRONG.lower.epsilon
    assert answer.contradicted == ()
    text = " ".join(str(answer).split())
    assert f"Found above it, by adversaries who see more than it speaks of: {STRONG.name}" in text


def test_plain_values_survive_json():
    answer = result(notes=("A last word.",))
    values = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert values["contradicted"] == ["published", "pair"]
    assert values["claims"][2] == {**CERTIFIED.bound.to_dict(), "against": []}
    assert values["findings"][1]["lower"]["epsilon"] == STRONG.lower.epsilon
    assert values["findings"][1]["recovered"] == 0.9987
    assert values["notes"] == ["A last word."]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: result(claims=(claim("pair", 1.0, Guarantee.PAIR, "x", delta=1e-6),)),
            "delta=1e-05, got 'pair' at 1e-06",
        ),
        (lambda: result(findings=()), "findings must hold at least one"),
        (
            lambda: result(delta=1e-6),
            "claims and findings must be at the audit's delta=1e-06, got '.*' at 1e-05",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()
