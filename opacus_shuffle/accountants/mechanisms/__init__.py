"""The mechanisms, one file for each family. All files of this folder are imported.

>>> ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1).expected_reports
6000.0
"""

from __future__ import annotations

import importlib
import pkgutil

from opacus_shuffle.accountants.mechanism import MECHANISMS, Mechanism
from opacus_shuffle.accountants.mechanisms.random_allocation import RandomAllocation
from opacus_shuffle.accountants.mechanisms.secret_checkin import SecretCheckIn
from opacus_shuffle.accountants.mechanisms.shuffle_gaussian import (
    ShuffledCheckIn,
    ShuffleGauss,
    SubsampledShuffle,
)
from opacus_shuffle.accountants.mechanisms.shuffled_sums import ShuffledSums
from opacus_shuffle.accountants.mechanisms.shuffled_weights import ShuffledWeights

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")

__all__ = [
    "MECHANISMS",
    "Mechanism",
    "RandomAllocation",
    "SecretCheckIn",
    "ShuffleGauss",
    "ShuffledCheckIn",
    "ShuffledSums",
    "ShuffledWeights",
    "SubsampledShuffle",
]
