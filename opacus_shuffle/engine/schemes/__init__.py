"""The ways of training, one file each; a new file is found by itself.

>>> import opacus
>>> engines = [opacus.PrivacyEngine(accountant=name) for name in ("rdp", "shuffle_gauss")]
>>> [type(scheme_of(engine)).__name__ for engine in engines]
['OpacusOwn', 'GaussianReports']
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.schemes.opacus_own import OpacusOwn

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def scheme_of(engine: Any) -> Scheme:
    """Returns the scheme that trains what the engine's accountant accounts for."""
    mechanism = getattr(engine.accountant, "mechanism_class", None)
    kind = OpacusOwn if mechanism is None else Scheme.of_mechanism(mechanism)
    return kind(engine)


__all__ = ["Scheme", "scheme_of"]
