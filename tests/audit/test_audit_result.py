"""What an audit's result says, for claims above and below what was found."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest

from opacus_shuffle import Guarantee, PrivacyBound, privacy_bound
from opacus_shuffle.audit import AuditResult, Claim, Finding, epsilon_lower_bound
from opacus_shuffle.core.rounding import round_down

DELTA = 1e-5
WEAK = Finding("as released", epsilon_lower_bound(490, 500, 1000, DELTA), "sees the permuted weights")
STRONG = Finding("re-aligned", epsilon_lower_bound(0, 500, 1000, DELTA), "undoes the <permutation>", recovered=0.9987)


def claim(name, epsilon, guarantee, covers, delta=DELTA, **options):
    bound = PrivacyBound("a mechanism", name, epsilon, delta, "zero_out", guarantee, covers, rounds=1, **options)
    return Claim(bound)


PUBLISHED = claim("published", 0.50001, Guarantee.ESTIMATE, "a formula")
PAIR = claim("pair", 1.9, Guarantee.PAIR, "one pair")
CERTIFIED = claim("certified", 107.94, Guarantee.PROVED, "every data set", proof="mended clones")


def result(*, claims=(PUBLISHED, PAIR, CERTIFIED), findings=(WEAK, STRONG), **changed):
    return AuditResult(**{"title": "a <run>", "delta": DELTA, "claims": claims, "findings": findings, **changed})


def text_of(answer):
    """The printed result in one line."""
    return " ".join(str(answer).split())


def test_the_largest_finding_contradicts_what_lies_below_it():
    assert result().largest is STRONG
    assert result().contradicted == (PUBLISHED, PAIR)
    assert result(findings=(WEAK,)).contradicted == ()
    assert result(claims=()).contradicted == ()


def test_a_claim_that_equals_the_finding_is_not_contradicted():
    exactly = claim("same", float(STRONG.lower), Guarantee.PAIR, "x")
    assert result(claims=(exactly,)).contradicted == ()


def test_several_findings_are_true_together_less_surely_than_each():
    assert result(findings=(STRONG,)).confidence == pytest.approx(0.95)
    assert result().confidence == pytest.approx(0.90)
    assert "epsilon of at least 4.846 with at least 90 % confidence (the 2 findings together)" in text_of(result())
    assert "epsilon of at least 4.846 with 95 % confidence." in text_of(result(findings=(STRONG,)))
    careless = Finding("careless", epsilon_lower_bound(0, 500, 1000, DELTA, 0.3), "x")
    assert result(findings=(careless, careless)).confidence == 0


def test_claims_are_printed_rounded_up_and_findings_down():
    text = text_of(result())
    assert "claimed: published <= 0.5001" in text
    assert "claimed: certified <= 108.0" in text
    printed = next(line for line in str(result()).splitlines() if line.startswith("found: re-aligned"))
    value = float(printed.split(">=")[1].split()[0])
    assert STRONG.lower - 1e-3 < value <= STRONG.lower


def test_the_text_says_what_was_counted_and_what_follows():
    text = text_of(result(notes=("A last word.",)))
    assert "Found (as released; adversary: sees the permuted weights): 490 false positives in 1,000 runs" in text
    assert "500 true positives in 1,000 with it (counts of mistakes)" in text
    assert "99.87 % of the permuted rows put back" in text
    assert "Bound 'published' says at most 0.5001 (a formula: an approximation, no guarantee). The audit is above it" in text
    assert "that value is no upper bound here" in text
    assert (
        "Bound 'certified' (mended clones) says at most 108.0 (every data set: a differential-privacy guarantee for every "
        "data set)." in text
    )
    assert "It is not contradicted." in text
    assert "what it does not contradict it does not prove" in text
    assert text.endswith("A last word.")
    assert max(len(line) for line in str(result()).splitlines()) <= 100


def test_a_proved_bound_below_the_audit_puts_the_run_in_doubt_and_not_the_proof():
    text = text_of(result(claims=(claim("certified", 1.0, Guarantee.PROVED, "every data set"),)))
    assert "either what was audited is not what the bound was computed for, or this is one of the rare audits that err" in text
    assert "does not prove" not in text


def test_an_audit_that_shows_nothing_says_so():
    nothing = Finding("guess", epsilon_lower_bound(500, 500, 1000, DELTA), "guesses")
    text = text_of(result(findings=(nothing,)))
    assert "found: guess >= 0 " in text
    assert "this test showed nothing" in text
    assert "has epsilon of at least" not in text


def test_a_finding_that_assumes_a_curve_says_so():
    assumed = Finding("gdp", epsilon_lower_bound(10, 500, 1000, DELTA, method="gdp"), "sees the sum")
    text = text_of(result(findings=(assumed,)))
    assert "if its trade-off curve is Gaussian" in text
    assert f"mu of at least {round_down(assumed.lower.mu)}" in text


def test_a_privacy_bound_is_a_claim():
    bound = privacy_bound("shuffle_gauss", noise_multiplier=9.48, num_users=60_000, steps=7, delta=DELTA, bound="certified")
    claimed = Claim(bound)
    assert (claimed.name, claimed.epsilon, claimed.bound.guarantee) == ("certified", bound.epsilon, Guarantee.PROVED)


def test_a_claim_is_held_against_the_adversaries_it_speaks_of_alone():
    narrow = Claim(claim("published", 0.5, Guarantee.ESTIMATE, "a formula").bound, against=(WEAK.name,))
    answer = result(claims=(narrow,), findings=(WEAK, STRONG))
    assert WEAK.lower <= narrow.epsilon < STRONG.lower
    assert answer.contradicted == ()
    text = " ".join(str(answer).split())
    assert f"Found above it, by adversaries who see more than it speaks of: {STRONG.name}" in text


def test_plain_values_survive_json():
    answer = result(notes=("A last word.",))
    values = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert values["contradicted"] == ["published", "pair"]
    assert values["claims"][2] == {**CERTIFIED.bound.to_dict(), "against": []}
    assert values["findings"][1]["lower"]["epsilon"] == float(STRONG.lower)
    assert values["findings"][1]["recovered"] == 0.9987
    assert values["notes"] == ["A last word."]


def test_html_shows_every_row_and_escapes_what_it_shows():
    page = result()._repr_html_()
    assert page.count("<tr>") == 1 + len(result().claims) + len(result().findings)
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page
    assert "<permutation>" not in page


def test_the_plot_has_one_row_per_claim_and_finding():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    ax = result().plot()
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "published",
        "pair",
        "certified",
        "as released",
        "re-aligned",
    ]
    markers = [line for line in ax.lines if line.get_marker() not in ("None", "", None)]
    # A finding of 0 has no logarithm: it stands at the left edge.
    assert WEAK.lower == 0
    places = [float(line.get_xdata()[0]) for line in markers]
    assert places == [PUBLISHED.epsilon, PAIR.epsilon, CERTIFIED.epsilon, ax.get_xlim()[0], float(STRONG.lower)]
    assert len({line.get_marker() for line in markers}) == 4
    assert len({line.get_color() for line in markers}) == 4
    assert "0" in [text.get_text() for text in ax.texts]
    assert len(ax.get_legend().get_texts()) == 4
    again = ax.figure.add_subplot()
    assert result().plot(again) is again
    nothing = Finding("guess", epsilon_lower_bound(500, 500, 1000, DELTA), "guesses")
    assert result(claims=(), findings=(nothing,)).plot().get_xlim()[0] > 0
    matplotlib.pyplot.close("all")


def test_without_matplotlib_the_plot_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install .*\[plots\]"):
        result().plot()


def test_results_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        result().delta = 0.1
    assert result(claims=[PUBLISHED]).claims == (PUBLISHED,)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: claim("published", math.inf, Guarantee.PAIR, "x"), "epsilon must be a finite number"),
        (lambda: Claim(0.5), "bound must be a PrivacyBound, got float"),
        (lambda: result(claims=(claim("pair", 1.0, Guarantee.PAIR, "x", delta=1e-6),)), "delta=1e-05, got 'pair' at 1e-06"),
        (lambda: Finding("x", 1.0, "sees"), "lower"),
        (lambda: Finding("x", STRONG.lower, ""), "adversary"),
        (lambda: Finding("x", STRONG.lower, "sees", recovered=1.5), "recovered"),
        (lambda: result(findings=()), "findings must hold at least one"),
        (lambda: result(findings=(STRONG, PUBLISHED)), "every one of findings"),
        (lambda: result(claims=PUBLISHED), "claims must be a tuple"),
        (lambda: result(claims=(STRONG,)), "every one of claims"),
        (lambda: result(notes="A last word."), "notes must be a tuple"),
        (lambda: result(delta=0.0), "delta"),
        (lambda: result(delta=1e-6), "claims and findings must be at the audit's delta=1e-06, got '.*' at 1e-05"),
        (lambda: result(title=" "), "title"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()
