"""Registers an accountant for every mechanism with Opacus, under the mechanism's name.

>>> from opacus.accountants import create_accountant
>>> import opacus_shuffle
>>> create_accountant("shuffle_gauss").mechanism()
'shuffle_gauss'
"""

from __future__ import annotations

import functools
from typing import Any

from opacus.accountants import register_accountant

from opacus_shuffle.accountants.mechanisms import MECHANISMS


def register_accountants() -> None:
    """Registers an accountant for every mechanism; it replaces accountants of the same names."""
    for name in MECHANISMS:
        factory: Any = functools.partial(_make_accountant, name)
        register_accountant(name, factory, force=True)


def _make_accountant(name: str, **arguments: Any) -> Any:
    """Returns a new accountant for the mechanism of this name."""
    # This module runs right after the import of Opacus, which may be in the middle of the import of
    # core.opacus_compat. The accountant's module needs the latter, so it is imported here.
    from opacus_shuffle.accountants.accountant import ShuffleAccountant

    return ShuffleAccountant(MECHANISMS[name], **arguments)


register_accountants()
