"""The report's picture: ε over rounds for every bound, in colours that differ in brightness too; needs matplotlib.

>>> from opacus_shuffle.accountants.mechanisms import ShuffleGauss
>>> curves = epsilons_over_rounds([(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)], delta=1e-5, points=3)
>>> [count for count, _ in curves["pair"]]
[1, 3, 7]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opacus_shuffle.accountants.bounds.registry import Guarantee, Rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from opacus_shuffle.accountants.report import PrivacyReport

POINTS = 9

STYLES = {
    "local": ("#000000", (0, (1, 1)), "", "local: no shuffler"),
    "certified": ("#0072B2", "-", "s", "certified: every data set"),
    "certified_sharp": ("#0072B2", "--", "", "certified_sharp: every data set, longer proof"),
    "composition": ("#000000", (0, (4, 2)), "", "composition: every data set, by advanced composition"),
    "published": ("#CC79A7", "-.", "^", "paper: one pair, as printed"),
    "published_optimised": ("#CC79A7", ":", "", "paper_optimised: an estimate, delta split in the best way"),
    "pair": ("#D55E00", "-", "o", "tight: one pair, exact"),
    "secure_aggregation": ("#666666", (0, (5, 2, 1, 2)), "", "secure aggregation"),
    "central": ("#999999", ":", "", "central: trusted server"),
}
"""Colour (Okabe and Ito's palette), line, marker, legend."""


def epsilons_over_rounds(
    rounds: Rounds, *, delta: float, adjacency: str = "zero_out", points: int | None = None
) -> dict[str, list[tuple[int, float]]]:
    """For each bound, (rounds, ε) after the first 1, …, T rounds of the history, geometrically spaced."""
    from opacus_shuffle.accountants.report import ladder

    total = sum(count for _, count in rounds)
    curves: dict[str, list[tuple[int, float]]] = {}
    for count in sorted({round(value) for value in np.geomspace(1, total, points or POINTS)}):
        for bound in ladder(first_rounds(rounds, count), delta=delta, adjacency=adjacency):
            curves.setdefault(bound.bound, []).append((count, bound.epsilon))
    return curves


def first_rounds(rounds: Rounds, count: int) -> Rounds:
    """The history's first ``count`` rounds."""
    found = []
    for mechanism, repetitions in rounds:
        taken = min(repetitions, count)
        if taken:
            found.append((mechanism, taken))
        count -= taken
    return found


def draw(report: PrivacyReport, ax: Axes | None) -> Axes:
    """See :meth:`PrivacyReport.plot`."""
    if ax is None:
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'opacus_shuffle[plots]'") from error
        ax = plt.subplots(figsize=(9.0, 4.6), layout="constrained")[1]
    curves = epsilons_over_rounds(report.rounds, delta=report.delta, adjacency=report.adjacency)
    estimates = {bound.bound for bound in report.bounds if bound.guarantee is Guarantee.ESTIMATE}
    for name, points in curves.items():
        color, line, marker, label = STYLES.get(name, ("#444444", "-", "", name))
        label = "paper: an estimate, as printed" if name == "published" and name in estimates else label
        counts, epsilons = (
            zip(*((c, e) for c, e in points if e > 0), strict=True) if any(e > 0 for _, e in points) else ((), ())
        )
        ax.plot(counts, epsilons, color=color, linestyle=line, marker=marker, markersize=4, linewidth=1.6, label=label)
    if "pair" in curves:
        proved = "certified_sharp" if "certified_sharp" in curves else "certified"
        both = [
            (c, low, high) for (c, low), (_, high) in zip(curves["pair"], curves[proved], strict=True) if min(low, high) > 0
        ]
        if both:
            counts, low, high = zip(*both, strict=True)
            ax.fill_between(
                counts, low, high, color="#56B4E9", alpha=0.25, linewidth=0, label="the truth for the worst data set lies here"
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("rounds")
    ax.set_ylabel(f"ε at δ = {report.delta:.3g}")
    ax.set_title(f"{report.bounds[0].mechanism}, {report.adjacency} adjacency", fontsize=11)
    ax.grid(which="major", alpha=0.3)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False)
    return ax
