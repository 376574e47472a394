"""The mechanisms, one file each; a file that is put here is found.

In the shuffle-Gaussian family a report is a vector clipped to norm C plus its sender's own N(0, σ²C²I), and the adversary sees
the round's reports in random order (and how many there are): ``noise_multiplier`` is that local σ.

>>> ShuffledCheckIn(noise_multiplier=5.0, num_users=60_000, sample_rate=0.1).expected_reports
6000.0
"""

from __future__ import annotations

import importlib
import pkgutil

from opacus_shuffle.accountants.mechanism import MECHANISMS, Mechanism
from opacus_shuffle.accountants.mechanisms.shuffle_gauss import ShuffleGauss
from opacus_shuffle.accountants.mechanisms.shuffled_checkin import ShuffledCheckIn
from opacus_shuffle.accountants.mechanisms.shuffled_sums import ShuffledSums
from opacus_shuffle.accountants.mechanisms.shuffled_weights import ShuffledWeights
from opacus_shuffle.accountants.mechanisms.subsampled_shuffle import SubsampledShuffle

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")

__all__ = [
    "MECHANISMS",
    "Mechanism",
    "ShuffleGauss",
    "ShuffledCheckIn",
    "ShuffledSums",
    "ShuffledWeights",
    "SubsampledShuffle",
]
