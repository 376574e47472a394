"""Liew and Takahashi's shuffle Gaussian mechanism (SG), everyone in every round: their Theorem 1."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.analysis.mean_ratio import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleGauss(Mechanism):
    """All ``num_users`` users of the round report (SG Theorem 1); in training, the records of the batch."""

    name: ClassVar[str] = "shuffle_gauss"
    sampling: ClassVar[Sampling] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_rate != 1.0:
            raise ValueError(
                f"shuffle_gauss gains nothing from sampling, got sample_rate={self.sample_rate}: pass num_users = reports "
                "per round, or use subsampled_shuffle or shuffled_checkin"
            )
