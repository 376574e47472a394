"""Accounting: mechanisms say what ran, bounds what it cost, and one accountant for each mechanism tells Opacus.

>>> from opacus.accountants import create_accountant
>>> import opacus_shuffle
>>> create_accountant("shuffle_gauss").mechanism()
'shuffle_gauss'
"""

from __future__ import annotations

from typing import Any

from opacus.accountants import register_accountant
from opacus.accountants.registry import create_accountant

from opacus_shuffle.accountants import bounds as _registers_all_bounds  # noqa: F401
from opacus_shuffle.accountants.accountant import ShuffleAccountant, accountant_class
from opacus_shuffle.accountants.bounds.registry import baselines_of, bounds_of, compute_baseline, compute_bound, register_bound
from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.core.guarantees import Guarantee, PrivacyAssumptionWarning, PrivacyBound

ACCOUNTANTS: dict[str, type[ShuffleAccountant]] = {}
"""The accountant of every mechanism, by its name with Opacus."""


def register_accountants() -> None:
    """Makes and registers an accountant for every mechanism; again under a reload, never over a stranger's of the same name."""
    for name, mechanism in MECHANISMS.items():
        accountant = accountant_class(mechanism)  # type: ignore[arg-type]
        register_accountant(name, accountant, force=_registered_by_us(accountant))
        ACCOUNTANTS[name] = accountant


def _registered_by_us(accountant: type[ShuffleAccountant]) -> bool:
    """Whether Opacus already holds this class or an earlier load of it."""
    try:
        existing = type(create_accountant(accountant.mechanism()))
    except ValueError:  # Opacus's word for "not registered"
        return False
    return (existing.__module__, existing.__qualname__) == (accountant.__module__, accountant.__qualname__)


def __getattr__(name: str) -> Any:
    """The accountants by their class names, such as ``ShuffleGaussAccountant``: that is how they pickle."""
    for accountant in ACCOUNTANTS.values():
        if accountant.__name__ == name:
            return accountant
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_accountants()

__all__ = [
    "ACCOUNTANTS",
    "Guarantee",
    "PrivacyAssumptionWarning",
    "PrivacyBound",
    "ShuffleAccountant",
    "baselines_of",
    "bounds_of",
    "compute_baseline",
    "compute_bound",
    "register_accountants",
    "register_bound",
    "smallest_noise",
]
