"""One linear model, trained privately for users of each kind of trust: a server, a shuffler, or nobody.

>>> [f"{kind.trusted}: {kind.how}" for kind in KINDS]
['a server: DP-SGD', 'a shuffler: sums of bits', 'a shuffler: Gaussian reports', 'nobody: Gaussian reports']
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.accountants.communication import sent_per_user
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, unshuffled_epsilon
from opacus_shuffle.core.guarantees import PrivacyBound
from opacus_shuffle.core.progress import enter_phase
from opacus_shuffle.engine.privacy_engine import PrivacyEngine

CLIPPING_NORM = 0.5
MOMENTUM = 0.9
CLASSES = 10  # of all the data sets there are
SAMPLED_BATCH = 4000
"""Records of a sampled round at most (expected); half of the records where there are fewer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to train, with settings that were chosen on training images of mnist-5k.

    Attributes:
        trusted: Who must not be the adversary.
        how: What users send, in words.
        accountant: Of the engine.
        bound: Which ε is the budget's.
        rounds: About how many there are.
        learning_rate: Of gradients clipped to 0.5, with momentum.
        sampled: Whether a round is a secret sample of the users, rather than all of them.
    """

    trusted: str
    how: str
    accountant: str
    bound: str
    rounds: int
    learning_rate: float
    sampled: bool

    def batch_size(self, records: int) -> int:
        """Records of a round (expected)."""
        return max(1, min(records // 2, SAMPLED_BATCH)) if self.sampled else records

    def epochs(self, records: int) -> int:
        """Passes over the data that take about as many rounds as are wanted."""
        return max(1, round(self.rounds * self.batch_size(records) / records))


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
    ),
    Kind(
        trusted="a shuffler",
        how="Gaussian reports",
        accountant="shuffle_gauss",
        bound="certified",
        rounds=120,
        learning_rate=0.5,
        sampled=False,
    ),
    Kind(
        trusted="nobody",
        how="Gaussian reports",
        accountant="shuffle_gauss",
        bound="local",
        rounds=20,
        learning_rate=1.0,
        sampled=False,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one kind of trust came to.

    Attributes:
        kind: Which.
        bound: ε spent, with its meaning; never above the budget.
        accuracy: Share of the test records that are classified rightly.
        bytes_per_user: What one user sends over the whole run, without the labels of bits; None for
            the record itself.
        noise_multiplier: Of the sum or of each report, as the accountant means it.
    """

    kind: Kind
    bound: PrivacyBound
    accuracy: float
    bytes_per_user: int | None
    noise_multiplier: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "trusted": self.kind.trusted,
            "how": self.kind.how,
            "test_accuracy": self.accuracy,
            "bytes_per_user": self.bytes_per_user,
            "noise_multiplier": self.noise_multiplier,
            "privacy": self.bound.to_dict(),
        }


def train_kind(
    kind: Kind,
    train_set: TensorDataset,
    test_set: TensorDataset,
    *,
    epsilon: float,
    delta: float,
    seed: int | None = None,
) -> Outcome:
    """Trains a linear model within a budget.

    Args:
        kind: Who is trusted.
        train_set: Features, shape (records, entries), and labels 0 to 9.
        test_set: The same of held-out records.
        epsilon: ε to stay within.
        delta: At this δ.
        seed: To repeat a run that protects nobody.

    Returns:
        The accuracy, and the ε spent, which is proved for every data set.

    Raises:
        ValueError: If no noise meets the budget.
    """
    records, entries = train_set.tensors[0].shape
    # Features have unit length: a bias would be half of every gradient's squared norm, and clipping
    # would halve the rest.
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
            "grad_sample_mode": "hooks"
            if bits
            else "ghost",  # ghost clipping takes no gradient per record
            "local_noise": kind.accountant == "shuffle_gauss",
        }
        budget: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta}
        if kind.bound == "local":
            noise = _unshuffled_noise(records, epochs, **budget)
            model, optimizer, *criterion, loader = engine.make_private(
                **run, noise_multiplier=noise
            )
        else:
            model, optimizer, *criterion, loader = engine.make_private_with_epsilon(
                **run, **budget, epochs=epochs
            )
    loss = criterion[0] if criterion else functional.cross_entropy
    for _ in range(epochs):
        for x, y in loader:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            enter_phase(f"trusting {kind.trusted}, {kind.how}")
    rounds = getattr(engine.accountant, "rounds", ())  # Opacus's own accountants know of no reports
    sent = sent_per_user(rounds, dimension=network.weight.numel())
    held_out, labels = test_set.tensors
    with torch.no_grad():
        right = functional.linear(held_out, network.weight).argmax(1) == labels
    return Outcome(
        kind=kind,
        bound=next(
            bound for bound in engine.privacy_report(delta).bounds if bound.bound == kind.bound
        ),
        accuracy=float(right.double().mean()),
        bytes_per_user=None if sent is None else sent.bytes_per_user,
        noise_multiplier=float(optimizer.noise_multiplier),
    )


def _unshuffled_noise(
    records: int, rounds: int, *, target_epsilon: float, target_delta: float
) -> float:
    """The noise of each report with which all of one user's reports, seen by name, stay within a budget."""

    def spent(noise_multiplier: float) -> float:
        each = ShuffledRound(noise_multiplier=noise_multiplier, num_users=records)
        return unshuffled_epsilon([(each, rounds)], delta=target_delta)

    return smallest_noise(spent, target_epsilon=target_epsilon)
