"""The audit's picture: claims and findings on one axis of ε, in colours that differ in brightness too; needs matplotlib.

>>> len({marker for _, marker, _ in [*CLAIMED.values(), FOUND]})  # every row can be told apart without colour
4
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from opacus_shuffle.accountants.bounds.registry import Guarantee
from opacus_shuffle.core.rounding import round_down, round_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from opacus_shuffle.audit.result import AuditResult

CLAIMED = {
    Guarantee.PROVED: ("#0072B2", "s", "claimed, proved: ε at most"),
    Guarantee.PAIR: ("#D55E00", "D", "claimed, one pair of data sets: ε at most"),
    Guarantee.ESTIMATE: ("#CC79A7", "^", "claimed, estimate: ε at most"),
}
"""Colour (Okabe and Ito's palette), marker, legend."""

TITLE_WIDTH = 64
FOUND = ("#000000", ">", "found by the audit: ε at least")


def draw(result: AuditResult, ax: Axes | None) -> Axes:
    """See :meth:`opacus_shuffle.audit.result.AuditResult.plot`."""
    rows = [
        *((claim.name, claim.epsilon, round_up(claim.epsilon), *CLAIMED[claim.guarantee]) for claim in result.claims),
        *((finding.name, float(finding.lower), round_down(finding.lower), *FOUND) for finding in result.findings),
    ]
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'opacus_shuffle[plots]'") from error
        ax = plt.subplots(figsize=(8.0, 1.6 + 0.45 * len(rows)), layout="constrained")[1]
    drawable = [epsilon for _, epsilon, *_ in rows if epsilon > 0] or [1.0]
    left, right = min(drawable) / 3, max(drawable) * 3
    seen = set()
    for position, (_, epsilon, text, color, marker, legend) in enumerate(rows):
        # No logarithm of zero: such a row stands at the left edge, with its number.
        place = epsilon if epsilon > 0 else left
        label = None if legend in seen else legend
        seen.add(legend)
        ax.plot([place], [position], color=color, marker=marker, markersize=8, linestyle="none", label=label, clip_on=False)
        ends = (place, right) if marker == FOUND[1] else (left, place)
        ax.plot(ends, [position, position], color=color, linewidth=1.5, alpha=0.5)
        ax.annotate(text, (place, position), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9, color=color)
    if result.largest.lower > 0:
        ax.axvline(float(result.largest.lower), color=FOUND[0], linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ax.set_xlim(left, right)
    ax.set_ylim(len(rows) - 0.5, -0.7)
    ax.set_yticks(range(len(rows)), [row[0] for row in rows])
    ax.set_xlabel(f"ε at δ = {result.delta:.3g}")
    ax.set_title("\n".join(textwrap.wrap(result.title, TITLE_WIDTH)), fontsize=10)
    ax.grid(axis="x", which="major", alpha=0.3)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)
    return ax
