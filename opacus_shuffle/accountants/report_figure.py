"""The report's picture: ε over rounds for every bound, in colours that differ in brightness too; needs matplotlib.

>>> from opacus_shuffle.accountants.mechanisms import ShuffleGauss
>>> curves = epsilons_over_rounds([(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)], delta=1e-5, points=3)
>>> [count for count, _ in curves["pair"]]
[1, 3, 7]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opacus_shuffle.accountants.bounds.registry import Rounds, find_bound, kind_of, ladder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 9
"""Of each curve."""


def epsilons_over_rounds(
    rounds: Rounds, *, delta: float, adjacency: str = "zero_out", points: int | None = None
) -> dict[str, list[tuple[int, float]]]:
    """Returns for each bound (rounds, ε) after the first 1, …, T rounds of the history, geometrically spaced."""
    total = sum(count for _, count in rounds)
    curves: dict[str, list[tuple[int, float]]] = {}
    for count in sorted({round(value) for value in np.geomspace(1, total, points or POINTS)}):
        for bound in ladder(first_rounds(rounds, count), delta=delta, adjacency=adjacency):
            curves.setdefault(bound.bound, []).append((count, bound.epsilon))
    return curves


def first_rounds(rounds: Rounds, count: int) -> Rounds:
    """Returns the history's first ``count`` rounds."""
    found = []
    for mechanism, repetitions in rounds:
        taken = min(repetitions, count)
        if taken:
            found.append((mechanism, taken))
        count -= taken
    return found


def draw(rounds: Rounds, *, delta: float, adjacency: str, ax: Axes | None) -> Axes:
    """Draws a report; :meth:`PrivacyReport.plot <opacus_shuffle.accountants.report.PrivacyReport.plot>` says how."""
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'opacus_shuffle[plots]'") from error
        ax = plt.subplots(figsize=(9.0, 4.6), layout="constrained")[1]
    kind = kind_of(rounds)
    curves = {
        name: [(count, epsilon) for count, epsilon in points if epsilon > 0]
        for name, points in epsilons_over_rounds(rounds, delta=delta, adjacency=adjacency).items()
    }
    for name, points in curves.items():
        entry = find_bound(kind, name)
        ax.plot(
            [count for count, _ in points],
            [epsilon for _, epsilon in points],
            color=entry.style.color,
            linestyle=entry.style.line,
            marker=entry.style.marker,
            markersize=4,
            linewidth=1.6,
            label=f"{name}: {entry.legend or entry.covers}",
        )
    low, high = (dict(curves.get(name, ())) for name in ("pair", "certified"))
    both = [count for count in low if count in high]
    if both:
        ax.fill_between(
            both,
            [low[count] for count in both],
            [high[count] for count in both],
            color="#56B4E9",
            alpha=0.25,
            linewidth=0,
            label="the truth for the worst data set lies here",
        )
    ax.set(xscale="log", yscale="log", xlabel="rounds", ylabel=f"ε at δ = {delta:.3g}")
    ax.set_title(f"{kind.name}, {adjacency} adjacency", fontsize=11)
    ax.grid(which="major", alpha=0.3)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)
    return ax
