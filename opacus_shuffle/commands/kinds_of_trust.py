"""The kinds of trust that are compared: a server, a shuffler, or nobody, each with its way to train and what came of it.

>>> [f"{kind.trusted}: {kind.how}" for kind in KINDS]
['a server: DP-SGD', 'a shuffler: sums of bits', 'a shuffler: Gaussian reports', 'nobody: Gaussian reports']
"""

from __future__ import annotations

import dataclasses
from typing import Any

from opacus_shuffle.core.guarantees import PrivacyBound

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
    Kind(trusted="a server", how="DP-SGD", accountant="prv", bound="prv", rounds=60, learning_rate=4.0, sampled=True),
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
        bytes_per_user: What one user sends over the whole run, without the labels of bits; None for the record itself.
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
