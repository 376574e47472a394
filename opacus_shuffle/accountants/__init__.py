"""Accounting: mechanisms say what ran, bounds what it cost, and one accountant for each mechanism tells Opacus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opacus_shuffle.accountants import bounds as _registers_all_bounds  # noqa: F401
from opacus_shuffle.accountants.bounds.registry import baselines_of, bounds_of, compute_baseline, compute_bound, register_bound
from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.core.guarantees import Guarantee, PrivacyAssumptionWarning, PrivacyBound

if TYPE_CHECKING:
    from opacus_shuffle.accountants.accountant import ACCOUNTANTS, ShuffleAccountant
    from opacus_shuffle.accountants.opacus_registry import register_accountants


def __getattr__(name: str) -> Any:
    """What needs Opacus, and the accountants by their class names, such as ``ShuffleGaussAccountant``: so they pickle.

    ``ACCOUNTANTS`` has the accountant of every mechanism that there is now, by its name with Opacus.
    """
    if name == "register_accountants":
        from opacus_shuffle.accountants.opacus_registry import register_accountants

        return register_accountants
    if name.endswith("Accountant") or name == "ACCOUNTANTS":
        from opacus_shuffle.accountants import accountant

        made: list[type] = [accountant.accountant_class(each) for each in MECHANISMS.values()]  # type: ignore[arg-type]
        known: dict[str, Any] = {each.__name__: each for each in (accountant.ShuffleAccountant, *made)}
        if name in known or name == "ACCOUNTANTS":
            return known.get(name, accountant.ACCOUNTANTS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is imported later, too."""
    return sorted({*globals(), *__all__})


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
