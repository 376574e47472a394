"""The ways of training, one file each; a file that is put here is found.

>>> import opacus
>>> [type(scheme_of(opacus.PrivacyEngine(accountant=name))).__name__ for name in ("rdp", "shuffle_gauss")]
['OpacusOwn', 'GaussianReports']
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from opacus_shuffle.engine.schemes.base import Scheme
from opacus_shuffle.engine.schemes.opacus_own import OpacusOwn

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")


def scheme_of(engine: Any) -> Scheme:
    """The scheme that trains what the engine's accountant accounts for."""
    mechanism = getattr(engine.accountant, "mechanism_class", None)
    kind = OpacusOwn if mechanism is None else Scheme.of_mechanism(mechanism)
    return kind(engine)


__all__ = ["Scheme", "scheme_of"]
