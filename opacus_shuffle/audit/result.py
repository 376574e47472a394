"""What an audit found, beside what is claimed, in words that anyone can read.

>>> from opacus_shuffle.audit.lower_bounds import epsilon_lower_bound
>>> found = Finding("one test", epsilon_lower_bound(0, 500, 1000, delta=1e-5), "sees the released weights")
>>> formula = PrivacyBound("a run", "published", 0.5, 1e-5, "zero_out", Guarantee.ESTIMATE, "a formula", rounds=1)
>>> proof = PrivacyBound("a run", "certified", 9.0, 1e-5, "zero_out", Guarantee.PROVED, "every data set", rounds=1)
>>> result = AuditResult("an example", delta=1e-5, claims=(Claim(formula), Claim(proof)), findings=(found,))
>>> [claim.name for claim in result.contradicted], round(float(result.largest.lower), 3)
(['published'], 4.846)
"""

from __future__ import annotations

import dataclasses
import html
import textwrap
from typing import TYPE_CHECKING, Any

from opacus_shuffle.audit.lower_bounds import METHODS, LowerBound
from opacus_shuffle.core import extras
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import round_down, round_up
from opacus_shuffle.core.tables import html_table, paragraph, text_table
from opacus_shuffle.core.validation import finite_number, instance_of, open_unit_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = {
    Guarantee.PROVED: ("every data set", "#0072B2", "s", "claimed, proved: ε at most"),
    Guarantee.PAIR: ("one pair of data sets", "#D55E00", "D", "claimed, one pair of data sets: ε at most"),
    Guarantee.ESTIMATE: ("(estimate)", "#CC79A7", "^", "claimed, estimate: ε at most"),
    None: ("the pair audited", "#000000", ">", "found by the audit: ε at least"),
}
"""Per worth of a claim, and a finding: what it is about, colour (Okabe and Ito's; brightness differs too), marker, legend."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A privacy bound that findings are held against.

    Attributes:
        bound: What is claimed; its ε must be finite.
        against: Names of the findings whose adversaries it speaks of; empty for every adversary.
    """

    bound: PrivacyBound
    against: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        instance_of("bound", self.bound, (PrivacyBound,))
        finite_number("bound.epsilon", self.bound.epsilon)

    @property
    def name(self) -> str:
        """The bound's, for example ``"published"``."""
        return self.bound.bound

    @property
    def epsilon(self) -> float:
        """The bound's ε."""
        return self.bound.epsilon


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one adversary showed.

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

    def __post_init__(self) -> None:
        _text("name", self.name)
        _text("adversary", self.adversary)
        instance_of("lower", self.lower, (LowerBound,))
        if self.recovered is not None and not 0 <= finite_number("recovered", self.recovered) <= 1:
            raise ValueError(f"recovered must lie in [0, 1], a fraction of rows, got {self.recovered!r}")


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Claims and findings on one mechanism at one δ; print it, or plot it.

    Attributes:
        title: What was audited.
        delta: δ in (0, 1), the same for every claim and finding.
        claims: Upper values of ε, as far as they are known.
        findings: Lower bounds on ε, at least one.
        notes: Sentences to be read with it.

    Raises:
        ValueError: If there is no finding, or one at another δ.
    """

    title: str
    delta: float
    claims: tuple[Claim, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _text("title", self.title)
        open_unit_interval("delta", self.delta)
        for name, kind in (("claims", Claim), ("findings", Finding), ("notes", str)):
            values = getattr(self, name)
            if not isinstance(values, tuple | list):
                raise ValueError(f"{name} must be a tuple of {kind.__name__} objects, got {type(values).__name__}")
            for value in values:
                instance_of(f"every one of {name}", value, (kind,))
            object.__setattr__(self, name, tuple(values))
        if not self.findings:
            raise ValueError("findings must hold at least one Finding, got none: there is nothing to report")
        for name, bound in [(c.name, c.bound) for c in self.claims] + [(f.name, f.lower) for f in self.findings]:
            if bound.delta != self.delta:
                raise ValueError(
                    f"claims and findings must be at the audit's delta={self.delta!r}, got {name!r} at {bound.delta!r}"
                )

    @property
    def largest(self) -> Finding:
        """The finding with the largest lower bound, the first of several."""
        return max(self.findings, key=lambda finding: finding.lower)

    @property
    def confidence(self) -> float:
        """The confidence with which *all* findings are true, and so the largest one (union bound); 0 if that says nothing."""
        return max(0.0, 1 - sum(1 - finding.lower.confidence for finding in self.findings))

    @property
    def contradicted(self) -> tuple[Claim, ...]:
        """The claims whose ε is below a finding they speak of: not upper bounds for the pair of data sets audited."""
        return tuple(
            claim for claim in self.claims if any(claim.epsilon < each.lower for each in self.findings if _faces(claim, each))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "title": self.title,
            "delta": self.delta,
            "confidence": round(self.confidence, 12),
            "claims": [{**claim.bound.to_dict(), "against": list(claim.against)} for claim in self.claims],
            "findings": [{**vars(finding), "lower": finding.lower.to_dict()} for finding in self.findings],
            "contradicted": [claim.name for claim in self.contradicted],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        table = text_table(("", "epsilon", "about", "status"), self._cells(), right=("epsilon",))
        text = [line for sentence in self._sentences() for line in paragraph(sentence)]
        return "\n".join([f"{self.title}, delta = {self.delta:.3g}", "", *table, "", *text])

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        title = html.escape(f"{self.title}, δ = {self.delta:.3g}")
        text = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self._sentences())
        return f"<p>{title}</p>{html_table(('', 'ε', 'about', 'status'), self._cells())}<ul>{text}</ul>"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws every claim and every finding on one logarithmic axis of ε.

        Args:
            ax: Axes to draw on; by default a new figure's. Needs ``opacus_shuffle[plots]``.

        Returns:
            The axes. ``ax.figure.savefig(...)`` writes them.

        Raises:
            ImportError: If matplotlib is missing.
        """
        rows: list[tuple[str, float, str, Guarantee | None]]
        rows = [(claim.name, claim.epsilon, round_up(claim.epsilon), claim.bound.guarantee) for claim in self.claims]
        rows += [(finding.name, float(finding.lower), round_down(finding.lower), None) for finding in self.findings]
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise ImportError(extras.missing("plot", "matplotlib", "plots")) from error
            ax = plt.subplots(figsize=(8.0, 1.6 + 0.45 * len(rows)), layout="constrained")[1]
        drawable = [epsilon for _, epsilon, _, _ in rows if epsilon > 0] or [1.0]
        left, right = min(drawable) / 3, max(drawable) * 3
        seen = set()
        for position, (_, epsilon, text, guarantee) in enumerate(rows):
            _, color, marker, legend = ROWS[guarantee]
            # No logarithm of zero: such a row stands at the left edge, with its number.
            place = epsilon if epsilon > 0 else left
            label = None if legend in seen else legend
            seen.add(legend)
            ax.plot([place], [position], color=color, marker=marker, markersize=8, linestyle="none", label=label, clip_on=False)
            ends = (place, right) if guarantee is None else (left, place)
            ax.plot(ends, [position, position], color=color, linewidth=1.5, alpha=0.5)
            ax.annotate(text, (place, position), (0, 7), textcoords="offset points", ha="center", fontsize=9, color=color)
        if self.largest.lower > 0:
            ax.axvline(self.largest.lower, color=ROWS[None][1], linewidth=0.8, linestyle=":")
        ax.set_xscale("log")
        ax.set_xlim(left, right)
        ax.set_ylim(len(rows) - 0.5, -0.7)
        ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
        ax.set_xlabel(f"ε at δ = {self.delta:.3g}")
        ax.set_title("\n".join(textwrap.wrap(self.title, 64)), fontsize=10)
        ax.grid(axis="x", which="major", alpha=0.3)
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)
        return ax

    def _cells(self) -> list[tuple[str, str, str, str]]:
        """The table's rows as text: claims rounded up, findings down."""
        cells = [
            (f"claimed: {c.name}", f"<= {round_up(c.epsilon)}", ROWS[c.bound.guarantee][0], c.bound.guarantee.name)
            for c in self.claims
        ]
        for finding in self.findings:
            status = f"{_percent(finding.lower.confidence)} confidence"
            cells.append((f"found: {finding.name}", f">= {round_down(finding.lower)}", ROWS[None][0], status))
        return cells

    def _sentences(self) -> list[str]:
        """What the table says, in words."""
        best = self.largest
        sentences = [self._evidence(finding) for finding in self.findings]
        if best.lower > 0:
            sure = f"{_percent(self.confidence)} confidence"
            if len(self.findings) > 1:
                sure = f"at least {sure} (the {len(self.findings)} findings together)"
            said = f"The pair of data sets audited has epsilon of at least {round_down(best.lower)} with {sure}"
            said += ", if its trade-off curve is Gaussian" if best.lower.method == "gdp" else ""
            sentences.append(f"{said}.")
        sentences += [self._verdict(claim) for claim in self.claims]
        if len(self.contradicted) < len(self.claims):
            sentences.append("An audit only bounds epsilon from below: what it does not contradict it does not prove.")
        return [*sentences, *self.notes]

    def _evidence(self, finding: Finding) -> str:
        bound = finding.lower
        counts = (
            f"Found ({finding.name}; adversary: {finding.adversary}): {bound.false_positives:,} false positives in "
            f"{bound.trials[0]:,} runs without the record and {bound.trials[1] - bound.false_negatives:,} true positives in "
            f"{bound.trials[1]:,} with it"
        )
        mu = "" if bound.mu is None else f", mu of at least {round_down(bound.mu)}"
        recovered = "" if finding.recovered is None else f"; {100 * finding.recovered:.4g} % of the permuted rows put back"
        nothing = "; this test showed nothing" if not bound else ""
        return f"{counts} ({METHODS[bound.method]}{mu}){recovered}{nothing}."

    def _verdict(self, claim: Claim) -> str:
        """One claim against the largest finding."""
        name = f"{claim.name!r} ({claim.bound.proof})" if claim.bound.proof else f"{claim.name!r}"
        says = f"Bound {name} says at most {round_up(claim.epsilon)} ({claim.bound.covers}: {claim.bound.guarantee.value})."
        beyond = [each.name for each in self.findings if claim.epsilon < each.lower and not _faces(claim, each)]
        more = f" Found above it, by adversaries who see more than it speaks of: {', '.join(beyond)}." if beyond else ""
        if claim not in self.contradicted:
            return f"{says} It is not contradicted.{more}"
        if claim.bound.guarantee is not Guarantee.PROVED:
            return f"{says} The audit is above it: that value is no upper bound here.{more}"
        return (
            f"{says} The audit is above it: either what was audited is not what the bound was computed for, or this is one of "
            "the rare audits that err."
        )


def _faces(claim: Claim, finding: Finding) -> bool:
    """Whether the claim speaks of the finding's adversary."""
    return not claim.against or finding.name in claim.against


def _percent(confidence: float) -> str:
    """A confidence, rounded down but for the rounding of sums."""
    return f"{float(round_down(100 * confidence + 1e-9)):g} %"


def _text(name: str, value: Any) -> None:
    """Refuses a string that says nothing."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a non-empty string, got {value!r}")
