"""The ladder of bounds on one run, written so that no ε stands without its meaning.

>>> from opacus_shuffle.mechanisms import ShuffleGauss
>>> report = PrivacyReport([(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)], delta=1 / 60_000)
>>> [row["bound"] for row in report.to_dict()["bounds"]]
['local', 'certified', 'certified_sharp', 'paper', 'tight', 'secure_aggregation', 'central']
>>> round(report.best.epsilon, 5)
0.00309
"""

from __future__ import annotations

import dataclasses
import html
import math
import textwrap
from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants.bounds import (
    Guarantee,
    PrivacyBound,
    Rounds,
    baselines_of,
    bounds_of,
    compute_baseline,
    compute_bound,
)
from opacus_shuffle.rounding import round_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WEAK = 10.0
"""From here on an ε is not worth calling protection: the odds of any event may change by a factor of 22,000."""

LADDER = ("local", "certified", "certified_sharp", "paper", "tight", "secure_aggregation", "central")
"""From the least trust to the most; within one trust model, from what is proved to what is not."""

MEANINGS = {
    "local": "the reports as their owners send them, with no shuffler: the adversary sees who sends what",
    "certified": "shuffled reports, whatever the other records are (Gaussian clones)",
    "certified_sharp": "the same by a longer proof (truncated Gaussian clones)",
    "paper": "the papers' formula, for one pair of data sets: all other records report zero, one record at the clipping norm "
    "becomes zero; other pairs can be worse",
    "tight": "the exact value for that same pair",
    "secure_aggregation": "a protocol reveals the sum of a round's reports and who took part, but no single report",
    "central": "a trusted server picks the participants in secret and adds the noise of all reports to their sum",
}
WIDTH = 100


class PrivacyReport:
    """All bounds on one run of one mechanism, at one δ.

    Args:
        rounds: What ran: mechanisms with their numbers of rounds, at least one (see :meth:`ShuffleAccountant.rounds`).
        delta: δ in (0, 1).
        adjacency: ``"zero_out"``, or ``"replace"``, for which ``paper`` and ``tight`` have no value.
        emulated: The noise was added once to the sum (``local_noise=False``): the shuffle protocol is emulated.

    Attributes:
        bounds: The ladder's rungs, from the least trust to the most.

    Raises:
        ValueError: If an argument is out of range or nothing ran.
    """

    def __init__(self, rounds: Rounds, *, delta: float, adjacency: str = "zero_out", emulated: bool = False) -> None:
        if not rounds:
            raise ValueError("rounds must not be empty: there is nothing to report")
        self.rounds = tuple(rounds)
        self.delta = delta
        self.adjacency = adjacency
        self.emulated = emulated
        self.bounds = tuple(ladder(self.rounds, delta=delta, adjacency=adjacency))

    @property
    def best(self) -> PrivacyBound:
        """The smallest ε that is proved for every data set with the shuffler as the only trusted party: the one to quote."""
        kind = type(self.rounds[0][0])
        proved = [b for b in self.bounds if b.guarantee is Guarantee.PROVED and b.bound in bounds_of(kind)]
        return min(proved, key=lambda bound: bound.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first = self.bounds[0]
        return {
            "mechanism": first.mechanism,
            "delta": first.delta,
            "adjacency": first.adjacency,
            "rounds": first.rounds,
            "settings": [{**dataclasses.asdict(mechanism), "rounds": count} for mechanism, count in self.rounds],
            "emulated": self.emulated,
            "quote": self.best.bound,
            "bounds": [bound.to_dict() for bound in self.bounds],
        }

    def __str__(self) -> str:
        rows = [("trusted", "bound", "epsilon", "holds for", "status"), *self._cells()]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}"
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines = [self._title(), "", *lines, ""]
        for note in self._notes():
            lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same table for notebooks."""
        head = "".join(f"<th>{name}</th>" for name in ("trusted", "bound", "ε", "holds for", "status"))
        body = "".join(
            "<tr" + (" style='font-weight:bold'" if cells[1] == self.best.bound else "") + ">"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for cells in self._cells()
        )  # fmt: skip
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes())
        return (
            f"<p>{html.escape(self._title())}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<ul>{notes}</ul>"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """ε over the number of rounds for each bound, on logarithmic axes, what is not certified but tight shaded.

        Args:
            ax: Axes to draw on; by default a new figure's. Needs ``opacus_shuffle[plots]``.

        Returns:
            The axes. ``ax.figure.savefig(...)`` writes them.
        """
        from opacus_shuffle.accountants.report_figure import draw

        return draw(self, ax)

    def _title(self) -> str:
        first = self.bounds[0]
        rounds = f"{first.rounds:,} round{'s' if first.rounds > 1 else ''}"
        return f"{first.mechanism}, {rounds}, delta = {first.delta:.3g}, {first.adjacency} adjacency"

    def _cells(self) -> list[tuple[str, str, str, str, str]]:
        """The table's rows as text."""
        where = {Guarantee.PROVED: "every data set", Guarantee.PAIR: "one pair of data sets", Guarantee.ESTIMATE: "(estimate)"}
        return [(b.trusted, b.bound, round_up(b.epsilon), where[b.guarantee], b.guarantee.name) for b in self.bounds]

    def _notes(self) -> list[str]:
        """How to read the table, for someone who has never heard of the shuffle model."""
        best = self.best
        odds = f"{round_up(math.exp(best.epsilon) - 1, 2)}" if best.epsilon < 1 else ""
        meaning = f"by a fraction of {odds}" if odds else f"by a factor of {round_up(math.exp(min(best.epsilon, 700.0)), 2)}"
        weak = f", which protects next to nothing (above {WEAK:g})" if best.epsilon > WEAK else ""
        change = "vanishes" if self.adjacency == "zero_out" else "is replaced by any other"
        notes = [
            f"To quote: epsilon = {round_up(best.epsilon)} ({best.bound}){weak}. Whatever an adversary concludes from all "
            f"shuffled reports, its odds change {meaning} at most when one record {change}, except with probability delta."
        ]
        notes += [f"{b.bound}: {MEANINGS.get(b.bound, b.covers)}" for b in self.bounds]
        notes += [
            f"{b.bound}: the exact value lies between {b.lower:.4g} and {round_up(b.epsilon)}"
            for b in self.bounds
            if b.lower is not None and b.epsilon > 0
        ]
        used = {b.guarantee for b in self.bounds}
        notes += [f"{guarantee.name}: {guarantee.value}" for guarantee in Guarantee if guarantee in used]
        if self.adjacency != "zero_out":
            notes.append("paper, tight: the papers' pair is a zero_out pair, so they have no value here")
        if self.emulated:
            notes.append(
                "the noise was added once to the sum: this emulates locally noised reports, in batches of the expected size"
            )
        notes.append("simulated in one process, which sees every record: the reports and the shuffler")
        return notes


def ladder(rounds: Rounds, *, delta: float, adjacency: str = "zero_out") -> list[PrivacyBound]:
    """Every bound and baseline of the rounds' mechanism that has a value for this adjacency, in the order of ``LADDER``."""
    kind = type(rounds[0][0])
    names = [*bounds_of(kind), *baselines_of(kind)]
    found = []
    for name in sorted(names, key=lambda name: LADDER.index(name) if name in LADDER else len(LADDER)):
        if adjacency != "zero_out" and (name in ("paper", "tight") or (name == "central" and rounds_are_sampled(rounds))):
            continue
        if name in bounds_of(kind):
            found.append(compute_bound(rounds, delta=delta, bound=name, adjacency=adjacency))
        else:
            found.append(compute_baseline(rounds, delta=delta, baseline=name, adjacency=adjacency))
    return found


def rounds_are_sampled(rounds: Rounds) -> bool:
    """Whether any round leaves users out."""
    return any(mechanism.sample_rate < 1 for mechanism, _ in rounds)
