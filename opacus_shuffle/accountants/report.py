"""Reports every bound on a run with its meaning, and warns about weaknesses of the run.

>>> from opacus_shuffle.accountants.mechanisms import ShuffleGauss
>>> week = [(ShuffleGauss(noise_multiplier=9.48, num_users=60_000), 7)]
>>> report = PrivacyReport(week, delta=1 / 60_000)
>>> [row["bound"] for row in report.to_dict()["bounds"]]
['local', 'certified', 'published', 'pair', 'secure_aggregation', 'central']
>>> round(report.best.epsilon, 5)
0.00293
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opacus_shuffle._version import __version__
from opacus_shuffle.accountants.bounds.registry import (
    Bound,
    Rounds,
    compute_bound,
    entries_of,
    ladder,
    mechanism_type,
)
from opacus_shuffle.accountants.deployment_registry import registry_statement
from opacus_shuffle.accountants.history import first_rounds, rewound_sentence
from opacus_shuffle.accountants.mechanism import Communication, sent_per_user
from opacus_shuffle.analysis import gaussian
from opacus_shuffle.core import imports
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, PrivacyBound, finite
from opacus_shuffle.core.picture_styles import BOUND_STYLES
from opacus_shuffle.core.rounding import plural, round_down, round_up
from opacus_shuffle.core.tables import paragraph, text_table
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    one_of,
    open_unit_interval,
    reject_unknown,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from opacus_shuffle.accountants.mechanism import Mechanism

WEAK = 10.0
"""Above this ε there is almost no protection: probabilities may change by a factor of 22,000."""

STEP_DELTA = 1e-5
"""δ at which a single step is judged, before the user has chosen one."""

NO_GAIN = (
    "No gain from shuffling could be proved here: that takes more noise in each report (a noise "
    "multiplier above about 1) or more of them in a round."
)

HOW_IT_RAN = {
    "simulated": "by one run, which sees every record and simulates the records' owners and the "
    "shuffler",
    "clients": "a record is a client, with all that it holds",
    "selected": "the server drew the participants, so no gain from sampling holds against that "
    "server",
    "pytorch_noise": "the noise is from PyTorch's generator, as in Opacus; on a CPU enough noise "
    "alone reveals the generator's state; secure_mode=True, and every accountant of this package, "
    "draws from a cipher",
    "numpy_noise": "the noise is from NumPy's global generator, which is no cipher: 624 of its "
    "words determine all others, and its seed determines the noise",
    "emulated": "the noise was added once to the sum, not to each report, in batches of the "
    "expected size",
}

UNCHECKED = {
    "own_batches": "Poisson samples, which batches with poisson_sampling=False are not",
    "seen_norms": "clipping norms that nobody sees, while those of clipping='adaptive' reveal "
    "something about the batch sizes",
    "skipped_batches": "the assumption that skipped batches were skipped independently of their "
    "content",
    "stock_checkpoint": "a checkpoint of Opacus's own engine, which says neither how its batches "
    "were drawn nor whether it was changed",
    "pickled_file": "a file read with allow_pickle=True, which could run code, and so change "
    "anything",
}
"""What an account may rest on without a check, by its name in checkpoints."""

POINTS = 9
"""Points of each curve of the picture."""

_COMPARABLE = ("mechanism", "rounds", "delta", "adjacency", "adversary", "trusted")
"""The fields that two comparable values have in common."""

QUOTED = {
    "noise_multiplier": "noise multiplier",
    "num_users": "users",
    "sample_rate": "sampling rate",
}
"""The fields of mechanisms in a statement, and their names there."""

HEAD = ("trusted", "bound", "epsilon", "holds for", "status")


class PrivacyReport:
    """All bounds on one run of one mechanism, at one δ.

    Args:
        rounds: Mechanisms with their numbers of rounds, at least one (see
            :meth:`ShuffleAccountant.rounds`).
        delta: δ in (0, 1).
        adjacency: ``"zero_out"``, or ``"replace"``, for which some bounds have no value.
        orders: Rényi orders in place of the adaptive grid, for the bounds that use any.
        simulated: Whether one training run ran the rounds, in one process or in several that trust
            each other.
        clients: Whether a report is that of a client, whose records are protected together.
        selected: Whether the server drew the participants, instead of the clients' coins.
        emulated: Whether the noise was added once to the sum (``local_noise=False``), which
            emulates the shuffle protocol.
        pytorch_noise: Whether the noise came from PyTorch's generator, as in Opacus.
        numpy_noise: Whether the noise came from NumPy's global generator, as in Flower.
        predictable: Seeds and generators passed by a user, with which others can draw the noise
            again.
        sent: The traffic of one user; by default that of the mechanism.
        rewound: How many accounted rounds were replaced by a load with ``allow_rewind=True``, or by
            a history that was set by hand.
        max_grad_norms: The clipping norms of a record's gradient in ascending order, for the
            statement; empty if they are unknown.
        num_users: n, of the whole data set; by default the users of a round.
        unchecked: Assumptions behind every ε that nothing verifies, such as the content of a loaded
            file, or that batches were skipped independently of their content.
        ran: The number of rounds that ran so far, if begun epochs are accounted in full; by default
            all.
        entries: The bounds to report; by default all of the rounds' mechanism.

    Attributes:
        bounds: The value of every bound, from the least trust to the most.
        sent: The traffic of one user; None if the mechanism does not define it.

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
        numpy_noise: bool = False,
        sent: Communication | None = None,
        rewound: int = 0,
        predictable: Sequence[str] = (),
        max_grad_norms: Sequence[float] = (),
        num_users: int | None = None,
        unchecked: Sequence[str] = (),
        ran: int | None = None,
        entries: Sequence[Bound] | None = None,
    ) -> None:
        self.entries = entries_of(mechanism_type(rounds)) if entries is None else list(entries)
        self.rounds = tuple(rounds)
        self.mechanism_class: type[Mechanism] = type(self.rounds[0][0])
        self.delta = open_unit_interval("delta", delta)
        self.adjacency = Adjacency(adjacency)
        self.simulated, self.clients = boolean("simulated", simulated), boolean("clients", clients)
        self.selected, self.emulated = boolean("selected", selected), boolean("emulated", emulated)
        self.pytorch_noise = boolean("pytorch_noise", pytorch_noise)
        self.numpy_noise = boolean("numpy_noise", numpy_noise)
        self.max_grad_norms = tuple(max_grad_norms)
        self.num_users = None if num_users is None else integer("num_users", num_users)
        self.rewound = integer("rewound", rewound, minimum=0)
        self.predictable, self.unchecked = tuple(predictable), tuple(unchecked)
        self.orders = None if orders is None else tuple(orders)
        self.bounds = tuple(self._ladder(self.rounds))
        self.ran = integer("ran", ran or self.bounds[0].rounds, maximum=self.bounds[0].rounds)
        self.sent = sent_per_user(self.rounds) if sent is None else sent

    def _ladder(self, rounds: Rounds) -> list[PrivacyBound]:
        """Computes every bound on the given rounds."""
        return ladder(
            rounds,
            delta=self.delta,
            adjacency=self.adjacency,
            orders=self.orders,
            entries=self.entries,
        )

    @property
    def best(self) -> PrivacyBound:
        """The ε to quote: the mechanism's smallest one that is proved for every data set."""
        baselines = [entry.name for entry in self.entries if entry.baseline]
        of_mechanism = [bound for bound in self.bounds if bound.bound not in baselines]
        proved = [bound for bound in of_mechanism if bound.guarantee is Guarantee.PROVED]
        return min(proved or of_mechanism, key=lambda bound: bound.epsilon)

    @property
    def noisiest(self) -> Mechanism:
        """The round with the most noise on its mean gradient."""
        return max(
            (mechanism for mechanism, _ in self.rounds),
            key=lambda mechanism: mechanism.noise_of_mean,
        )

    def statement(
        self, model: str = "The model", *, format: str = "sentence", **answers: Any
    ) -> str:
        """Returns a statement for a paper, a model card or the registry of deployments.

        It has the ε to quote, its meaning, its proof, and what voids it.

        Args:
            model: The name of the trained model, with which the sentence begins.
            format: ``"sentence"``, or ``"registry"``: a YAML entry for the registry of
                differential-privacy deployments.
            **answers: Answers for the registry that only a person knows, by the keywords of
                :data:`~opacus_shuffle.accountants.deployment_registry.QUESTIONS`. Open questions
                are marked ``<ask>`` and counted.

        Raises:
            ValueError: If an argument is out of range or unknown.
        """
        instance_of("model", model, (str,))
        if one_of("format", format, ("sentence", "registry")) == "registry":
            return registry_statement(
                self, model, answers, settings=self._settings(), compared=self._changed()
            )
        reject_unknown("statement (answers are for format='registry')", answers)
        best = self.best
        ran = (
            f"{model} was trained by {plural(best.rounds, 'round')} of "
            f"{self.mechanism_class.name} ({self._settings()})."
        )
        if best.guarantee is Guarantee.PROVED:
            subject = (
                "With secret randomness, this training would be"
                if self.predictable
                else "This training is"
            )
            (cites,) = (entry.cites for entry in self.entries if entry.name == best.bound)
            cited = filter(None, [best.proof, cites, f"opacus_shuffle {__version__}"])
            promised = (
                f"{subject} {promise(best)}, against an adversary who {best.adversary}: compared "
                f"with a run in which {self._changed()} ({best.bound}; {', '.join(cited)}). "
                f"Epsilon is of all rounds together: {best.meaning}."
            )
        else:
            promised = (
                f"Its epsilon = {round_up(best.epsilon)} at delta = {best.delta:.3g} "
                f"({best.bound}) is {best.guarantee.value}: it is about {best.covers}, trusting "
                f"{best.trusted}."
            )
        notes = [
            f"An epsilon above {WEAK:g} offers almost no protection." if best.epsilon > WEAK else ""
        ]
        notes += [
            f"{name.replace('_', ' ').capitalize()}: {text}."
            for name, text in HOW_IT_RAN.items()
            if getattr(self, name)
        ]
        notes += [
            self._ran_note(),
            large_delta(self.delta, self.num_users or self._largest_round),
            rewound_sentence(self.rewound),
            on_trust(self.unchecked),
        ]
        return " ".join(filter(None, [ran, not_private(self.predictable), promised, *notes]))

    def _settings(self) -> str:
        """Returns the numbers that a reader needs to repeat the accounting, with their ranges."""
        said = []
        for name, words in QUOTED.items():
            unknown = {1} if name == "num_users" else set()  # 1 stands for an unknown number
            if values := {getattr(mechanism, name) for mechanism, _ in self.rounds} - unknown:
                said.append(f"{words} {_range(values)}")
        if self.num_users and self.num_users != self._largest_round:
            said.append(f"a data set of {self.num_users:,} records")
        if self.max_grad_norms:
            said.append(f"each record's gradient clipped to norm {_range(self.max_grad_norms)}")
        return ", ".join(said)

    @property
    def _largest_round(self) -> int:
        """The most users of any round; 1 if their number is unknown."""
        return max(mechanism.num_users for mechanism, _ in self.rounds)

    def _changed(self) -> str:
        """Returns the run that the adjacency compares with, in words."""
        return (
            self.mechanism_class.zeroed
            if self.adjacency is Adjacency.ZERO_OUT
            else "one record is any other record"
        )

    def _ran_note(self) -> str:
        """Returns a sentence if fewer rounds ran than are accounted; else ""."""
        ran, accounted = (plural(rounds, "round") for rounds in (self.ran, self.bounds[0].rounds))
        return f"{ran} ran; begun epochs are accounted in full: {accounted}." * (ran != accounted)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first = self.bounds[0]
        return {
            "mechanism": first.mechanism,
            "delta": first.delta,
            "adjacency": str(first.adjacency),
            "rounds": first.rounds,
            "ran": self.ran,
            "settings": [
                {**finite(dataclasses.asdict(mechanism)), "rounds": count}
                for mechanism, count in self.rounds
            ],
            "simulated": self.simulated,
            "clients": self.clients,
            "selected": self.selected,
            "emulated": self.emulated,
            "pytorch_noise": self.pytorch_noise,
            "numpy_noise": self.numpy_noise,
            "rewound": self.rewound,
            "private": not self.predictable,
            "predictable": list(self.predictable),
            "unchecked": list(self.unchecked),
            "quote": self.best.bound,
            "noise_of_sum": self.noisiest.noise_of_sum,
            "noise_of_mean": self.noisiest.noise_of_mean if self._largest_round > 1 else None,
            **(self.sent.to_dict() if self.sent else {}),
            "bounds": [bound.to_dict() for bound in self.bounds],
        }

    def __repr__(self) -> str:
        """Returns the whole text, which notebooks show as well."""
        first, glossary = self.bounds[0], self._glossary()
        title = (
            f"{first.mechanism}, {plural(first.rounds, 'round')}, "
            f"delta = {first.delta:.3g}, {first.adjacency} adjacency"
        )
        where = {Guarantee.PAIR: "one pair of data sets", Guarantee.ESTIMATE: "(estimate)"}
        rows = [
            (
                bound.trusted.removeprefix("the "),
                bound.bound,
                round_up(bound.epsilon),
                where.get(bound.guarantee, bound.covers),
                bound.guarantee.name,
            )
            for bound in self.bounds
        ]
        table = text_table(HEAD, rows, right=("epsilon",))
        indent = max(len(term) for term, _ in glossary) + 2
        lines = [title, "", *table, "", *paragraph(self._headline()), ""]
        notes = [
            not_private(self.predictable),
            rewound_sentence(self.rewound),
            on_trust(self.unchecked),
            *(contradiction(estimate, pair) for estimate in self.bounds for pair in self.bounds),
            self._ran_note(),
            large_delta(self.delta, self.num_users or self._largest_round),
            self._noise(),
            str(self.sent or ""),
        ]
        for sentence in filter(None, notes):
            lines += [*paragraph(sentence), ""]
        for term, text in glossary:
            lines += paragraph(text, term=term, indent=indent)
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots ε over the rounds for each bound, on logarithmic axes.

        The rounds are the first 1, …, T of the history, geometrically spaced. The gap between
        ``pair`` and ``certified`` is shaded.

        Args:
            ax: The axes; by default those of a new figure. Needs ``opacus_shuffle[plots]``.

        Returns:
            The axes. Save them with ``ax.figure.savefig(...)``.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise ImportError(imports.missing_extra("plot", "matplotlib", "plots")) from error
            ax = plt.subplots(figsize=(7.0, 5.6), layout="constrained")[1]
        total = sum(count for _, count in self.rounds)
        curves: dict[str, dict[int, float]] = {entry.name: {} for entry in self.entries}
        for count in sorted({round(value) for value in np.geomspace(1, total, POINTS)}):
            for bound in self._ladder(first_rounds(self.rounds, count)):
                if bound.epsilon > 0:
                    curves[bound.bound][count] = bound.epsilon
        for entry in self.entries:
            points = curves[entry.name]
            words = (entry.legend or entry.covers) if points else "nothing above 0 to draw"
            label = textwrap.fill(f"{entry.name}: {words}", 44)
            style: dict[str, Any] = {"markersize": 4, "linewidth": 1.6, "color": "#444444"}
            style |= BOUND_STYLES.get(entry.name, {})
            ax.plot(list(points), list(points.values()), label=label, **style)
        low, high = curves.get("pair", {}), curves.get("certified", {})
        if both := [count for count in low if count in high]:
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
        title = f"{self.mechanism_class.name}, {self.adjacency} adjacency"
        ax.set_title("\n".join([title, *textwrap.wrap(self._settings(), 80)]), fontsize=10)
        ax.grid(which="major", alpha=0.3)
        ax.legend(
            fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False
        )
        return ax

    def _headline(self) -> str:
        """Returns the number to quote, explained for readers new to differential privacy."""
        best = self.best
        spent = f"epsilon = {round_up(best.epsilon)} at delta = {best.delta:.3g} ({best.bound})"
        if best.guarantee is not Guarantee.PROVED:
            return f"{spent}, {best.guarantee.value}: it is about {best.covers}."
        quote = f"To quote: {spent}"
        if best.epsilon > WEAK:
            weak = f"{quote}, which is almost no protection (above {WEAK:g})."
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
        return (
            f"{quote}. The probability of any conclusion from {self.mechanism_class.released} "
            f"changes by at most {change}, plus delta, when {self._changed()}."
        )

    def _noise(self) -> str:
        """Returns a sentence on the noise of the gradients, to which the learning rate must fit."""
        most, which = self.noisiest, "a" if len(self.rounds) == 1 else "the noisiest"
        if self._largest_round <= 1:  # the number of users is unknown
            return ""
        return (
            f"Noise on one coordinate of {which} round's sum: {most.noise_of_sum:.3g} clipping "
            "norms, as DP-SGD has with that noise multiplier; of the mean of "
            f"{most.expected_reports:,.0f} reports: {most.noise_of_mean:.3g}. A learning rate that "
            "was found with less noise is too high."
        )

    def _glossary(self) -> list[tuple[str, str]]:
        """Returns the words of the table with their meanings."""
        terms = []
        for bound in self.bounds:
            text = bound.meaning
            if bound.proof:
                text += f"; the proof that gives it: {bound.proof}"
            if bound.lower and bound.epsilon > 0:
                text += f" (between {round_down(bound.lower)} and {round_up(bound.epsilon)})"
            terms.append((bound.bound, text))
        names = [entry.name for entry in self.entries]
        if left_out := [name for name in names if name not in dict(terms)]:
            terms.append(
                (
                    ", ".join(left_out),
                    f"left out: no value for these rounds, {self.adjacency} adjacency",
                )
            )
        terms.append((self.adjacency, f"compared with a run in which {self._changed()}"))
        used = {bound.guarantee for bound in self.bounds}
        terms += [(guarantee.name, guarantee.value) for guarantee in Guarantee if guarantee in used]
        return terms + [(name, text) for name, text in HOW_IT_RAN.items() if getattr(self, name)]


def _range(values: Collection[float]) -> str:
    """Returns a number as text, or the smallest and the largest of several."""
    ends = [
        f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        for value in (min(values), max(values))
    ]
    return " to ".join(dict.fromkeys(ends))


def promise(bound: PrivacyBound) -> str:
    """Returns the promise of a proved ε, as the end of a sentence that begins with "training is".

    Raises:
        ValueError: If ε is not proved for every data set.
    """
    if bound.guarantee is not Guarantee.PROVED:
        raise ValueError(
            f"bound must be proved for every data set, got {bound.bound!r}, "
            f"{bound.guarantee.value}: take 'certified', or Opacus's 'prv' of Poisson samples"
        )
    name = "zero-out" if bound.adjacency is Adjacency.ZERO_OUT else "replacement"
    alone = "nobody" if bound.trusted == "nobody" else f"{bound.trusted} alone"
    return (
        f"({round_up(bound.epsilon)}, {bound.delta:.3g})-differentially private for every data set "
        f"in {name} adjacency, trusting {alone}"
    )


def large_delta(delta: float, users: int | None) -> str:
    """Returns a warning if δ would allow a run to publish a record; else ""."""
    if not users or users <= 1 or delta <= 1 / users:
        return ""
    return (
        f"delta = {delta:.3g} is above 1/n = {1 / users:.3g}: it would allow a run to publish a "
        "random record; ask for an epsilon at a smaller delta."
    )


def drowned(noise_of_mean: float, steps: int) -> str:
    """Returns a warning if the noise of all rounds exceeds the sum of their gradients; else "".

    Args:
        noise_of_mean: Noise on one coordinate of a round's mean gradient, in clipping norms.
        steps: The number of rounds.
    """
    return (
        f"noise on the mean gradient is {noise_of_mean:.3g} clipping norms in each of {steps:,} "
        "rounds: nothing can be learned; ask for a larger target_epsilon, or train on more records"
    ) * (steps < noise_of_mean**2)


def weak_noise(mechanism: Mechanism, noise_of_sum: float | None = None) -> str:
    """Returns a warning if a single step offers almost no protection; else "".

    Args:
        mechanism: One round of reports with noise of their own.
        noise_of_sum: The noise multiplier that was passed, if it is that of the sum and likely
            meant for each report; None with ``local_noise=True``.
    """
    sigma = mechanism.noise_multiplier
    # Without a shuffler ε is never smaller, and it takes no time to compute.
    if gaussian.compute_epsilon(mu=1 / sigma, delta=STEP_DELTA) <= WEAK:
        return ""
    epsilon = compute_bound([(mechanism, 1)], delta=STEP_DELTA).epsilon
    if epsilon <= WEAK:
        return ""
    cost = f"a single step costs epsilon = {round_up(epsilon)} (delta = {STEP_DELTA:g})"
    if noise_of_sum is None:
        return (
            f"noise_multiplier={sigma:g} with local_noise=True is the noise of each report, and "
            f"{cost}, which is almost no protection: shuffling hides a report only if it has noise "
            "of its own; pass about 1 or more, use accountant='shuffled_sums', whose "
            "noise_multiplier is that of the sum as in Opacus, or call make_private_with_epsilon"
        )
    return (
        f"noise_multiplier={noise_of_sum:g} is that of the batch's sum, so each report carries "
        f"only {sigma:.2g}, and {cost}: if it was meant for each record, pass local_noise=True to "
        "make_private of opacus_shuffle.PrivacyEngine; else pass about "
        f"{round_up(noise_of_sum / sigma, 2)} or more, or call make_private_with_epsilon"
    )


def not_private(predictable: Sequence[str]) -> str:
    """Returns a warning if others can draw the run's randomness again; else ""."""
    if not predictable:
        return ""
    return (
        f"This run is not private: whoever knows {' or '.join(predictable)} can draw its "
        "randomness again and subtract it. Every ε is that of the same run with secret randomness. "
        "Use it for experiments only."
    )


def on_trust(unchecked: Sequence[str]) -> str:
    """Returns a warning about assumptions that nothing verifies; else ""."""
    if not unchecked:
        return ""
    reasons = [UNCHECKED.get(reason, reason) for reason in unchecked]
    return (
        f"This account rests on {' and on '.join(reasons)}: every epsilon here assumes that "
        "without a check."
    )


def contradiction(estimate: PrivacyBound, pair: PrivacyBound) -> str:
    """Returns a warning if an estimate is below the proved lower value of a pair; else "".

    Values for different adversaries, data sets, rounds or δ do not contradict each other.
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
        f"sets of {pair.bound!r} has epsilon of at least {round_down(pair.lower)} at this delta."
    )
