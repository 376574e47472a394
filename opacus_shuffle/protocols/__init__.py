"""Sums of bounded vectors and numbers by multi-message shuffling."""

from opacus_shuffle.protocols.calibration import noise_variance
from opacus_shuffle.protocols.messages import Messages
from opacus_shuffle.protocols.scalar_sum import ShuffleScalarSum
from opacus_shuffle.protocols.statement import PrivacyStatement
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

__all__ = ["Messages", "PrivacyStatement", "ShuffleScalarSum", "ShuffleVectorSum", "noise_variance"]
