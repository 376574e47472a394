"""``opacus-shuffle audit``: attacks weight shuffling at its paper's own setting, and in training.

WS is Yang, Ji and Xiang's weight shuffling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.compute import compute_noise_multiplier
from opacus_shuffle.audit.mechanism_audits import audit_permuted_gaussian
from opacus_shuffle.audit.result import AuditResult
from opacus_shuffle.audit.training_audit import audit_training
from opacus_shuffle.commands.flags import AuditSettings
from opacus_shuffle.commands.image_datasets import load_image_dataset
from opacus_shuffle.core.validation import integer
from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling

NUMBERS = 10**8
"""Sums of coordinates drawn under each hypothesis, at most: some ten seconds of one core."""
DELTA, SAMPLE_RATE = 5e-6, 0.02
"""δ, and q = 1000/50,000, of WS's ViT on CIFAR-100 (sections VI-A and VI-F).

So are the defaults of ε and T, and d.
"""

BATCH = 80  # expected records of a step in the training run


def _generator_of(seed: int | None, stream: int) -> torch.Generator | None:
    """Returns repeatable randomness for one use of a seed, or None for secret."""
    return (
        None
        if seed is None
        else torch.Generator().manual_seed(integer("seed", seed, minimum=0) + stream)
    )


def audit_published_setting(
    settings: AuditSettings, *, pair: str = "one_coordinate"
) -> AuditResult:
    """Audits the noise that WS Theorem 6 asks for: what the permuted coordinates tell of ``pair``.

    But for ``"one_coordinate"`` a run takes a random number per step, and few runs tell much:
    ``trials`` is cut to 10⁸/steps.
    """
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
        generator=_generator_of(settings.seed, 0),
        **run,
    )


def audit_small_training(settings: AuditSettings) -> AuditResult:
    """Audits WS Algorithm 1 on a network of 25,450 parameters and real digits, with a Dirac canary.

    That is WS Table VI, scaled down.

    Raises:
        ValueError: If the data are not there.
    """
    train_set, _ = load_image_dataset("mnist-5k")
    images = train_set.tensors[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Flatten(), nn.Linear(images[0].numel(), 32), nn.ReLU(), nn.Linear(32, 10)
        )
    engine = PrivacyEngine(accountant="shuffled_fw", seed=settings.seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(train_set, batch_size=BATCH, shuffle=True),
        target_epsilon=settings.target_epsilon,
        target_delta=DELTA,
        epochs=10,
        bound="published",
        max_grad_norm=1.0,
        shuffle_weights=WeightShuffling(
            # Next to the sum of real records, clipped to one record's norm, one gradient would be
            # too small to see: that is luck with these data and no guarantee.
            batch_clip=1.0 if settings.others == "zero" else float(BATCH),
        ),
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
        generator=_generator_of(settings.seed, 1),
    )


AUDITS: dict[str, list[Callable[[AuditSettings], AuditResult]]] = {
    "published": [
        audit_published_setting,
        functools.partial(audit_published_setting, pair="oblique"),
    ],
    "training": [audit_small_training],
}


def run_audits(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Runs the audits and returns what they found."""
    kind = options.pop("kind")
    settings = AuditSettings(**options)
    # The rest is checked by the first audit, before it draws anything.
    integer("training_steps", settings.training_steps, minimum=100, maximum=10**9)
    results = [
        audit(settings) for name in (AUDITS if kind == "all" else [kind]) for audit in AUDITS[name]
    ]
    # The findings are about the pair of data sets that the claims compare.
    values = {
        "adjacency": str(results[0].claims[0].bound.adjacency),
        "audits": [result.to_dict() for result in results],
    }
    return values, "\n\n".join(map(str, results)) + "\n"
