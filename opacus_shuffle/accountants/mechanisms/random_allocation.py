"""Random allocation: each record trains exactly once per epoch, in a batch drawn at random.

It is DP-SGD at one trusted server. In each epoch a secret uniform draw assigns each record to a
batch ("balls in bins": Chua et al. 2024; Choquette-Choo et al. 2025; Feldman and Shenfeld
2025).
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from opacus_shuffle.accountants.mechanism import Mechanism, described
from opacus_shuffle.analysis.mean_ratio import Sampling
from opacus_shuffle.core.validation import integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocation(Mechanism):
    """One step of an epoch of ``num_batches``, the noised sum of one batch.

    Steps are counted in the order in which they ran, ``num_batches`` per epoch. A begun epoch
    counts in full, because its results may be the reason for the end of a run.

    Attributes:
        noise_multiplier: σ of the **sum** in units of the clipping norm, as in Opacus.
        num_users: n, at least one per batch; 1 if it is unknown, as no bound depends on it.
        sample_rate: 1/t, the expected share of the records in a batch.
        num_batches: t, the number of batches of an epoch.
    """

    name: ClassVar[str] = "random_allocation"
    sampling: ClassVar[Sampling] = "random_allocation"
    released: ClassVar[str] = "all released weights and gradients"
    zeroed: ClassVar[str] = "one record's gradients are zero"
    noise_is_local: ClassVar[bool] = False
    shuffled: ClassVar[bool] = False
    trains_on_stock_engines: ClassVar[bool] = False
    noise_multiplier: float = described(
        "noise of the sum over the clipping norm", "SIGMA", varies=True
    )
    num_users: int = described("n; no bound depends on it (default: not known)", "N", default=1)
    sample_rate: float = described("1/t, which follows from the batches", "GAMMA", default=1.0)
    num_batches: int = described("t, the batches of an epoch", "T")

    def __post_init__(self) -> None:
        super().__post_init__()
        batches = integer("num_batches", self.num_batches)
        if self.sample_rate != 1.0 and not math.isclose(self.sample_rate * batches, 1.0):
            raise ValueError(
                f"sample_rate of random_allocation is 1 / num_batches = {1 / batches:g}, got "
                f"{self.sample_rate}: leave it out"
            )
        self._set(num_batches=batches, sample_rate=1 / batches)
        if self.num_users > 1:
            self._set(num_users=max(self.num_users, batches))
