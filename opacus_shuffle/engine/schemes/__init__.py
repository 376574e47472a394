"""The ways of training, one file each; a new file is found by itself.

>>> import opacus
>>> engines = [opacus.PrivacyEngine(accountant=name) for name in ("rdp", "shuffle_gauss")]
>>> [scheme_class(engine.accountant).__name__ for engine in engines]
['OpacusScheme', 'GaussianReports']
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.schemes.opacus_scheme import OpacusScheme

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def scheme_class(accountant: Any) -> type[Scheme]:
    """Returns the scheme that trains what an accountant accounts for."""
    mechanism = getattr(accountant, "mechanism_class", None)
    return OpacusScheme if mechanism is None else Scheme.of_mechanism(mechanism)


__all__ = ["Scheme", "scheme_class"]
