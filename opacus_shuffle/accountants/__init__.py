"""How it is accounted: one thin Opacus accountant per registered name, over an open table of bounds.

>>> from opacus.accountants import create_accountant
>>> import opacus_shuffle
>>> create_accountant("shuffle_gauss").mechanism()
'shuffle_gauss'
"""

from __future__ import annotations

from opacus.accountants import register_accountant
from opacus.accountants.registry import create_accountant

from opacus_shuffle.accountants.base import ShuffleAccountant
from opacus_shuffle.accountants.bounds import baselines as _registers_its_baselines  # noqa: F401
from opacus_shuffle.accountants.bounds import shuffle_gaussian as _registers_its_bounds  # noqa: F401
from opacus_shuffle.accountants.bounds import shuffled_sums as _registers_its_own  # noqa: F401
from opacus_shuffle.accountants.bounds import shuffled_weights as _registers_its_bounds_too  # noqa: F401
from opacus_shuffle.accountants.bounds.registry import (
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
    baselines_of,
    bounds_of,
    compute_baseline,
    compute_bound,
    register_bound,
)
from opacus_shuffle.accountants.shuffle_gauss import ShuffleGaussAccountant
from opacus_shuffle.accountants.shuffled_checkin import ShuffledCheckInAccountant
from opacus_shuffle.accountants.shuffled_fw import ShuffledWeightsAccountant
from opacus_shuffle.accountants.shuffled_sums import ShuffledSumsAccountant
from opacus_shuffle.accountants.subsampled_shuffle import SubsampledShuffleAccountant

ACCOUNTANTS: tuple[type[ShuffleAccountant], ...] = (
    ShuffleGaussAccountant,
    SubsampledShuffleAccountant,
    ShuffledCheckInAccountant,
    ShuffledWeightsAccountant,
)
"""Those whose runs a few plain numbers describe; ``shuffled_sums`` needs its protocol."""


def register_accountants() -> None:
    """Register every accountant with Opacus; again under a reload, never over a stranger's of the same name."""
    everyone: tuple[type[ShuffleAccountant], ...] = (*ACCOUNTANTS, ShuffledSumsAccountant)
    for accountant in everyone:
        register_accountant(accountant.mechanism(), accountant, force=_registered_by_us(accountant))


def _registered_by_us(accountant: type[ShuffleAccountant]) -> bool:
    """Whether Opacus already holds this class or an earlier load of it."""
    try:
        existing = type(create_accountant(accountant.mechanism()))
    except ValueError:  # Opacus's word for "not registered"
        return False
    return (existing.__module__, existing.__qualname__) == (accountant.__module__, accountant.__qualname__)


register_accountants()

__all__ = [
    "ACCOUNTANTS",
    "Guarantee",
    "PrivacyAssumptionWarning",
    "PrivacyBound",
    "ShuffleAccountant",
    "ShuffleGaussAccountant",
    "ShuffledCheckInAccountant",
    "ShuffledSumsAccountant",
    "ShuffledWeightsAccountant",
    "SubsampledShuffleAccountant",
    "baselines_of",
    "bounds_of",
    "compute_baseline",
    "compute_bound",
    "register_accountants",
    "register_bound",
]
