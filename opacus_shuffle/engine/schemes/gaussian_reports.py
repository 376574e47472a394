"""Reports with Gaussian noise of their own (Liew and Takahashi, shuffle Gaussian mechanism).

Without ``local_noise`` the noise is added once to the sum, as Opacus does, and represents that of
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
from opacus_shuffle.engine.schemes.base import Scheme


class GaussianReports(Scheme):
    """One round of shuffled reports per step, of all records of the batch."""

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = (
        ShuffleGauss,
        SubsampledShuffle,
        ShuffledCheckIn,
    )
