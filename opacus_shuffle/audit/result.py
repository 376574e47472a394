"""The result of an audit: the lower bounds that it found, compared with the claimed bounds.

>>> from opacus_shuffle.audit.lower_bounds import epsilon_lower_bound
>>> found = Finding("a test", epsilon_lower_bound(0, 500, 1000, delta=1e-5), "sees the weights")
>>> def claim(name, epsilon, guarantee, covers):
...     return PrivacyBound("run", name, epsilon, 1e-5, "zero_out", guarantee, covers, rounds=1)
>>> formula = claim("published", 0.5, Guarantee.ESTIMATE, "a formula")
>>> proof = claim("certified", 9.0, Guarantee.PROVED, "every data set")
>>> result = AuditResult("an example", 1e-5, claims=(formula, proof), findings=(found,))
>>> [claim.bound for claim in result.contradicted], round(result.largest.lower.epsilon, 3)
(['published'], 4.846)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from opacus_shuffle.audit.lower_bounds import METHODS, LowerBound
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import round_down, round_up
from opacus_shuffle.core.tables import paragraph, text_table

SCOPES = {
    Guarantee.PROVED: "every data set",
    Guarantee.PAIR: "one pair of data sets",
    Guarantee.ESTIMATE: "(estimate)",
}
"""The data sets that a claim is about, by its guarantee."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The lower bound on ε that one adversary has shown.

    Attributes:
        name: The name of the test or of the adversary, for example ``"gradient"``.
        lower: The lower bound on ε against this adversary.
        adversary: A description of what the adversary sees.
    """

    name: str
    lower: LowerBound
    adversary: str


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """The claims and findings about one mechanism at one δ; print it for a report.

    Attributes:
        title: What was audited.
        delta: δ in (0, 1), the same for all claims and findings.
        claims: The upper bounds on ε that the findings are compared with.
        findings: The lower bounds on ε, at least one.
        notes: Sentences that are printed after the table.
    """

    title: str
    delta: float
    claims: tuple[PrivacyBound, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> Finding:
        """The finding with the largest lower bound."""
        return max(self.findings, key=lambda finding: finding.lower.epsilon)

    @property
    def confidence(self) -> float:
        """The confidence with which all findings hold together.

        It follows from a union bound, and is 0 if the union bound gives nothing.
        """
        return max(0.0, 1 - sum(1 - finding.lower.confidence for finding in self.findings))

    @property
    def contradicted(self) -> tuple[PrivacyBound, ...]:
        """The claims with an ε below the largest finding."""
        found = self.largest.lower.epsilon
        return tuple(claim for claim in self.claims if claim.epsilon < found)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "title": self.title,
            "delta": self.delta,
            "confidence": round(self.confidence, 12),
            "claims": [claim.to_dict() for claim in self.claims],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "contradicted": [claim.bound for claim in self.contradicted],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        table = text_table(("", "epsilon", "about", "status"), self._cells(), right=("epsilon",))
        text = [line for sentence in self._sentences() for line in paragraph(sentence)]
        return "\n".join([f"{self.title}, delta = {self.delta:.3g}", "", *table, "", *text])

    def _cells(self) -> list[tuple[str, str, str, str]]:
        """Returns the cells of the table; claims are rounded up, and findings down."""
        claims = [
            (
                f"claimed: {claim.bound}",
                f"<= {round_up(claim.epsilon)}",
                SCOPES[claim.guarantee],
                claim.guarantee.name,
            )
            for claim in self.claims
        ]
        findings = [
            (
                f"found: {finding.name}",
                f">= {round_down(finding.lower.epsilon)}",
                "the audited pair",
                f"{_percent(finding.lower.confidence)} confidence",
            )
            for finding in self.findings
        ]
        return claims + findings

    def _sentences(self) -> list[str]:
        """Returns the sentences below the table."""
        largest = self.largest.lower
        sentences = [self._evidence(finding) for finding in self.findings]
        if largest.epsilon > 0:
            confidence = f"{_percent(self.confidence)} confidence"
            if len(self.findings) > 1:
                confidence = f"at least {confidence} (all {len(self.findings)} findings together)"
            # "gdp" assumes this curve; see epsilon_lower_bound.
            condition = ", if its trade-off curve is Gaussian" if largest.method == "gdp" else ""
            sentences.append(
                f"The audited pair of data sets has an epsilon of at least "
                f"{round_down(largest.epsilon)} with {confidence}{condition}."
            )
        sentences += [self._verdict(claim) for claim in self.claims]
        if len(self.contradicted) < len(self.claims):
            sentences.append(
                "An audit only bounds epsilon from below. A claim that it does not contradict is "
                "not thereby proved."
            )
        return [*sentences, *self.notes]

    def _evidence(self, finding: Finding) -> str:
        """Returns a sentence with the counts behind one finding."""
        lower = finding.lower
        mu = "" if lower.mu is None else f", mu of at least {round_down(lower.mu)}"
        nothing = "" if lower.epsilon else "; this test showed nothing"
        return (
            f"Found ({finding.name}; adversary: {finding.adversary}): {lower.false_positives:,} "
            f"false positives in {lower.trials[0]:,} runs without the record and "
            f"{lower.trials[1] - lower.false_negatives:,} true positives in {lower.trials[1]:,} "
            f"runs with it ({METHODS[lower.method]}{mu}){nothing}."
        )

    def _verdict(self, claim: PrivacyBound) -> str:
        """Returns a sentence that compares one claim with the largest finding."""
        name = f"{claim.bound!r} ({claim.proof})" if claim.proof else f"{claim.bound!r}"
        statement = (
            f"Bound {name} claims at most {round_up(claim.epsilon)} ({claim.covers}: "
            f"{claim.guarantee.value})."
        )
        if claim not in self.contradicted:
            return f"{statement} The audit does not contradict it."
        if claim.guarantee is not Guarantee.PROVED:
            return f"{statement} The audit is above it: this value is not an upper bound here."
        return (
            f"{statement} The audit is above it. Either the audited run differs from the one that "
            "the bound was computed for, or this is one of the rare audits that err."
        )


def _percent(confidence: float) -> str:
    """Returns a confidence in percent, rounded down."""
    return f"{float(round_down(100 * confidence + 1e-9)):g} %"
