"""Liew and Takahashi's shuffle Gaussian mechanism (SG) on Poisson samples: their Theorem 3."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.analysis.mean_ratio import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffledCheckIn(Mechanism):
    """Each of the users reports with probability γ, by its own coin (SG Theorem 3)."""

    name: ClassVar[str] = "shuffled_checkin"
    sampling: ClassVar[Sampling] = "poisson"
