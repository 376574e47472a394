"""Liew and Takahashi's shuffle Gaussian mechanism (SG) on samples of fixed size: their Theorem 2."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism
from opacus_shuffle.analysis.mean_ratio import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubsampledShuffle(Mechanism):
    """Exactly m = round(γ·n) of the users report, a fresh uniform draw each round (SG Theorem 2); γ becomes m/n."""

    name: ClassVar[str] = "subsampled_shuffle"
    sampling: ClassVar[Sampling] = "fixed_size"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._round_the_sample()
