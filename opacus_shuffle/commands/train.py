"""``opacus-shuffle train``: the small CNN of Opacus's MNIST example, trained on real data in the shuffle model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from opacus_shuffle.commands import flags
from opacus_shuffle.commands.training_settings import TrainingSettings
from opacus_shuffle.core.rounding import round_up


def add_flags(job: argparse.ArgumentParser, _: str) -> None:
    """Adds the command's flags."""
    flags.add_settings(job, TrainingSettings)
    flags.add_json_flag(job)
    job.set_defaults(command=run_training)


def run_training(options: dict[str, Any]) -> None:
    """Trains, and prints the accuracy, the noise and the report."""
    as_json = options.pop("json")
    settings = TrainingSettings(**options)
    from opacus_shuffle.commands.training import train

    result = train(settings)
    if as_json:
        found = {"test_accuracy": result.accuracy, "noise_multiplier": result.noise_multiplier, **result.report.to_dict()}
        print(json.dumps({"job": dataclasses.asdict(settings), **found}))
        return
    shown = round_up(result.noise_multiplier) if settings.target_epsilon is not None else f"{result.noise_multiplier:g}"
    kind = "each record's own" if settings.local_noise else "the sum's"
    print(f"\ntest accuracy: {result.accuracy:.1%} ({result.test_records} held-out images of {settings.data})")
    print(f"noise multiplier: {shown} ({kind}), clipping norm {settings.max_grad_norm:g}\n")
    print(result.report)
    if settings.shuffle_weights:
        print(f"the weights were permuted {result.permutations:,} times; no proved epsilon is smaller for it")
    if settings.target_epsilon is not None and settings.bound not in (None, "certified"):
        print(
            f"the budget, {settings.target_epsilon:g}, is what the bound {settings.bound!r} says; what is certified for every "
            "data set stands in the table"
        )
    if settings.seed is not None:
        print(f"seed = {settings.seed}: whoever knows it knows the noise; leave it out for real data")
