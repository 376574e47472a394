"""Shuffle-model differential privacy for Opacus: an import registers the accountants.

>>> import opacus_shuffle
>>> epsilon = opacus_shuffle.compute_epsilon(
...     "shuffle_gauss", noise_multiplier=9.48, num_users=60_000, steps=7, delta=1 / 60_000)
>>> round(epsilon, 5)
0.00293

Names are imported when first used. The accountants are registered with Opacus as soon as both
packages are imported, in either order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from opacus_shuffle._version import __version__
from opacus_shuffle.core import imports

if TYPE_CHECKING:
    from opacus_shuffle import accountants, analysis, audit, permutation, sco
    from opacus_shuffle.accountants.compute import (
        compute_epsilon,
        compute_noise_multiplier,
        privacy_bound,
        privacy_report,
    )
    from opacus_shuffle.accountants.mechanisms import (
        RandomAllocation,
        SecretCheckIn,
        ShuffledCheckIn,
        ShuffledSums,
        ShuffledWeights,
        ShuffleGauss,
        SubsampledShuffle,
    )
    from opacus_shuffle.accountants.plan import plan
    from opacus_shuffle.accountants.report import PrivacyReport
    from opacus_shuffle.core.guarantees import (
        Adjacency,
        Guarantee,
        PrivacyAssumptionWarning,
        PrivacyBound,
    )
    from opacus_shuffle.engine.privacy_engine import PrivacyEngine
    from opacus_shuffle.engine.step.weight_shuffler import ShuffleGradSampleModule, WeightShuffling
    from opacus_shuffle.networks.position_ids import prepare_model
    from opacus_shuffle.networks.token_loss import token_loss
    from opacus_shuffle.permutation import PermutationSpec, find_permutations
    from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

__all__ = [
    "Adjacency",
    "Guarantee",
    "PermutationSpec",
    "PrivacyAssumptionWarning",
    "PrivacyBound",
    "PrivacyEngine",
    "PrivacyReport",
    "RandomAllocation",
    "SecretCheckIn",
    "ShuffleGauss",
    "ShuffleGradSampleModule",
    "ShuffleVectorSum",
    "ShuffledCheckIn",
    "ShuffledSums",
    "ShuffledWeights",
    "SubsampledShuffle",
    "WeightShuffling",
    "__version__",
    "accountants",
    "analysis",
    "audit",
    "compute_epsilon",
    "compute_noise_multiplier",
    "find_permutations",
    "permutation",
    "plan",
    "prepare_model",
    "privacy_bound",
    "privacy_report",
    "sco",
    "token_loss",
]

_HOMES = {
    "": "accountants analysis audit permutation sco",
    "accountants.compute": "compute_epsilon compute_noise_multiplier privacy_bound privacy_report",
    "accountants.mechanisms": (
        "RandomAllocation SecretCheckIn ShuffleGauss ShuffledCheckIn ShuffledSums "
        "ShuffledWeights SubsampledShuffle"
    ),
    "accountants.plan": "plan",
    "accountants.report": "PrivacyReport",
    "core.guarantees": "Adjacency Guarantee PrivacyAssumptionWarning PrivacyBound",
    "networks.position_ids": "prepare_model",
    "networks.token_loss": "token_loss",
    "engine.privacy_engine": "PrivacyEngine",
    "engine.step.weight_shuffler": "ShuffleGradSampleModule WeightShuffling",
    "permutation.find": "find_permutations",
    "permutation.spec": "PermutationSpec",
    "protocols.vector_sum": "ShuffleVectorSum",
}

__getattr__, __dir__ = imports.lazy_attributes(
    __name__,
    {
        name: home and f"{__name__}.{home}"
        for home, names in _HOMES.items()
        for name in names.split()
    },
)
imports.after_import(
    "opacus", lambda: importlib.import_module("opacus_shuffle.accountants.opacus_registry")
)
