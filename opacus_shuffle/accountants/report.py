"""Reports every bound on one run, from the least trust to the most, each with its meaning.

>>> from opacus_shuffle.accountants.mechanisms import ShuffleGauss
>>> report = PrivacyReport([(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)], delta=1 / 60_000)
>>> [row["bound"] for row in report.to_dict()["bounds"]]
['local', 'certified', 'published', 'pair', 'secure_aggregation', 'central']
>>> round(report.best.epsilon, 5)
0.00293
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opacus_shuffle._version import __version__
from opacus_shuffle.accountants.bounds.registry import Bound, Rounds, entries_of, kind_of, ladder
from opacus_shuffle.accountants.communication import Communication, sent_per_user
from opacus_shuffle.accountants.lineage import first_rounds, rewound_sentence
from opacus_shuffle.core import extras
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, PrivacyBound, finite
from opacus_shuffle.core.rounding import round_down, round_up
from opacus_shuffle.core.tables import paragraph, text_table
from opacus_shuffle.core.validation import boolean, instance_of, integer, open_unit_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from opacus_shuffle.accountants.mechanism import Mechanism

WEAK = 10.0
"""From here on an ε is not worth calling protection: the probability of any event may change by a factor of 22,000."""

NO_GAIN = (
    "No gain from shuffling could be proved here: that takes more noise in each report (a noise "
    "multiplier above about 1) or "
    "more of them in a round."
)

HOW_IT_RAN = {
    "simulated": "by one run, which sees every record and plays the records' owners and the shuffler",
    "clients": "what is called a record is a client, with all that it holds",
    "selected": "the server drew who takes part, so that no gain from sampling holds against that server",
    "pytorch_noise": "the noise is PyTorch's own, as in Opacus; on a CPU its generator gives its state away to whoever sees "
    "enough noise alone; secure_mode=True, and every accountant of this package, draws from a "
    "cipher",
    "emulated": "the noise was added once to the sum, not to each report, in batches of the expected size",
}

POINTS = 9
"""Of each curve of the picture."""

_COMPARABLE = ("mechanism", "rounds", "delta", "adjacency", "adversary", "trusted")
"""What two values must have in common to speak of the same thing."""

QUOTED = {
    "noise_multiplier": "noise multiplier",
    "num_users": "users",
    "sample_rate": "sampling rate",
}
"""The fields of mechanisms that a statement tells, and how it calls them."""

HEAD = ("trusted", "bound", "epsilon", "holds for", "status")


class PrivacyReport:
    """All bounds on one run of one mechanism, at one δ.

    Args:
        rounds: What ran: mechanisms with their numbers of rounds, at least one (see
            :meth:`ShuffleAccountant.rounds`).
        delta: δ in (0, 1).
        adjacency: ``"zero_out"``, or ``"replace"``, for which some bounds have no value.
        orders: Rényi orders in place of the adaptive grid, for the bounds that use any.
        simulated: The rounds were run by one training run, in one process or several that trust
            each other.
        clients: What reports is a client that may hold many records, which are protected together.
        selected: The server drew who takes part in a round, in place of the clients' own coins.
        emulated: The noise was added once to the sum (``local_noise=False``): the shuffle protocol
            is emulated.
        pytorch_noise: The noise came from PyTorch's own generator, as in Opacus.
        predictable: Seeds and generators that a user has passed, with which others can draw the
            noise again.
        sent: What one user has sent; by default what the mechanism says.
        rewound: Rounds that ran besides and were left out, because a checkpoint was loaded with
            ``allow_rewind=True``.
        max_grad_norms: What one record's gradient was clipped to, least first, for the statement;
            none if it is not known.
        num_users: n, of the whole data set; by default the users of a round.
        unchecked: Files from which rounds were loaded that nothing but these files vouches for.

    Attributes:
        bounds: The ladder's rungs, from the least trust to the most.
        sent: What one user sends; None where the mechanism does not say.

    Raises:
        ValueError: If an argument is out of range or nothing ran.
    """

    def __init__(
        self,
        rounds: Rounds,
        *,
        delta: float,
        adjacency: str = "zero_out",
        orders: Iterable[float] | None = None,
        simulated: bool = False,
        clients: bool = False,
        selected: bool = False,
        emulated: bool = False,
        pytorch_noise: bool = False,
        sent: Communication | None = None,
        rewound: int = 0,
        predictable: Sequence[str] = (),
        max_grad_norms: Sequence[float] = (),
        num_users: int | None = None,
        unchecked: Sequence[str] = (),
    ) -> None:
        self.kind = self._kind_of(rounds)
        self.rounds = tuple(
            (mechanism, integer("number of rounds", count)) for mechanism, count in rounds
        )
        self.delta = open_unit_interval("delta", delta)
        self.adjacency = Adjacency(adjacency)
        self.simulated, self.clients = boolean("simulated", simulated), boolean("clients", clients)
        self.selected, self.emulated = boolean("selected", selected), boolean("emulated", emulated)
        self.pytorch_noise, self.max_grad_norms = (
            boolean("pytorch_noise", pytorch_noise),
            tuple(max_grad_norms),
        )
        self.num_users = None if num_users is None else integer("num_users", num_users)
        self.rewound = integer("rewound", rewound, minimum=0)
        self.predictable, self.unchecked = tuple(predictable), tuple(unchecked)
        self.orders = orders if orders is None else tuple(orders)
        self.sent = sent_per_user(self.rounds) if sent is None else sent
        self.bounds = tuple(self._ladder(self.rounds))

    def _kind_of(self, rounds: Rounds) -> type[Mechanism]:
        """The one kind of rounds that ran."""
        return kind_of(rounds)

    def _entries(self) -> dict[str, Bound]:
        """Maps the name of every bound to its entry, whether it has a value here or not."""
        return {entry.name: entry for entry in entries_of(self.kind)}

    def _ladder(self, rounds: Rounds) -> list[PrivacyBound]:
        """Computes every bound on some rounds."""
        return ladder(rounds, delta=self.delta, adjacency=self.adjacency, orders=self.orders)

    @property
    def best(self) -> PrivacyBound:
        """The one to quote: the smallest ε of the mechanism itself that is proved for every data set."""
        entries = self._entries()
        own = [bound for bound in self.bounds if not entries[bound.bound].baseline]
        proved = [bound for bound in own if bound.guarantee is Guarantee.PROVED]
        return min(proved or own, key=lambda bound: bound.epsilon)

    @property
    def noisiest(self) -> Mechanism:
        """The round with the most noise on its mean gradient, or on its sum where no number of users is known."""
        return max(
            (mechanism for mechanism, _ in self.rounds),
            key=lambda one: one.noise_of_mean or one.noise_of_sum,
        )

    def statement(self, model: str = "The model") -> str:
        """Writes what a paper or a model card should say: the ε to quote, its meaning, its proof, and what voids it.

        Args:
            model: What the paper calls the trained model; it begins the sentence.
        """
        best = self.best
        ran = f"{instance_of('model', model, (str,))} was trained by {best.rounds:,} rounds of {self.kind.name} "
        ran += f"({self._settings()})."
        if best.guarantee is Guarantee.PROVED:
            subject = (
                "With secret randomness, this training would be"
                if self.predictable
                else "This training is"
            )
            promised = f"{subject} {promise(best)}, against an adversary who {best.adversary}"
            promised += (
                f": compared with a run in which {self._changed()} ({best.bound}; {self._cited()})."
            )
        else:
            promised = f"Its epsilon = {round_up(best.epsilon)} at delta = {best.delta:.3g} ({best.bound}) is "
            promised += (
                f"{best.guarantee.value}: it is about {best.covers}, trusting {best.trusted}."
            )
        notes = [
            f"An epsilon above {WEAK:g} protects next to nothing." if best.epsilon > WEAK else ""
        ]
        notes += [
            f"{name.replace('_', ' ').capitalize()}: {text}."
            for name, text in HOW_IT_RAN.items()
            if getattr(self, name)
        ]
        notes += [self._delta_note(), rewound_sentence(self.rewound), on_trust(self.unchecked)]
        warning = not_private(self.predictable) if self.predictable else ""
        return " ".join(filter(None, [ran, warning, promised, *notes]))

    def _settings(self) -> str:
        """The numbers that a reader needs to repeat the accounting, each with its range where it changed."""
        said = []
        for field in dataclasses.fields(self.rounds[0][0]):
            values = (
                sorted({getattr(mechanism, field.name) for mechanism, _ in self.rounds})
                if field.name in QUOTED
                else []
            )
            if values:
                numbers = [
                    f"{value:,}" if isinstance(value, int) else f"{value:.6g}" for value in values
                ]
                said.append(
                    f"{QUOTED[field.name]} {' to '.join(dict.fromkeys([numbers[0], numbers[-1]]))}"
                )
        if self.num_users and self.num_users != max(
            getattr(mechanism, "num_users", 0) for mechanism, _ in self.rounds
        ):
            said.append(f"a data set of {self.num_users:,} records")
        if norms := [f"{value:g}" for value in self.max_grad_norms]:
            said.append(
                "each record's gradient clipped to norm "
                f"{' to '.join(dict.fromkeys([norms[0], norms[-1]]))}"
            )
        return ", ".join(said)

    def _cited(self) -> str:
        """Where the proof of the ε to quote is written down."""
        cites = self._entries()[self.best.bound].cites
        return ", ".join(filter(None, [self.best.proof, cites, f"opacus_shuffle {__version__}"]))

    def _changed(self) -> str:
        """What the adjacency compares with."""
        return (
            self.kind.zeroed
            if self.adjacency is Adjacency.ZERO_OUT
            else "one record is any other record"
        )

    def _delta_note(self) -> str:
        """A sentence where δ is so large that it allows to publish a record outright; else nothing."""
        users = self.num_users or max(
            getattr(mechanism, "num_users", 1) for mechanism, _ in self.rounds
        )
        if users <= 1 or self.delta <= 1 / users:
            return ""
        return (
            f"delta = {self.delta:.3g} is above 1/n = {1 / users:.3g}: it would allow a run to "
            "publish a random record; ask "
            "for an epsilon at a smaller delta."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first = self.bounds[0]
        return {
            "mechanism": first.mechanism,
            "delta": first.delta,
            "adjacency": str(first.adjacency),
            "rounds": first.rounds,
            "settings": [
                {**finite(dataclasses.asdict(mechanism)), "rounds": count}
                for mechanism, count in self.rounds
            ],
            "simulated": self.simulated,
            "clients": self.clients,
            "selected": self.selected,
            "emulated": self.emulated,
            "pytorch_noise": self.pytorch_noise,
            "rewound": self.rewound,
            "private": not self.predictable,
            "predictable": list(self.predictable),
            "unchecked": list(self.unchecked),
            "quote": self.best.bound,
            "noise_of_sum": self.noisiest.noise_of_sum,
            "noise_of_mean": self.noisiest.noise_of_mean,
            **(self.sent.to_dict() if self.sent else {}),
            "bounds": [bound.to_dict() for bound in self.bounds],
        }

    def __repr__(self) -> str:
        if self.predictable:
            return f"<PrivacyReport: {self._title()}; not private: {', '.join(self.predictable)}>"
        worth = "to quote" if self.best.guarantee is Guarantee.PROVED else self.best.guarantee.value
        return f"<PrivacyReport: {self._title()}; {worth}: epsilon = {round_up(self.best.epsilon)} ({self.best.bound})>"

    def __str__(self) -> str:
        table = text_table(HEAD, self._cells(), right=("epsilon",))
        glossary = self._glossary()
        indent = max(len(term) for term, _ in glossary) + 2
        lines = [self._title(), "", *table, "", *paragraph(self._headline()), ""]
        for sentence in self._notes():
            lines += [*paragraph(sentence), ""]
        for term, text in glossary:
            lines += paragraph(text, term=term, indent=indent)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same text for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws ε over the rounds for each bound, on logarithmic axes, the gap between one pair and certified shaded.

        Args:
            ax: Axes to draw on; by default a new figure's. Needs ``opacus_shuffle[plots]``.

        Returns:
            The axes. ``ax.figure.savefig(...)`` writes them.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise ImportError(extras.missing("plot", "matplotlib", "plots")) from error
            ax = plt.subplots(figsize=(9.0, 4.6), layout="constrained")[1]
        curves = {
            name: [point for point in points if point[1] > 0]
            for name, points in self.curves().items()
        }
        for name, points in curves.items():
            entry = self._entries()[name]
            style = entry.style
            ax.plot(
                [count for count, _ in points],
                [epsilon for _, epsilon in points],
                color=style.color,
                linestyle=style.line,
                marker=style.marker,
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
        scale = "log" if any(curves.values()) else "linear"  # where every epsilon is 0
        ax.set(xscale="log", yscale=scale, xlabel="rounds", ylabel=f"ε at δ = {self.delta:.3g}")
        ax.set_title(f"{self.kind.name}, {self.adjacency} adjacency", fontsize=11)
        ax.grid(which="major", alpha=0.3)
        ax.legend(
            fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, frameon=False
        )
        return ax

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Returns for each bound (rounds, ε) after the first 1, …, T rounds of the history, geometrically spaced."""
        total = sum(count for _, count in self.rounds)
        curves: dict[str, list[tuple[int, float]]] = {}
        for count in sorted({round(value) for value in np.geomspace(1, total, POINTS)}):
            for bound in self._ladder(first_rounds(self.rounds, count)):
                curves.setdefault(bound.bound, []).append((count, bound.epsilon))
        return curves

    def _title(self) -> str:
        first = self.bounds[0]
        rounds = f"{first.rounds:,} round{'s' if first.rounds > 1 else ''}"
        return (
            f"{first.mechanism}, {rounds}, delta = {first.delta:.3g}, {first.adjacency} adjacency"
        )

    def _cells(self) -> list[tuple[str, str, str, str, str]]:
        """The table's rows as text."""
        where = {Guarantee.PAIR: "one pair of data sets", Guarantee.ESTIMATE: "(estimate)"}
        return [
            (
                b.trusted.removeprefix("the "),
                b.bound,
                round_up(b.epsilon),
                where.get(b.guarantee, b.covers),
                b.guarantee.name,
            )
            for b in self.bounds
        ]

    def _headline(self) -> str:
        """The number to quote, and what it means to someone who has never heard of the shuffle model."""
        best = self.best
        quote = f"To quote: epsilon = {round_up(best.epsilon)} at delta = {best.delta:.3g} ({best.bound})"
        if best.guarantee is not Guarantee.PROVED:
            return f"{quote.removeprefix('To quote: ')}, {best.guarantee.value}: it is about {best.covers}."
        if best.epsilon > WEAK:
            weak = f"{quote}, which protects next to nothing (above {WEAK:g})."
            gained = all(
                bound.bound != "local" or best.epsilon < bound.epsilon for bound in self.bounds
            )
            return weak if gained else f"{weak} {NO_GAIN}"
        factor = math.exp(best.epsilon)
        change = (
            f"{round_up(100 * (factor - 1), 2)} %"
            if factor < 2
            else f"a factor of {round_up(factor, 2)}"
        )
        fate = "vanishes" if self.adjacency is Adjacency.ZERO_OUT else "is replaced by any other"
        return (
            f"{quote}. The probability of whatever someone concludes from {self.kind.released} "
            "changes by "
            f"{change} at most, plus delta, when one record {fate}."
        )

    def _notes(self) -> list[str]:
        """What was left out, estimates that are below what one pair of data sets has for certain, and what users send."""
        notes = [contradiction(estimate, pair) for estimate in self.bounds for pair in self.bounds]
        notes[:0] = [rewound_sentence(self.rewound), on_trust(self.unchecked)]
        if self.predictable:
            notes.insert(0, not_private(self.predictable))
        notes += [self._delta_note(), self._noise(), str(self.sent or "")]
        return [sentence for sentence in notes if sentence]

    def _noise(self) -> str:
        """How noisy the gradient is that training steps by, which the learning rate has to fit."""
        most, which = self.noisiest, "a" if len(self.rounds) == 1 else "the noisiest"
        if most.noise_of_mean is None:  # of rounds of an accountant that knows no number of users
            return ""
        return (
            f"Noise on one coordinate of {which} round's sum: {most.noise_of_sum:.3g} clipping "
            "norms, as DP-SGD has with that "
            f"noise multiplier; of the mean of {most.expected_reports:,.0f} reports: "
            f"{most.noise_of_mean:.3g}. A learning rate "
            "that was found with less noise is too high."
        )

    def _glossary(self) -> list[tuple[str, str]]:
        """What the words in the table mean."""
        terms = []
        for bound in self.bounds:
            text = bound.meaning
            if bound.proof:
                text += f"; the proof that gives it: {bound.proof}"
            if bound.lower and bound.epsilon > 0:
                text += f" (between {round_down(bound.lower)} and {round_up(bound.epsilon)})"
            terms.append((bound.bound, text))
        if left_out := [
            name for name in self._entries() if all(bound.bound != name for bound in self.bounds)
        ]:
            terms.append(
                (", ".join(left_out), f"left out: no value for {self.adjacency} adjacency")
            )
        terms.append((self.adjacency, f"compared with a run in which {self._changed()}"))
        used = {bound.guarantee for bound in self.bounds}
        terms += [(guarantee.name, guarantee.value) for guarantee in Guarantee if guarantee in used]
        return terms + [(name, text) for name, text in HOW_IT_RAN.items() if getattr(self, name)]


def promise(bound: PrivacyBound) -> str:
    """Returns what a proved ε promises, in the words that end a sentence beginning with "training is".

    Raises:
        ValueError: If ε is not proved for every data set: there is no such sentence then.
    """
    if bound.guarantee is not Guarantee.PROVED:
        raise ValueError(
            f"bound must be proved for every data set, got {bound.bound!r}, "
            f"{bound.guarantee.value}: take "
            "'certified', or Opacus's 'prv' of Poisson samples"
        )
    name = "zero-out" if bound.adjacency is Adjacency.ZERO_OUT else "replacement"
    alone = "nobody" if bound.trusted == "nobody" else f"{bound.trusted} alone"
    return (
        f"({round_up(bound.epsilon)}, {bound.delta:.3g})-differentially private for every data set "
        f"in {name} adjacency, "
        f"trusting {alone}"
    )


def not_private(predictable: Sequence[str]) -> str:
    """Returns a warning about a run whose randomness others can draw again."""
    return (
        f"This run is not private: whoever knows {' or '.join(predictable)} can draw its "
        "randomness again and take it off. "
        "Every ε of it is that of the same run with secret randomness: for experiments alone."
    )


def on_trust(unchecked: Sequence[str]) -> str:
    """Returns a warning about rounds that were loaded from files that may say anything; empty if there are none."""
    if not unchecked:
        return ""
    return f"Rounds of this account were loaded from {' and from '.join(unchecked)}: every epsilon here takes that on trust."


def contradiction(estimate: PrivacyBound, pair: PrivacyBound) -> str:
    """Returns a warning where an estimate is below what one pair of data sets has for certain; else nothing.

    Nothing is said of two values that are about different adversaries, data sets, rounds or δ: they
    contradict nothing.
    """
    if (
        estimate.guarantee is not Guarantee.ESTIMATE
        or pair.lower is None
        or estimate.epsilon >= pair.lower
    ):
        return ""
    if any(getattr(estimate, name) != getattr(pair, name) for name in _COMPARABLE):
        return ""
    return (
        f"{estimate.bound} ({round_up(estimate.epsilon)}) is no upper bound here: the pair of data "
        f"sets of {pair.bound!r} has "
        f"epsilon of at least {round_down(pair.lower)} at this delta."
    )
