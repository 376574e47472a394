"""``opacus-shuffle compare``, the main command: trains one model in four trust models at one ε.

The model is linear, on public features. It is trained privately for users who trust a server, a
shuffler or nobody. Each trust model has several runs, so that the spread of the runs is visible.

>>> [trust_model.trusted for trust_model in TRUST_MODELS]
['a server', 'a shuffler', 'a shuffler', 'nobody']
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import sys
import textwrap
import time
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
from opacus_shuffle.commands.images import CLASSES, load_images
from opacus_shuffle.commands.scattering import scattering_features
from opacus_shuffle.core.guarantees import Adjacency, PrivacyBound
from opacus_shuffle.core.picture_styles import TRUST_COLOURS
from opacus_shuffle.core.rounding import plural, round_up
from opacus_shuffle.core.tables import WIDTH, paragraph, text_table
from opacus_shuffle.core.validation import integer, open_unit_interval, positive
from opacus_shuffle.engine.privacy_engine import PrivacyEngine

COLUMNS = ("trusted", "how", "epsilon", "accuracy", "sent per user")
MIN_EPSILON = 0.1
CAVEAT = (
    "Each epsilon is that of one run. The other runs show the spread; publishing several runs, or "
    "conclusions from all of them, would cost more. Epsilon holds if every user follows the "
    "protocol and keeps its noise and coins secret. The protocols were simulated: one process saw "
    "every record. Rounds and learning rates were chosen on training images of mnist-5k, and no "
    "epsilon accounts for this choice."
)
CLIPPING_NORM = 0.5
MOMENTUM = 0.9
SAMPLED_BATCH = 4000
"""The maximum expected number of records in a sampled round; it never exceeds half of all."""

PROGRESS_SECONDS = 10.0
"""The minimum time between two progress messages."""

SETUP_MINUTES, MINUTES_PER_RUN = 1 / 3, 2 / 3
"""Time on two idle cores for features and noise, and for one run of all rows on 4,000 records.

Both are measured. The time of a run grows with the number of records.
"""


class Progress:
    """Writes messages to standard error, at most one every ten seconds.

    Args:
        quiet: Whether to write nothing.
        clock: Returns the time in seconds.
    """

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._clock, self._due = quiet, clock, -math.inf

    def __call__(self, line: str) -> None:
        """Writes the line, unless the last message is too recent."""
        now = self._clock()
        if not self._quiet and sys.stderr is not None and now >= self._due:
            self._due = now + PROGRESS_SECONDS
            print(line, file=sys.stderr, flush=True)


SILENT = Progress(quiet=True)
"""The default of functions that are called from Python."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrustModel:
    """One way to train, with settings that were chosen on training images of mnist-5k.

    Attributes:
        trusted: The party that must not be the adversary.
        how: A description of what users send.
        accountant: The accountant of the engine.
        bound: The bound whose ε must stay within the budget.
        rounds: The approximate number of rounds.
        learning_rate: The learning rate for gradients clipped to 0.5, with momentum.
        sampled: Whether a round is a secret sample of the users instead of all users.
        local_noise: Whether each report carries its own noise.
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
        """Returns the expected number of records in a round."""
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
        """Returns the number of passes over the data with about ``rounds`` rounds."""
        return max(1, round(self.rounds / math.ceil(records / batch_size)))


TRUST_MODELS = (
    TrustModel(
        trusted="a server",
        how="DP-SGD",
        accountant="prv",
        bound="prv",
        rounds=60,
        learning_rate=4.0,
        sampled=True,
    ),
    TrustModel(
        trusted="a shuffler",
        how="sums of bits",
        accountant="shuffled_sums",
        bound="certified",
        rounds=60,
        learning_rate=4.0,
        sampled=True,
        ghost=False,
    ),
    TrustModel(
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
    TrustModel(
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
    """The results of one trust model.

    Attributes:
        trust_model: The trust model.
        bound: ε of one run with its meaning; never above the budget. All runs together cost more.
        accuracies: The test accuracy of each run.
        bytes_per_user: What one user sends during one run, without the labels of bits. None for the
            record itself.
        noise_multiplier: σ of the sum or of each report, as the accountant defines it.
    """

    trust_model: TrustModel
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
        """The sample standard deviation of the accuracies, or None for a single run."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def accuracy_with_spread(self) -> str:
        """Returns the accuracy in percent and its spread in points, such as ``93.4% ± 0.2``."""
        return f"{self.accuracy:.1%}" + (
            "" if self.spread is None else f" ± {100 * self.spread:.1f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "trusted": self.trust_model.trusted,
            "how": self.trust_model.how,
            "runs": len(self.accuracies),
            "test_accuracy": self.accuracy,
            "test_accuracies": list(self.accuracies),
            "bytes_per_user": self.bytes_per_user,
            "noise_multiplier": self.noise_multiplier,
            "privacy": self.bound.to_dict(),
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of all trust models."""

    settings: CompareSettings
    outcomes: tuple[Outcome, ...]
    test_records: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "job": dataclasses.asdict(self.settings),
            "test_records": self.test_records,
            "private": self.settings.seed is None,
            "quote": self.quote(),
            "caveat": CAVEAT,
            "rows": [outcome.to_dict() for outcome in self.outcomes],
        }

    def accuracy_label(self) -> str:
        """Returns the number of runs behind an accuracy, and the meaning of ±."""
        several = (
            f"mean ± sample standard deviation of {self.settings.runs} runs; epsilon is that of "
            "one run"
        )
        return "one run each" if self.settings.runs == 1 else several

    def legend(self) -> str:
        """Returns the meaning of the words in the table."""
        sent = "" if self.settings.runs == 1 else ", and so is the size of what a user sends"
        return f"zero_out: {Adjacency.ZERO_OUT.meaning}. accuracy: {self.accuracy_label()}{sent}."

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the cells of the table."""
        return [
            (
                outcome.trust_model.trusted,
                outcome.trust_model.how,
                round_up(outcome.bound.epsilon),
                outcome.accuracy_with_spread(),
                "the record" if outcome.bytes_per_user is None else size_of(outcome.bytes_per_user),
            )
            for outcome in self.outcomes
        ]

    def quote(self) -> str:
        """Returns one sentence to quote, about the first row that trusts only a shuffler.

        The row was fixed before any accuracy was measured, because the best row would be subject to
        selection bias. A seeded run is not private, and the sentence says this instead.
        """
        if self.settings.seed is not None:
            return not_private((f"seed={self.settings.seed}",))
        # Epsilon covers one run, so the sentence quotes the first run of each row.
        server, ours, _, nobody = (outcome.accuracies[0] for outcome in self.outcomes)
        # The standard error of the test accuracy, from the number of test images alone.
        error = max(
            (accuracy * (1 - accuracy) / self.test_records) ** 0.5
            for accuracy in (server, ours, nobody)
        )
        return (
            f"A linear model whose training is {promise(self.outcomes[1].bound)}, has "
            f"{ours:.1%} accuracy on {self.test_records:,} held-out images of {self.settings.data} "
            f"({self.outcomes[1].trust_model.how}). Within the same epsilon, the accuracy is "
            f"{server:.1%} when trusting a server and {nobody:.1%} when trusting nobody (one run "
            f"each; the standard error is at most {error:.1%})."
        )

    def __str__(self) -> str:
        quote = [*textwrap.wrap(self.quote(), WIDTH), "", *textwrap.wrap(CAVEAT, WIDTH)]
        if self.settings.seed is None:
            quote.insert(0, "To quote:")
        return "\n".join(
            [
                f"proved for every data set at delta = {self.settings.delta:.3g}, "
                "zero_out adjacency",
                "",
                *text_table(COLUMNS, self.rows(), right=("epsilon", "accuracy")),
                "",
                *paragraph(self.legend()),
                "",
                *quote,
            ]
        )

    def markdown(self) -> str:
        """Returns the quotation and the table as Markdown."""
        lines = [COLUMNS, ["---"] * len(COLUMNS), *self.rows()]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([self.quote(), "", *table, "", self.legend(), "", CAVEAT, ""])


def runtime_note(runs: int, records: int) -> str:
    """Returns a line with what a comparison will train, and about how long it takes."""
    minutes = SETUP_MINUTES + MINUTES_PER_RUN * runs * records / 4000
    return (
        f"trains {len(TRUST_MODELS)} rows × {plural(runs, 'run')} on {records:,} images; "
        f"about {math.ceil(minutes)} min on two idle cores"
    )


def compare(settings: CompareSettings, *, progress: Progress = SILENT) -> Comparison:
    """Trains each trust model as often as the settings say.

    Args:
        settings: The data, the budget and the number of runs.
        progress: Receives the expected duration first, and then the progress.

    Raises:
        ValueError: If a setting is out of range, no noise meets the budget, or the data cannot be
            read.
    """
    if positive("epsilon", settings.epsilon) < MIN_EPSILON:
        raise ValueError(
            f"epsilon must be at least {MIN_EPSILON:g} in a comparison, got {settings.epsilon!r}: "
            "for smaller values Opacus's calibration gives DP-SGD far more noise than it needs"
        )
    open_unit_interval("delta", settings.delta)
    integer("seed", settings.seed or 0, minimum=0)
    runs = integer("runs", settings.runs, minimum=1)
    datasets = load_images(settings.data)
    progress(runtime_note(runs, len(datasets[0])))
    train_set, test_set = (
        TensorDataset(scattering_features(images.tensors[0], progress=progress), images.tensors[1])
        for images in datasets
    )
    outcomes = tuple(
        train_model(
            trust_model,
            train_set,
            test_set,
            epsilon=settings.epsilon,
            delta=settings.delta,
            runs=runs,
            seed=settings.seed,
            progress=progress,
        )
        for trust_model in TRUST_MODELS
    )
    return Comparison(settings, outcomes, len(test_set))


def train_model(
    trust_model: TrustModel,
    train_set: TensorDataset,
    test_set: TensorDataset,
    *,
    epsilon: float,
    delta: float,
    runs: int = 1,
    seed: int | None = None,
    progress: Progress = SILENT,
) -> Outcome:
    """Trains a linear model several times, each time within the full budget.

    Args:
        trust_model: The trust model.
        train_set: Features, shape (records, entries), and labels 0 to 9.
        test_set: The same for held-out records.
        epsilon: The ε that each run stays within.
        delta: δ of this ε.
        runs: The number of runs, at least 1.
        seed: Makes all runs repeatable, which are then not private.
        progress: Receives the progress.

    Returns:
        The accuracies, and the ε of one run, which is proved for every data set.

    Raises:
        ValueError: If no noise meets the budget.
    """
    records, entries = train_set.tensors[0].shape
    row = f"trusting {trust_model.trusted}: {trust_model.how}"
    progress(f"{row}, finding the noise")
    # Features have length 1. A bias would be half of the squared norm of every gradient, and
    # clipping would halve the rest.
    network = nn.Linear(entries, CLASSES, bias=False)
    batch_size = trust_model.batch_size(records, epsilon=epsilon, delta=delta)
    epochs = trust_model.epochs(records, batch_size)
    engine = PrivacyEngine(accountant=trust_model.accountant, seed=seed)
    sgd = torch.optim.SGD(network.parameters(), lr=trust_model.learning_rate, momentum=MOMENTUM)
    run: dict[str, Any] = {
        "module": network,
        "optimizer": sgd,
        "data_loader": DataLoader(train_set, batch_size=batch_size),
        "max_grad_norm": CLIPPING_NORM,
        # Ghost clipping needs no gradient per record. Sums of bits round each gradient, so it saves
        # no time there, and linear reports do not support it.
        "grad_sample_mode": "ghost" if trust_model.ghost else "hooks",
        "local_noise": trust_model.local_noise,
    }
    if trust_model.bound == "local":
        # All reports of one user must stay within the budget without the shuffler's anonymity.
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
    test_features, labels = test_set.tensors
    accuracies: list[float] = []
    for number in range(1, runs + 1):
        # Every run starts from the same weights, without momentum, and continues the random stream
        # of the engine. No two runs share noise, and a seed repeats all of them. All runs use the
        # noise multiplier of the first, because its search takes seconds.
        nn.init.zeros_(network.weight)
        sgd.state.clear()
        for epoch in range(1, epochs + 1):
            for x, y in loader:
                progress(f"{row}, run {number} of {runs}, pass {epoch} of {epochs} over the data")
                loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        if number == 1:
            # The accountant adds up all runs, but a row is about one. Opacus's own accountants do
            # not record rounds.
            rounds = list(getattr(engine.accountant, "rounds", ()))
            report = engine.privacy_report(delta)
        correct = functional.linear(test_features, network.weight.detach()).argmax(1) == labels
        accuracies.append(float(correct.double().mean()))
    sent = sent_per_user(rounds, dimension=network.weight.numel())
    return Outcome(
        trust_model=trust_model,
        bound=next(bound for bound in report.bounds if bound.bound == trust_model.bound),
        accuracies=tuple(accuracies),
        bytes_per_user=None if sent is None else sent.bytes_per_user,
        noise_multiplier=float(optimizer.noise_multiplier),
    )


def draw(comparison: Comparison) -> Any:
    """Draws one bar for the accuracy of each trust model, with the spread of its runs."""
    from matplotlib.figure import Figure

    figure, settings = Figure(figsize=(7.5, 3.2), layout="constrained"), comparison.settings
    axes = figure.subplots()
    # The labels are beside the bars. A frame would cross the label of an accuracy near 100, and the
    # grid of a user's style could cross any label.
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=False)
    for outcome in comparison.outcomes:
        trusted = outcome.trust_model.trusted
        bar = axes.barh(
            f"trusting {trusted}:\n{outcome.trust_model.how}",
            100 * outcome.accuracy,
            xerr=None if outcome.spread is None else 100 * outcome.spread,
            capsize=4,
            color=TRUST_COLOURS[trusted.split()[-1]],
        )
        # The label is also to the right of the line for guessing, which would cross it.
        end = max(100 * (outcome.accuracy + (outcome.spread or 0.0)), 100 / CLASSES)
        position = (end, bar[0].get_y() + bar[0].get_height() / 2)
        label = outcome.accuracy_with_spread()
        axes.annotate(label, position, xytext=(4, 0), textcoords="offset points", va="center")
    axes.axvline(100 / CLASSES, color="black", linestyle=":", linewidth=1)
    axes.invert_yaxis()
    axes.set(
        xlim=(0, 100),
        xlabel=f"test accuracy in percent, {settings.data} (dotted: guessing)\n"
        f"{comparison.accuracy_label()}",
    )
    axes.set_title(
        f"proved ε ≤ {settings.epsilon:g} at δ = {settings.delta:g}, zero-out adjacency",
        fontsize=11,
    )
    return figure


def run_comparison(
    options: dict[str, Any],
) -> tuple[dict[str, Any], Comparison, Callable[[], None]]:
    """Trains, and returns the results and a function that writes the files."""
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
