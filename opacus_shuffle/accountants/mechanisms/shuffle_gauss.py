"""Liew and Takahashi's shuffle Gaussian mechanism (SG), everyone in every round: their Theorem 1."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.analysis.mean_ratio import Sampling


def whole_reports(expected: float) -> int:
    """A product n·γ as a whole count: rounding noise forgiven, any other fraction dropped (fewer reports hide less)."""
    return round(expected) if abs(expected - round(expected)) < 1e-6 else math.floor(expected)


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

    @classmethod
    def _of_batch(cls, *, noise_multiplier: float, num_users: int, sample_rate: float, **fields: Any) -> Mechanism:
        return cls(noise_multiplier=noise_multiplier, num_users=whole_reports(num_users * sample_rate), **fields)
