"""Liew and Takahashi's shuffle Gaussian mechanism (SG): every record's report carries Gaussian noise of its own.

Without ``local_noise`` the noise is added once to the sum, as Opacus does, and stands for that of
the reports.
"""

from __future__ import annotations

from typing import ClassVar

from opacus_shuffle.accountants.mechanisms import (
    Mechanism,
    ShuffledCheckIn,
    ShuffleGauss,
    SubsampledShuffle,
)
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.training_plan import Request


class GaussianReports(Scheme):
    """One round of shuffled reports per step, of all records of the batch."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (
        ShuffleGauss,
        SubsampledShuffle,
        ShuffledCheckIn,
    )

    def refuse(self, request: Request) -> None:
        """Refuses what does not go with reports."""
        super().refuse(request)
        if request.local_noise:
            one_of(
                "grad_sample_mode", request.grad_sample_mode, ("hooks", "functorch", "ew", "ghost")
            )
