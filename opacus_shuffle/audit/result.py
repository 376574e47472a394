"""The result of an audit: what was found, beside what is claimed.

>>> from opacus_shuffle.audit.lower_bounds import epsilon_lower_bound
>>> found = Finding("a test", epsilon_lower_bound(0, 500, 1000, delta=1e-5), "sees the weights")
>>> def claim(name, epsilon, guarantee, covers):
...     bound = PrivacyBound("run", name, epsilon, 1e-5, "zero_out", guarantee, covers, rounds=1)
...     return Claim(bound)
>>> formula = claim("published", 0.5, Guarantee.ESTIMATE, "a formula")
>>> proof = claim("certified", 9.0, Guarantee.PROVED, "every data set")
>>> result = AuditResult("an example", 1e-5, claims=(formula, proof), findings=(found,))
>>> [claim.name for claim in result.contradicted], round(result.largest.lower.epsilon, 3)
(['published'], 4.846)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from opacus_shuffle.audit.lower_bounds import METHODS, LowerBound
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import round_down, round_up
from opacus_shuffle.core.tables import paragraph, text_table

ABOUT = {
    Guarantee.PROVED: "every data set",
    Guarantee.PAIR: "one pair of data sets",
    Guarantee.ESTIMATE: "(estimate)",
}
"""What a claim of this worth is about, in a word."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A privacy bound that findings are compared with.

    Attributes:
        bound: What is claimed; its ε must be finite.
        against: Names of the findings whose adversaries it speaks of; empty for every adversary.
    """

    bound: PrivacyBound
    against: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The bound's name, for example ``"published"``."""
        return self.bound.bound

    @property
    def epsilon(self) -> float:
        """The bound's ε."""
        return self.bound.epsilon

    def faces(self, finding: Finding) -> bool:
        """Tells whether the bound is about the finding's adversary."""
        return not self.against or finding.name in self.against


@dataclasses.dataclass(frozen=True)
class Finding:
    """The lower bound on ε that one adversary has shown.

    Attributes:
        name: For example ``"re-aligned"``.
        lower: ε is at least this, for an adversary who sees this much.
        adversary: What it sees, in words.
        recovered: The fraction of permuted rows that it put back, where that is what it does.
    """

    name: str
    lower: LowerBound
    adversary: str
    recovered: float | None = None


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Claims and findings on one mechanism at one δ; print it.

    Attributes:
        title: What was audited.
        delta: δ in (0, 1), the same for every claim and finding.
        claims: Upper values of ε, as far as they are known.
        findings: Lower bounds on ε, at least one.
        notes: Sentences to be read with it.
    """

    title: str
    delta: float
    claims: tuple[Claim, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> Finding:
        """The finding with the largest lower bound."""
        return max(self.findings, key=lambda finding: finding.lower.epsilon)

    @property
    def confidence(self) -> float:
        """The confidence with which all findings are true together.

        It is by a union bound, and 0 if that says nothing.
        """
        return max(0.0, 1 - sum(1 - finding.lower.confidence for finding in self.findings))

    @property
    def contradicted(self) -> tuple[Claim, ...]:
        """The claims whose ε is below a finding about the same adversary."""
        return tuple(
            claim
            for claim in self.claims
            if any(
                claim.epsilon < finding.lower.epsilon
                for finding in self.findings
                if claim.faces(finding)
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {
            "title": self.title,
            "delta": self.delta,
            "confidence": round(self.confidence, 12),
            "claims": [
                {**claim.bound.to_dict(), "against": list(claim.against)} for claim in self.claims
            ],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "contradicted": [claim.name for claim in self.contradicted],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        table = text_table(("", "epsilon", "about", "status"), self._cells(), right=("epsilon",))
        text = [line for sentence in self._sentences() for line in paragraph(sentence)]
        return "\n".join([f"{self.title}, delta = {self.delta:.3g}", "", *table, "", *text])

    def _cells(self) -> list[tuple[str, str, str, str]]:
        """Returns the table's rows as text: claims rounded up, findings down."""
        cells = [
            (
                f"claimed: {c.name}",
                f"<= {round_up(c.epsilon)}",
                ABOUT[c.bound.guarantee],
                c.bound.guarantee.name,
            )
            for c in self.claims
        ]
        return cells + [
            (
                f"found: {finding.name}",
                f">= {round_down(finding.lower.epsilon)}",
                "the pair audited",
                f"{_percent(finding.lower.confidence)} confidence",
            )
            for finding in self.findings
        ]

    def _sentences(self) -> list[str]:
        """Returns what the table says, in sentences."""
        best = self.largest
        sentences = [self._evidence(finding) for finding in self.findings]
        if best.lower.epsilon > 0:
            sure = f"{_percent(self.confidence)} confidence"
            if len(self.findings) > 1:
                sure = f"at least {sure} (the {len(self.findings)} findings together)"
            said = (
                "The pair of data sets audited has epsilon of at least "
                f"{round_down(best.lower.epsilon)} with {sure}"
            )
            said += ", if its trade-off curve is Gaussian" if best.lower.method == "gdp" else ""
            sentences.append(f"{said}.")
        sentences += [self._verdict(claim) for claim in self.claims]
        if len(self.contradicted) < len(self.claims):
            sentences.append(
                "An audit only bounds epsilon from below: what it does not contradict it does not "
                "prove."
            )
        return [*sentences, *self.notes]

    def _evidence(self, finding: Finding) -> str:
        bound = finding.lower
        counts = (
            f"Found ({finding.name}; adversary: {finding.adversary}): {bound.false_positives:,} "
            "false positives in "
            f"{bound.trials[0]:,} runs without the record and "
            f"{bound.trials[1] - bound.false_negatives:,} true positives in "
            f"{bound.trials[1]:,} with it"
        )
        mu = "" if bound.mu is None else f", mu of at least {round_down(bound.mu)}"
        recovered = (
            ""
            if finding.recovered is None
            else f"; {100 * finding.recovered:.4g} % of the permuted rows put back"
        )
        nothing = "" if bound.epsilon else "; this test showed nothing"
        return f"{counts} ({METHODS[bound.method]}{mu}){recovered}{nothing}."

    def _verdict(self, claim: Claim) -> str:
        """Returns a sentence that compares one claim with the largest finding."""
        name = f"{claim.name!r} ({claim.bound.proof})" if claim.bound.proof else f"{claim.name!r}"
        says = (
            f"Bound {name} says at most {round_up(claim.epsilon)} ({claim.bound.covers}: "
            f"{claim.bound.guarantee.value})."
        )
        above = [finding for finding in self.findings if claim.epsilon < finding.lower.epsilon]
        beyond = ", ".join(finding.name for finding in above if not claim.faces(finding))
        more = (
            f" Found above it, by adversaries who see more than it speaks of: {beyond}."
            if beyond
            else ""
        )
        if claim not in self.contradicted:
            return f"{says} It is not contradicted.{more}"
        if claim.bound.guarantee is not Guarantee.PROVED:
            return f"{says} The audit is above it: that value is no upper bound here.{more}"
        return (
            f"{says} The audit is above it: either what was audited is not what the bound was "
            "computed for, or this is one of "
            "the rare audits that err."
        )


def _percent(confidence: float) -> str:
    """Returns a confidence as text, rounded down."""
    return f"{float(round_down(100 * confidence + 1e-9)):g} %"
