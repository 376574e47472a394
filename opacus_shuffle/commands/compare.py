"""``opacus-shuffle compare``, the main job: trains one model for four kinds of trust at one ε.

The model is linear, on public features, and is trained privately for users who trust a server, a
shuffler, or nobody. Each is trained several times, so that nobody takes one run's luck for a gain.

>>> [kind.trusted for kind in KINDS]
['a server', 'a shuffler', 'a shuffler', 'nobody']
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.accountants.compute import best_sample_rate
from opacus_shuffle.accountants.mechanism import sent_per_user, size_of
from opacus_shuffle.accountants.report import not_private, promise
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, unshuffled_epsilon
from opacus_shuffle.commands.flags import CompareSettings, check_file, check_picture
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.commands.progress import SILENT, Progress
from opacus_shuffle.commands.scattering import scattering_features
from opacus_shuffle.core.guarantees import Adjacency, PrivacyBound
from opacus_shuffle.core.picture_styles import TRUST_COLOURS
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import WIDTH, paragraph, text_table
from opacus_shuffle.core.validation import integer, open_unit_interval, positive
from opacus_shuffle.engine.privacy_engine import PrivacyEngine

HEAD = ("trusted", "how", "epsilon", "accuracy", "sent per user")
LEAST_EPSILON = 0.1
CAVEAT = (
    "Each epsilon is one run's. Further runs show the spread: publishing several, or what they "
    "tell together, would cost more. It holds if every user follows the protocol and keeps its "
    "noise and coins secret. The protocols were simulated: one process saw every record. Rounds "
    "and learning rates were chosen on training images of mnist-5k; no epsilon counts that choice."
)
CLIPPING_NORM = 0.5
MOMENTUM = 0.9
CLASSES = 10  # of all the data sets there are
SAMPLED_BATCH = 4000
"""Records of a sampled round at most (expected); half of the records where there are fewer."""

MINUTES_TO_BEGIN, MINUTES_A_RUN = 1 / 3, 2 / 3
"""Of two idle cores: for features and noise, and to train all rows once on 4,000 records.

Measured; what a run takes grows with the number of records.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to train, with settings chosen on training images of mnist-5k.

    Attributes:
        trusted: Who must not be the adversary.
        how: What users send, in words.
        accountant: Of the engine.
        bound: Which ε is the budget's.
        rounds: About how many there are.
        learning_rate: Of gradients clipped to 0.5, with momentum.
        sampled: Whether a round is a secret sample of the users, rather than all of them.
        local_noise: Whether each report carries noise of its own.
        ghost: Whether ghost clipping saves time.
    """

    trusted: str
    how: str
    accountant: str
    bound: str
    rounds: int
    learning_rate: float
    sampled: bool
    local_noise: bool = False
    ghost: bool = True

    def batch_size(self, records: int, *, epsilon: float, delta: float) -> int:
        """The expected number of records in a round."""
        if self.accountant == "secret_checkin":
            rate = best_sample_rate(
                num_users=records,
                steps=self.rounds,
                target_epsilon=epsilon,
                target_delta=delta,
            )
            return max(1, round(rate * records))
        return max(1, min(records // 2, SAMPLED_BATCH)) if self.sampled else records

    def epochs(self, records: int, batch_size: int) -> int:
        """The number of passes over the data that takes about as many rounds as are wanted."""
        return max(1, round(self.rounds / math.ceil(records / batch_size)))


KINDS = (
    Kind(
        trusted="a server",
        how="DP-SGD",
        accountant="prv",
        bound="prv",
        rounds=60,
        learning_rate=4.0,
        sampled=True,
    ),
    Kind(
        trusted="a shuffler",
        how="sums of bits",
        accountant="shuffled_sums",
        bound="certified",
        rounds=60,
        learning_rate=4.0,
        sampled=True,
        ghost=False,
    ),
    Kind(
        trusted="a shuffler",
        how="linear reports",
        accountant="secret_checkin",
        bound="certified",
        rounds=100,
        learning_rate=1.0,
        sampled=True,
        local_noise=True,
        ghost=False,
    ),
    Kind(
        trusted="nobody",
        how="Gaussian reports",
        accountant="shuffle_gauss",
        bound="local",
        rounds=20,
        learning_rate=1.0,
        sampled=False,
        local_noise=True,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of training for one kind of trust, once or several times.

    Attributes:
        kind: Which.
        bound: ε that one run spent, with its meaning; never above the budget. The runs together
            spent more.
        accuracies: Share of the test records that each run's model classifies rightly.
        bytes_per_user: What one user sends over one whole run, without the labels of bits; None for
            the record itself.
        noise_multiplier: Of the sum or of each report, as the accountant means it.
    """

    kind: Kind
    bound: PrivacyBound
    accuracies: tuple[float, ...]
    bytes_per_user: int | None
    noise_multiplier: float

    @property
    def accuracy(self) -> float:
        """The mean accuracy of all runs."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of the runs' accuracies; None of one run alone."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def accuracy_with_spread(self) -> str:
        """Returns the accuracy in percent and its spread in points, such as ``93.4% ± 0.2``."""
        return f"{self.accuracy:.1%}" + (
            "" if self.spread is None else f" ± {100 * self.spread:.1f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {
            "trusted": self.kind.trusted,
            "how": self.kind.how,
            "runs": len(self.accuracies),
            "test_accuracy": self.accuracy,
            "test_accuracies": list(self.accuracies),
            "bytes_per_user": self.bytes_per_user,
            "noise_multiplier": self.noise_multiplier,
            "privacy": self.bound.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results for all kinds of trust."""

    settings: CompareSettings
    outcomes: tuple[Outcome, ...]
    test_records: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {
            "job": dataclasses.asdict(self.settings),
            "test_records": self.test_records,
            "private": self.settings.seed is None,
            "quote": self.quote(),
            "caveat": CAVEAT,
            "rows": [outcome.to_dict() for outcome in self.outcomes],
        }

    def what_accuracies_are(self) -> str:
        """Returns of how many runs they are, and what stands behind ±."""
        return (
            "one run each"
            if self.settings.runs == 1
            else f"mean ± sample standard deviation of {self.settings.runs} runs; "
            "epsilon is one run's"
        )

    def foot(self) -> str:
        """Returns what the words of the table mean."""
        sent = "" if self.settings.runs == 1 else ", and so is what a user sends"
        return (
            f"zero_out: {Adjacency.ZERO_OUT.meaning}. accuracy: {self.what_accuracies_are()}{sent}."
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the table's cells."""
        return [
            (
                outcome.kind.trusted,
                outcome.kind.how,
                round_up(outcome.bound.epsilon),
                outcome.accuracy_with_spread(),
                "the record" if outcome.bytes_per_user is None else size_of(outcome.bytes_per_user),
            )
            for outcome in self.outcomes
        ]

    def quote(self) -> str:
        """Returns one sentence to quote, about the first row that trusts a shuffler alone.

        Which it is was chosen before any accuracy was known, or else it would be a lucky one. A
        run whose randomness others can draw again has nothing to quote, and the sentence says so.
        """
        if self.settings.seed is not None:
            return not_private((f"seed={self.settings.seed}",))
        # What epsilon covers is one run, so the sentence quotes the first one of each alone.
        server, ours, _, nobody = (outcome.accuracies[0] for outcome in self.outcomes)
        # The largest that held-out images alone leave, had others been drawn.
        error = max(
            (accuracy * (1 - accuracy) / self.test_records) ** 0.5
            for accuracy in (server, ours, nobody)
        )
        return (
            f"A linear model whose training is {promise(self.outcomes[1].bound)}, classifies "
            f"{ours:.1%} of {self.test_records:,} "
            f"held-out images of {self.settings.data} rightly ({self.outcomes[1].kind.how}); "
            f"within the same epsilon it is {server:.1%} trusting a server, and {nobody:.1%} "
            "trusting nobody "
            f"(one run each; so few images leave a standard error of {error:.1%} at most)."
        )

    def __str__(self) -> str:
        table = text_table(HEAD, self.rows(), right=("epsilon", "accuracy"))
        words = [*textwrap.wrap(self.quote(), WIDTH), "", *textwrap.wrap(CAVEAT, WIDTH)]
        if self.settings.seed is None:
            words.insert(0, "To quote:")
        return "\n".join(
            [
                f"proved for every data set at delta = {self.settings.delta:.3g}, "
                "zero_out adjacency",
                "",
                *table,
                "",
                *paragraph(self.foot()),
                "",
                *words,
            ]
        )

    def markdown(self) -> str:
        """Returns the quotation and the table, for a document."""
        lines = [HEAD, ["---"] * len(HEAD), *self.rows()]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([self.quote(), "", *table, "", self.foot(), "", CAVEAT, ""])


def cost(runs: int, records: int) -> str:
    """Returns in a line what a comparison will train, and about how long that takes."""
    minutes = MINUTES_TO_BEGIN + MINUTES_A_RUN * runs * records / 4000
    return (
        f"trains {len(KINDS)} rows × {runs} run{'' if runs == 1 else 's'} on {records:,} images; "
        f"about {math.ceil(minutes)} min on two idle cores"
    )


def compare(settings: CompareSettings, *, progress: Progress = SILENT) -> Comparison:
    """Trains for every kind of trust, each as often as the settings say.

    Args:
        settings: On what, and within which budget.
        progress: What says beforehand how long it takes, and then how far it is.

    Raises:
        ValueError: If a setting is out of range, no noise meets the budget, or the data are not
            there.
    """
    if positive("epsilon", settings.epsilon) < LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {LEAST_EPSILON:g} in a comparison, got "
            f"{settings.epsilon!r}: below it Opacus's "
            "calibration gives DP-SGD far more noise than it needs, and the server would come off "
            "too badly"
        )
    open_unit_interval("delta", settings.delta)
    integer("seed", settings.seed or 0, minimum=0)
    runs = integer("runs", settings.runs, minimum=1)
    sets = load_image_dataset(settings.data, settings.data_root)
    progress(cost(runs, len(sets[0])))
    train_set, test_set = (
        TensorDataset(scattering_features(images.tensors[0], progress=progress), images.tensors[1])
        for images in sets
    )
    outcomes = tuple(
        train_kind(
            kind,
            train_set,
            test_set,
            epsilon=settings.epsilon,
            delta=settings.delta,
            runs=runs,
            seed=settings.seed,
            progress=progress,
        )
        for kind in KINDS
    )
    return Comparison(settings, outcomes, len(test_set))


def train_kind(
    kind: Kind,
    train_set: TensorDataset,
    test_set: TensorDataset,
    *,
    epsilon: float,
    delta: float,
    runs: int = 1,
    seed: int | None = None,
    progress: Progress = SILENT,
) -> Outcome:
    """Trains a linear model several times, each within a budget of its own.

    Args:
        kind: Who is trusted.
        train_set: Features, shape (records, entries), and labels 0 to 9.
        test_set: The same of held-out records.
        epsilon: ε that each run stays within.
        delta: At this δ.
        runs: How often to train, at least once.
        seed: To repeat all runs, which then protect nobody.
        progress: What says how far it is.

    Returns:
        The accuracies, and the ε that one run spent, which is proved for every data set.

    Raises:
        ValueError: If no noise meets the budget.
    """
    records, entries = train_set.tensors[0].shape
    row = f"trusting {kind.trusted}: {kind.how}"
    progress(f"{row}, finding the noise")
    # Features have unit length: a bias would be half of every gradient's squared norm, and clipping
    # would halve the rest.
    network = nn.Linear(entries, CLASSES, bias=False)
    batch_size = kind.batch_size(records, epsilon=epsilon, delta=delta)
    epochs = kind.epochs(records, batch_size)
    engine = PrivacyEngine(accountant=kind.accountant, seed=seed)
    sgd = torch.optim.SGD(network.parameters(), lr=kind.learning_rate, momentum=MOMENTUM)
    run: dict[str, Any] = {
        "module": network,
        "optimizer": sgd,
        "data_loader": DataLoader(train_set, batch_size=batch_size),
        "max_grad_norm": CLIPPING_NORM,
        # Ghost clipping takes no gradient per record. Sums of bits, which round each, save no time
        # by it, and linear reports cannot have it.
        "grad_sample_mode": "ghost" if kind.ghost else "hooks",
        "local_noise": kind.local_noise,
    }
    if kind.bound == "local":
        # The noise of each report with which all of one user's, seen by name, stay in the budget.
        noise = smallest_noise(
            lambda sigma: unshuffled_epsilon(
                [(ShuffledRound(noise_multiplier=sigma, num_users=records), epochs)], delta=delta
            ),
            target_epsilon=epsilon,
        )
        model, optimizer, *criterion, loader = engine.make_private(**run, noise_multiplier=noise)
    else:
        model, optimizer, *criterion, loader = engine.make_private_with_epsilon(
            **run, target_epsilon=epsilon, target_delta=delta, epochs=epochs
        )
    loss = criterion[0] if criterion else functional.cross_entropy
    held_out, labels = test_set.tensors
    accuracies: list[float] = []
    for number in range(1, runs + 1):
        # Every run begins at the same weights without momentum, and draws on from the engine's
        # randomness: no two runs share noise, and a seed repeats them all. The noise multiplier,
        # whose search takes seconds, is the first run's.
        nn.init.zeros_(network.weight)
        sgd.state.clear()
        for epoch in range(1, epochs + 1):
            for x, y in loader:
                progress(f"{row}, run {number} of {runs}, pass {epoch} of {epochs} over the data")
                loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        if number == 1:
            # Before a second run: the engine's accountant adds up the runs, and a row is about one.
            # Opacus's own accountants know of no reports.
            rounds = list(getattr(engine.accountant, "rounds", ()))
            report = engine.privacy_report(delta)
        right = functional.linear(held_out, network.weight.detach()).argmax(1) == labels
        accuracies.append(float(right.double().mean()))
    sent = sent_per_user(rounds, dimension=network.weight.numel())
    return Outcome(
        kind=kind,
        bound=next(bound for bound in report.bounds if bound.bound == kind.bound),
        accuracies=tuple(accuracies),
        bytes_per_user=None if sent is None else sent.bytes_per_user,
        noise_multiplier=float(optimizer.noise_multiplier),
    )


def draw(comparison: Comparison) -> Any:
    """Draws the accuracies, a bar for every kind of trust, and the spread of its runs."""
    from matplotlib.figure import Figure

    figure, settings = Figure(figsize=(7.5, 3.2), layout="constrained"), comparison.settings
    axes = figure.subplots()
    # Labels stand beside the bars, where an accuracy of nearly 100 would have them cross a frame,
    # and a user's style might have them cross a grid.
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=False)
    for outcome in comparison.outcomes:
        name = f"trusting {outcome.kind.trusted}:\n{outcome.kind.how}"
        bar = axes.barh(
            name,
            100 * outcome.accuracy,
            xerr=None if outcome.spread is None else 100 * outcome.spread,
            capsize=4,
            color=TRUST_COLOURS[outcome.kind.trusted.split()[-1]],
        )
        # Beyond the line for guessing, too: a label of what has learnt nothing would lie on it.
        end = max(100 * (outcome.accuracy + (outcome.spread or 0.0)), 100 / CLASSES)
        place = (end, bar[0].get_y() + bar[0].get_height() / 2)
        said = outcome.accuracy_with_spread()
        axes.annotate(said, place, xytext=(4, 0), textcoords="offset points", va="center")
    axes.axvline(100 / CLASSES, color="black", linestyle=":", linewidth=1)
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 100),
        xlabel=f"test accuracy in percent, {settings.data} (dotted: guessing)\n"
        f"{comparison.what_accuracies_are()}",
    )
    axes.set_title(
        f"proved ε ≤ {settings.epsilon:g} at δ = {settings.delta:g}, zero-out adjacency",
        fontsize=11,
    )
    return figure


def run_comparison(
    options: dict[str, Any],
) -> tuple[dict[str, Any], Comparison, Callable[[], None]]:
    """Trains, and returns the results with functions that write and draw them."""
    output, statement = options.pop("output"), options.pop("statement")
    progress = Progress(quiet=options.pop("quiet"))
    if output is not None:
        check_picture(output)
    if statement is not None:
        check_file("--statement", statement, (".md", ".json"))
    comparison = compare(CompareSettings(**options), progress=progress)

    def write() -> None:
        if statement is not None:
            values = json.dumps(comparison.to_dict(), indent=1) + "\n"
            pathlib.Path(statement).write_text(
                comparison.markdown() if statement.endswith(".md") else values, encoding="utf-8"
            )
        if output is not None:
            draw(comparison).savefig(output, dpi=150)

    return comparison.to_dict(), comparison, write
