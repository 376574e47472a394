"""The text and the values of an audit's result, for claims above and below the findings."""

import json

import pytest

from opacus_shuffle import Guarantee, PrivacyBound
from opacus_shuffle.audit import AuditResult, Finding, epsilon_lower_bound
from opacus_shuffle.core.rounding import round_down

DELTA = 1e-5
WEAK = Finding(
    "as released", epsilon_lower_bound(490, 500, 1000, DELTA), "sees the permuted weights"
)
STRONG = Finding("re-aligned", epsilon_lower_bound(0, 500, 1000, DELTA), "undoes the permutation")
NOTHING = Finding("guess", epsilon_lower_bound(500, 500, 1000, DELTA), "guesses")
CURVE = Finding("gdp", epsilon_lower_bound(10, 500, 1000, DELTA, method="gdp"), "sees the sum")


def claim(name, epsilon, guarantee, covers, **options):
    return PrivacyBound(
        "a mechanism", name, epsilon, DELTA, "zero_out", guarantee, covers, rounds=1, **options
    )


PUBLISHED = claim("published", 0.50001, Guarantee.ESTIMATE, "a formula")
PAIR = claim("pair", 1.9, Guarantee.PAIR, "one pair")
EXACT = claim("same", STRONG.lower.epsilon, Guarantee.PAIR, "x")
CERTIFIED = claim("certified", 107.94, Guarantee.PROVED, "every data set", proof="mended clones")
BROKEN = claim("certified", 1.0, Guarantee.PROVED, "every data set")
ALL = (PUBLISHED, PAIR, CERTIFIED)


def result(claims=ALL, findings=(WEAK, STRONG), notes=()):
    return AuditResult("a run", DELTA, claims, findings, notes)


@pytest.mark.parametrize(
    ("claims", "findings", "contradicted"),
    [
        (ALL, (WEAK, STRONG), (PUBLISHED, PAIR)),
        (ALL, (WEAK,), ()),
        ((), (STRONG,), ()),
        ((EXACT,), (STRONG,), ()),  # The claim equals the finding.
    ],
)
def test_a_finding_contradicts_the_claims_below_it(claims, findings, contradicted):
    answer = result(claims, findings)
    assert answer.largest is findings[-1]
    assert answer.contradicted == contradicted


def test_several_findings_have_less_confidence_together():
    assert result(findings=(STRONG,)).confidence == pytest.approx(0.95)
    assert result().confidence == pytest.approx(0.90)
    careless = Finding("careless", epsilon_lower_bound(0, 500, 1000, DELTA, 0.3), "x")
    assert result(findings=(careless, careless)).confidence == 0


TOGETHER = "epsilon of at least 4.846 with at least 90 % confidence (all 2 findings together)"
SAID = {
    "what was counted, claims rounded up and findings down": (
        ALL,
        (WEAK, STRONG),
        [
            "claimed: published <= 0.5001",
            "claimed: certified <= 108.0",
            f"found: re-aligned >= {round_down(STRONG.lower.epsilon)} ",
            "Found (as released; adversary: sees the permuted weights): 490 false positives in "
            "1,000 runs without the record and 500 true positives in 1,000 runs with it (error "
            "counts)",
            TOGETHER,
            "Bound 'published' claims at most 0.5001 (a formula: "
            f"{Guarantee.ESTIMATE.value}). The audit is above it: this value is not an upper bound "
            "here.",
            "Bound 'certified' (mended clones) claims at most 108.0 (every data set: "
            f"{Guarantee.PROVED.value}). The audit does not contradict it.",
            "A claim that it does not contradict is not thereby proved.",
        ],
        [],
    ),
    "one finding": (ALL, (STRONG,), ["at least 4.846 with 95 % confidence."], ["together"]),
    "a proved bound below it puts the run in doubt and not the proof": (
        (BROKEN,),
        (WEAK, STRONG),
        ["Either the audited run differs from the one that the bound was computed for, or this "],
        ["not thereby proved", "not an upper bound"],
    ),
    "nothing was found": (
        ALL,
        (NOTHING,),
        ["found: guess >= 0 ", "this test showed nothing"],
        ["has an epsilon of at least"],
    ),
    "a curve is assumed": (
        ALL,
        (CURVE,),
        [
            "if its trade-off curve is Gaussian",
            f"mu of at least {round_down(CURVE.lower.mu)}",
        ],
        [],
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_the_text_has_the_findings_and_the_conclusions(case):
    claims, findings, words, never = SAID[case]
    printed = str(result(claims, findings, notes=("A last word.",)))
    text = " ".join(printed.split())
    for word in (*words, "A last word."):
        assert word in text
    for word in never:
        assert word not in text
    assert max(len(line) for line in printed.splitlines()) <= 100


def test_plain_values_survive_json():
    values = json.loads(json.dumps(result().to_dict(), allow_nan=False))
    assert values["contradicted"] == ["published", "pair"]
    assert values["claims"][2] == CERTIFIED.to_dict()
    assert values["findings"][1]["lower"]["epsilon"] == STRONG.lower.epsilon
    assert values["confidence"] == 0.9
