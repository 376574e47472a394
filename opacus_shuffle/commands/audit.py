"""``opacus-shuffle audit``: attacks Yang, Ji and Xiang's weight shuffling (WS) at its own setting, and in training."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants.compute import compute_noise_multiplier
from opacus_shuffle.commands import flags
from opacus_shuffle.commands.flags import generator_of, setting
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.core.validation import integer

if TYPE_CHECKING:
    from opacus_shuffle.audit.result import AuditResult

NUMBERS = (
    10**8
)  # sums of coordinates drawn under each hypothesis, at most: some ten seconds of one core
DELTA = 5e-6
SAMPLE_RATE = 0.02
"""δ, and q = 1000/50,000, of WS's ViT on CIFAR-100 (sections VI-A and VI-F), of which the defaults are ε, T and d."""

BATCH = 80  # expected records of a step in the training run


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What the audits need to know; every field is a flag of ``opacus-shuffle audit``, whose ``--help`` explains it."""

    target_epsilon: float = setting(0.5, "budget by the published formula")
    steps: int = setting(500, "published: training steps", metavar="T")
    trials: int = setting(
        10_000_000,
        "published: runs with the record, and as many without, half of each to choose the test; at "
        "most 1e8/steps for the "
        "second pair",
    )
    training_steps: int = setting(2000, "training: steps, half of them with the record")
    others: str = setting(
        "zero",
        "training: gradients of all other records; zero is the case that the published theorem "
        "must cover",
        choices=("zero", "real"),
    )
    seed: int | None = setting(None, "to repeat an audit")

    def __post_init__(self) -> None:
        # The rest is checked by the first audit, before it draws anything.
        integer("training_steps", self.training_steps, minimum=100, maximum=10**9)
        generator_of(self.seed, 0)


def audit_published_setting(
    settings: AuditSettings, *, pair: str = "one_coordinate"
) -> AuditResult:
    """Audits the noise that WS Theorem 6 asks for: what the permuted coordinates tell of ``pair``.

    But for ``"one_coordinate"`` a run takes a random number per step, and few runs tell much:
    ``trials`` is cut to 10⁸/steps.
    """
    from opacus_shuffle.audit.mechanism_audits import audit_permuted_gaussian

    run: dict[str, Any] = {
        "steps": settings.steps,
        "sample_rate": SAMPLE_RATE,
        "dimension": 85_800_000,
        "batch_clip": 1.0,
    }
    sigma = compute_noise_multiplier(
        "shuffled_fw",
        target_epsilon=settings.target_epsilon,
        target_delta=DELTA,
        num_users=round(1 / SAMPLE_RATE),
        bound="published",
        **run,
    )
    return audit_permuted_gaussian(
        noise_multiplier=sigma,
        delta=DELTA,
        pair=pair,
        trials=settings.trials
        if pair == "one_coordinate"
        else min(settings.trials, max(1000, NUMBERS // settings.steps)),
        generator=generator_of(settings.seed, 0),
        **run,
    )


def audit_small_training(settings: AuditSettings) -> AuditResult:
    """Audits WS Algorithm 1 on a network of 25,450 parameters and real digits, with a Dirac canary (WS Table VI, scaled down).

    Raises:
        ValueError: If the data are not there.
    """
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.data import DataLoader

    from opacus_shuffle.audit.training_audit import audit_training
    from opacus_shuffle.engine.privacy_engine import PrivacyEngine
    from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling

    train_set, _ = load_image_dataset("mnist-5k")
    images = train_set.tensors[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Flatten(), nn.Linear(images[0].numel(), 32), nn.ReLU(), nn.Linear(32, 10)
        )
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(
            train_set, batch_size=BATCH, shuffle=True, generator=generator_of(settings.seed, 1)
        ),
        target_epsilon=settings.target_epsilon,
        target_delta=DELTA,
        epochs=10,
        bound="published",
        max_grad_norm=1.0,
        shuffle_weights=WeightShuffling(
            generator=generator_of(settings.seed, 2),
            # Next to the sum of real records, clipped to one record's norm, one gradient would be
            # too small to see: that is luck with these data and no guarantee.
            batch_clip=1.0 if settings.others == "zero" else float(BATCH),
        ),
        noise_generator=generator_of(settings.seed, 3),
    )
    share = 0.0 if settings.others == "zero" else 1.0
    return audit_training(
        model=model,
        optimizer=optimizer,
        data_loader=loader,
        engine=engine,
        loss=lambda model, batch: share * functional.cross_entropy(model(batch[0]), batch[1]),
        steps=settings.training_steps,
        delta=DELTA,
        generator=generator_of(settings.seed, 4),
    )


AUDITS: dict[str, list[Callable[[AuditSettings], AuditResult]]] = {
    "published": [
        audit_published_setting,
        functools.partial(audit_published_setting, pair="oblique"),
    ],
    "training": [audit_small_training],
}


def add_flags(audit: argparse.ArgumentParser, _: str) -> None:
    """Adds the command's flags."""
    audit.add_argument(
        "--kind", choices=("all", *AUDITS), default="all", help="which audit (default: all)"
    )
    flags.add_settings(audit, AuditSettings)
    audit.set_defaults(command=run_audits)


def run_audits(options: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Runs the audits and returns what they found."""
    kind = options.pop("kind")
    settings = AuditSettings(**options)
    results = [
        audit(settings) for name in (AUDITS if kind == "all" else [kind]) for audit in AUDITS[name]
    ]
    return [result.to_dict() for result in results], "\n\n".join(map(str, results)) + "\n"
