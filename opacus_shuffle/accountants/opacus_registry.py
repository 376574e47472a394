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
    """Registers every mechanism's accountant with Opacus, in the place of any of the same name."""
    for name in MECHANISMS:
        register_accountant(name, functools.partial(_make, name), force=True)  # type: ignore[arg-type]


def _make(name: str, **arguments: Any) -> Any:
    """Makes a mechanism's accountant."""
    # Opacus is imported in the middle of the accountant's own imports, and this module after it.
    from opacus_shuffle.accountants.accountant import ShuffleAccountant

    return ShuffleAccountant(MECHANISMS[name], **arguments)


register_accountants()
