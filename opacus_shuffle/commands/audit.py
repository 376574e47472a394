"""``opacus-shuffle audit``: attacks Yang, Ji and Xiang's weight shuffling (WS) at its own setting, and in training."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants.compute import compute_noise_multiplier
from opacus_shuffle.commands import flags
from opacus_shuffle.commands.flags import generator_of, setting
from opacus_shuffle.commands.image_datasets import DATASETS, load_image_dataset
from opacus_shuffle.core.validation import integer, one_of, open_unit_interval, positive, sampling_rate

if TYPE_CHECKING:
    from opacus_shuffle.audit.result import AuditResult

NUMBERS = 10**8  # sums of coordinates drawn under each hypothesis, at most: some ten seconds of one core
MOST_STEPS = 10**9  # of which a run takes a number each
BATCH = 80  # expected records of a step in the training run


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What the audits need to know; every field is a flag of ``opacus-shuffle audit``, whose ``--help`` explains it.

    The published setting is WS's for a ViT on CIFAR-100 (sections VI-A and VI-F): ε, δ, d, T, and q = 1000/50,000.
    ``batch_clip`` is c′/c, which WS does not print. With ``others="real"`` c′ is by default as large as a batch (80 c): next to
    their sum, clipped to c, one record's gradient would be too small to see, which is luck with these data and no guarantee.
    """

    target_epsilon: float = setting(0.5, "budget by the published formula")
    delta: float = setting(5e-6, "of the budget, and of the epsilon found")
    dimension: int = setting(85_800_000, "published: permuted parameters", metavar="D")
    steps: int = setting(500, "published: training steps", metavar="T")
    sample_rate: float = setting(0.02, "published: of each step", metavar="Q")
    batch_clip: float | None = setting(
        None,
        "norm that a batch's sum is clipped to over that of one record",
        metavar="RATIO",
        instead="1; with --others real 80, a batch",
    )
    trials: int = setting(
        10_000_000,
        "published: runs with the record, and as many without, half of each to choose the test; at most 1e8/steps for the "
        "second pair",
    )
    training_steps: int = setting(2000, "training: steps, half of them with the record")
    others: str = setting(
        "zero",
        "training: gradients of all other records; zero is the case that the published theorem must cover",
        choices=("zero", "real"),
    )
    confidence: float = setting(0.95, "of each lower bound")
    data: str = setting("mnist-5k", "training: real images", choices=DATASETS)
    data_root: str | None = setting(None, "training: folder of the data's standard files")
    seed: int | None = setting(None, "to repeat an audit")

    def __post_init__(self) -> None:
        positive("target_epsilon", self.target_epsilon)
        open_unit_interval("delta", self.delta)
        open_unit_interval("confidence", self.confidence)
        if 1 / sampling_rate("sample_rate", self.sample_rate) > 2**53:
            raise ValueError(f"sample_rate must be at least 2**-53, got {self.sample_rate!r}: no data set has so many records")
        if self.batch_clip is not None:
            positive("batch_clip", self.batch_clip)
        for name, minimum in (("dimension", 2), ("steps", 1), ("trials", 1000), ("training_steps", 100)):
            most = MOST_STEPS if "steps" in name else 2**53
            object.__setattr__(self, name, integer(name, getattr(self, name), minimum=minimum, maximum=most))
        one_of("others", self.others, ("zero", "real"))
        if self.seed is not None:
            object.__setattr__(self, "seed", integer("seed", self.seed, minimum=0))


def audit_published_setting(settings: AuditSettings, *, pair: str = "one_coordinate") -> AuditResult:
    """Audits the noise that WS Theorem 6 asks for: what the permuted coordinates tell of ``pair``.

    But for ``"one_coordinate"`` a run takes a random number per step, and few runs tell much: ``trials`` is cut to 10⁸/steps.
    """
    from opacus_shuffle.audit.mechanism_audits import audit_permuted_gaussian

    run: dict[str, Any] = {
        "steps": settings.steps,
        "sample_rate": settings.sample_rate,
        "dimension": settings.dimension,
        "batch_clip": settings.batch_clip or 1.0,
    }
    sigma = compute_noise_multiplier(
        "shuffled_fw",
        target_epsilon=settings.target_epsilon,
        target_delta=settings.delta,
        num_users=round(1 / settings.sample_rate),
        bound="published",
        **run,
    )
    return audit_permuted_gaussian(
        noise_multiplier=sigma,
        delta=settings.delta,
        pair=pair,
        trials=settings.trials if pair == "one_coordinate" else min(settings.trials, max(1000, NUMBERS // settings.steps)),
        confidence=settings.confidence,
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

    train_set, _ = load_image_dataset(settings.data, settings.data_root)
    images = train_set.tensors[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), 32), nn.ReLU(), nn.Linear(32, 10))
    engine = PrivacyEngine(accountant="shuffled_fw")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(train_set, batch_size=BATCH, shuffle=True, generator=generator_of(settings.seed, 1)),
        target_epsilon=settings.target_epsilon,
        target_delta=settings.delta,
        epochs=10,
        bound="published",
        max_grad_norm=1.0,
        shuffle_weights=WeightShuffling(
            generator=generator_of(settings.seed, 2),
            batch_clip=settings.batch_clip or (1.0 if settings.others == "zero" else float(BATCH)),
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
        delta=settings.delta,
        confidence=settings.confidence,
        generator=generator_of(settings.seed, 4),
    )


AUDITS: dict[str, list[Callable[[AuditSettings], AuditResult]]] = {
    "published": [audit_published_setting, functools.partial(audit_published_setting, pair="oblique")],
    "training": [audit_small_training],
}


def add_flags(audit: argparse.ArgumentParser, _: str) -> None:
    """Adds the command's flags."""
    audit.add_argument("--kind", choices=("all", *AUDITS), default="all", help="which audit (default: all)")
    flags.add_settings(audit, AuditSettings)
    flags.add_json_flag(audit)
    audit.set_defaults(command=run_audits)


def run_audits(options: dict[str, Any]) -> None:
    """Runs the audits and prints what they found, one after the other."""
    as_json, kind = options.pop("json"), options.pop("kind")
    settings = AuditSettings(**options)
    results = []
    for audit in [each for name in (AUDITS if kind == "all" else [kind]) for each in AUDITS[name]]:
        results.append(audit(settings))
        if not as_json:
            print(results[-1], end="\n\n", flush=True)
    if as_json:
        print(json.dumps([result.to_dict() for result in results]))
