"""Accounting: mechanisms record what ran, and bounds compute its ε.

Opacus has one accountant for each mechanism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opacus_shuffle.accountants import bounds as _registers_all_bounds  # noqa: F401
from opacus_shuffle.accountants.bounds.registry import (
    bounds_of,
    compute_bound,
    register_bound,
)
from opacus_shuffle.accountants.calibrate import smallest_noise
from opacus_shuffle.core.guarantees import Guarantee, PrivacyAssumptionWarning, PrivacyBound
from opacus_shuffle.core.imports import lazy_attributes

if TYPE_CHECKING:
    from opacus_shuffle.accountants.accountant import ShuffleAccountant
    from opacus_shuffle.accountants.compute import best_sample_rate
    from opacus_shuffle.accountants.dp_accounting_export import to_dp_accounting
    from opacus_shuffle.accountants.opacus_registry import register_accountants

_package = "opacus_shuffle.accountants"
__getattr__, __dir__ = lazy_attributes(  # names that need Opacus or an extra
    _package,
    {
        "ShuffleAccountant": f"{_package}.accountant",
        "best_sample_rate": f"{_package}.compute",
        "register_accountants": f"{_package}.opacus_registry",
        "to_dp_accounting": f"{_package}.dp_accounting_export",
    },
)

__all__ = [
    "Guarantee",
    "PrivacyAssumptionWarning",
    "PrivacyBound",
    "ShuffleAccountant",
    "best_sample_rate",
    "bounds_of",
    "compute_bound",
    "register_accountants",
    "register_bound",
    "smallest_noise",
    "to_dp_accounting",
]
