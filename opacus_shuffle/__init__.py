"""Shuffle-model differential privacy for Opacus: import it, and Opacus knows the accountants; flags do the rest.

>>> import opacus_shuffle
>>> epsilon = opacus_shuffle.compute_epsilon(
...     "shuffle_gauss", noise_multiplier=9.48, num_users=60_000, steps=7, delta=1 / 60_000)
>>> round(epsilon, 5)
0.00295
"""

from __future__ import annotations

from opacus_shuffle import accountants, analysis, audit, permutation, sco
from opacus_shuffle._version import __version__
from opacus_shuffle.accountants.compute import compute_epsilon, compute_noise_multiplier, privacy_bound, privacy_report
from opacus_shuffle.accountants.mechanisms import (
    ShuffledCheckIn,
    ShuffledSums,
    ShuffledWeights,
    ShuffleGauss,
    SubsampledShuffle,
)
from opacus_shuffle.accountants.plan import plan
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, PrivacyAssumptionWarning, PrivacyBound
from opacus_shuffle.engine.prepare_model import prepare_model
from opacus_shuffle.engine.privacy_engine import PrivacyEngine, ShuffleMixin
from opacus_shuffle.engine.weights.module import ShuffleGradSampleModule
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling
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
    "ShuffleGauss",
    "ShuffleGradSampleModule",
    "ShuffleMixin",
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
]
