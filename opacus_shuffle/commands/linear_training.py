"""One linear model, trained privately for users of one kind of trust."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.accountants.communication import sent_per_user
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, unshuffled_epsilon
from opacus_shuffle.commands.kinds_of_trust import CLASSES, Kind, Outcome
from opacus_shuffle.core.guarantees import PrivacyBound
from opacus_shuffle.engine.privacy_engine import PrivacyEngine

CLIPPING_NORM = 0.5
MOMENTUM = 0.9


def train_kind(
    kind: Kind,
    train_set: TensorDataset,
    test_set: TensorDataset,
    *,
    epsilon: float,
    delta: float,
    seed: int | None = None,
    on_round: Callable[[], None] = lambda: None,
) -> Outcome:
    """Trains a linear model within a budget.

    Args:
        kind: Who is trusted.
        train_set: Features, shape (records, entries), and labels 0 to 9.
        test_set: The same of held-out records.
        epsilon: ε to stay within.
        delta: At this δ.
        seed: To repeat a run that protects nobody.
        on_round: Called after every round.

    Returns:
        The accuracy, and the ε spent, which is proved for every data set.

    Raises:
        ValueError: If no noise meets the budget.
    """
    features = train_set.tensors[0]
    records, entries = features.shape
    # Features have unit length: a bias would be half of every gradient's squared norm, and clipping would halve the rest.
    network = nn.Linear(entries, CLASSES, bias=False)
    nn.init.zeros_(network.weight)
    epochs = kind.epochs(records)
    bits = kind.accountant == "shuffled_sums"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This run is not private")  # the command says it
        engine = PrivacyEngine(accountant=kind.accountant, seed=seed)
        sgd = torch.optim.SGD(network.parameters(), lr=kind.learning_rate, momentum=MOMENTUM)
        run: dict[str, Any] = {
            "module": network,
            "optimizer": sgd,
            "data_loader": DataLoader(train_set, batch_size=kind.batch_size(records)),
            "max_grad_norm": CLIPPING_NORM,
            "grad_sample_mode": "hooks" if bits else "ghost",  # ghost clipping takes no gradient per record
            "local_noise": kind.accountant == "shuffle_gauss",
        }
        budget: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta}
        if kind.bound == "local":
            noise = _unshuffled_noise(records, epochs, **budget)
            model, optimizer, *criterion, loader = engine.make_private(**run, noise_multiplier=noise)
        else:
            model, optimizer, *criterion, loader = engine.make_private_with_epsilon(**run, **budget, epochs=epochs)
    loss = criterion[0] if criterion else functional.cross_entropy
    for _ in range(epochs):
        for x, y in loader:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            on_round()
    return Outcome(
        kind=kind,
        bound=_spent(kind, engine, delta),
        accuracy=_accuracy(network, test_set),
        bytes_per_user=_bytes_per_user(engine, network),
        noise_multiplier=float(optimizer.noise_multiplier),
    )


def _unshuffled_noise(records: int, rounds: int, *, target_epsilon: float, target_delta: float) -> float:
    """The noise of each report with which all of one user's reports, seen by name, stay within a budget."""

    def spent(noise_multiplier: float) -> float:
        each = ShuffledRound(noise_multiplier=noise_multiplier, num_users=records)
        return unshuffled_epsilon([(each, rounds)], delta=target_delta)

    return smallest_noise(spent, target_epsilon=target_epsilon)


def _spent(kind: Kind, engine: PrivacyEngine, delta: float) -> PrivacyBound:
    """ε spent and its meaning."""
    return next(bound for bound in engine.privacy_report(delta).bounds if bound.bound == kind.bound)


def _bytes_per_user(engine: PrivacyEngine, network: nn.Linear) -> int | None:
    """What one user sends in reports; None where it sends none."""
    rounds = getattr(engine.accountant, "rounds", ())  # Opacus's own accountants know of no reports
    sent = sent_per_user(rounds, dimension=sum(parameter.numel() for parameter in network.parameters()))
    return None if sent is None else sent.bytes_per_user


@torch.no_grad()
def _accuracy(network: nn.Linear, test_set: TensorDataset) -> float:
    """The share of records that are classified rightly."""
    features, labels = test_set.tensors
    return float((functional.linear(features, network.weight).argmax(1) == labels).double().mean())
