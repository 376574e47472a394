"""``shuffled_checkin``: in every step each user takes part by its own coin of probability γ (SG Theorem 3)."""

from __future__ import annotations

from typing import ClassVar

from opacus_shuffle.accountants.base import ShuffleAccountant
from opacus_shuffle.accountants.mechanisms import Mechanism, ShuffledCheckIn


class ShuffledCheckInAccountant(ShuffleAccountant):
    """SG ICLR Theorem 3 (``bound="published"``) or the exact RDP of the same pair (``"pair"``) per step.

    Goes with Poisson batches, Opacus's default.

    >>> accountant = ShuffledCheckInAccountant(num_users=60_000, local_noise=True)
    >>> accountant.history = [(5.0, 0.1, 5540)]
    >>> [round(accountant.bound(1 / 60_000, bound=name).epsilon, 4) for name in ("published", "pair")]
    [9.6175, 0.0539]
    """

    mechanism_class: ClassVar[type[Mechanism]] = ShuffledCheckIn
