"""Sums of bounded vectors and numbers by multi-message shuffling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opacus_shuffle.core import lazy_import

if TYPE_CHECKING:
    from opacus_shuffle.protocols.calibration import noise_variance
    from opacus_shuffle.protocols.messages import Messages
    from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum
    from opacus_shuffle.protocols.statement import PrivacyStatement
    from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

__all__ = ["Messages", "PrivacyStatement", "ShuffleScalarSum", "ShuffleVectorSum", "noise_variance"]

__getattr__, __dir__ = lazy_import.names_of(
    __name__,
    {
        "Messages": f"{__name__}.messages",
        "PrivacyStatement": f"{__name__}.statement",
        "ShuffleScalarSum": f"{__name__}.scalar_sum",
        "ShuffleVectorSum": f"{__name__}.vector_sum",
        "noise_variance": f"{__name__}.calibration",
    },
)
