"""``opacus-shuffle audit``: trains on real digits with a canary in half of the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_shuffle.audit.training_audit import audit_training
from opacus_shuffle.commands.flags import AuditSettings
from opacus_shuffle.commands.images import CLASSES, load_images
from opacus_shuffle.engine.privacy_engine import PrivacyEngine

BATCH_SIZE = 80


def run_audit(options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Trains a linear model with a canary, and returns what the audit found."""
    settings = AuditSettings(**options)
    engine = PrivacyEngine(accountant="random_allocation", seed=settings.seed)
    train_set, _ = load_images("mnist-5k")
    network = nn.Linear(train_set.tensors[0][0].numel(), CLASSES, bias=False)
    nn.init.zeros_(network.weight)
    model, optimizer, loader = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True),
        noise_multiplier=settings.noise_multiplier,
        max_grad_norm=1.0,
    )
    result = audit_training(
        model=model,
        optimizer=optimizer,
        data_loader=loader,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0].flatten(1)), batch[1]),
        steps=settings.steps,
        delta=settings.delta,
        generator=None
        if settings.seed is None
        else torch.Generator().manual_seed(settings.seed + 1),
    )
    # The findings are about the pair of data sets that the claims compare.
    adjacency = str(result.claims[0].adjacency)
    return {"adjacency": adjacency, "audits": [result.to_dict()]}, f"{result}\n"
