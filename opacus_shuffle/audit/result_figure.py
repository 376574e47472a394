"""The audit's picture: claims and findings on one axis of ε, in colours that differ in brightness too; needs matplotlib.

>>> len({marker for _, marker, _ in STYLES.values()})  # every row can be told apart without colour
4
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from opacus_shuffle.core.guarantees import Guarantee

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    Guarantee.PROVED: ("#0072B2", "s", "claimed, proved: ε at most"),
    Guarantee.PAIR: ("#D55E00", "D", "claimed, one pair of data sets: ε at most"),
    Guarantee.ESTIMATE: ("#CC79A7", "^", "claimed, estimate: ε at most"),
    None: ("#000000", ">", "found by the audit: ε at least"),
}
"""Colour (Okabe and Ito's palette), marker, legend."""

TITLE_WIDTH = 64


class Row(NamedTuple):
    """One mark: a claim of some worth, or a finding (no ``guarantee``); ``text`` is its ε as printed."""

    name: str
    epsilon: float
    text: str
    guarantee: Guarantee | None = None


def draw(title: str, rows: Sequence[Row], *, delta: float, ax: Axes | None) -> Axes:
    """Draws one row under the other, and a line at the largest finding."""
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'opacus_shuffle[plots]'") from error
        ax = plt.subplots(figsize=(8.0, 1.6 + 0.45 * len(rows)), layout="constrained")[1]
    drawable = [row.epsilon for row in rows if row.epsilon > 0] or [1.0]
    left, right = min(drawable) / 3, max(drawable) * 3
    seen = set()
    for position, row in enumerate(rows):
        color, marker, legend = STYLES[row.guarantee]
        # No logarithm of zero: such a row stands at the left edge, with its number.
        place = row.epsilon if row.epsilon > 0 else left
        label = None if legend in seen else legend
        seen.add(legend)
        ax.plot([place], [position], color=color, marker=marker, markersize=8, linestyle="none", label=label, clip_on=False)
        ends = (place, right) if row.guarantee is None else (left, place)
        ax.plot(ends, [position, position], color=color, linewidth=1.5, alpha=0.5)
        ax.annotate(
            row.text, (place, position), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9, color=color
        )
    largest = max(row.epsilon for row in rows if row.guarantee is None)
    if largest > 0:
        ax.axvline(largest, color=STYLES[None][0], linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ax.set_xlim(left, right)
    ax.set_ylim(len(rows) - 0.5, -0.7)
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.set_xlabel(f"ε at δ = {delta:.3g}")
    ax.set_title("\n".join(textwrap.wrap(title, TITLE_WIDTH)), fontsize=10)
    ax.grid(axis="x", which="major", alpha=0.3)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)
    return ax
