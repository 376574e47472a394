"""Reports with Gaussian noise of their own (Liew and Takahashi, shuffle Gaussian mechanism).

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

    def check_request(self, request: Request) -> None:
        """Refuses what does not go with reports."""
        super().check_request(request)
        if request.local_noise:
            modes = ("hooks", "functorch", "ew", "ghost")
            one_of("grad_sample_mode", request.grad_sample_mode, modes)
