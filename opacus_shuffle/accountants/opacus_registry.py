"""Registers an accountant for every mechanism with Opacus, under the mechanism's name.

>>> from opacus.accountants import create_accountant
>>> import opacus_shuffle
>>> create_accountant("shuffle_gauss").mechanism()
'shuffle_gauss'
"""

from __future__ import annotations

from typing import Any

from opacus.accountants import register_accountant
from opacus.accountants.registry import create_accountant

from opacus_shuffle.accountants.mechanisms import MECHANISMS


def register_accountants() -> None:
    """Registers every mechanism's accountant; again under a reload, never over a stranger's of the same name."""
    for name in MECHANISMS:
        register_accountant(name, _Maker(name), force=_registered_by_us(name))  # type: ignore[arg-type]


class _Maker:
    """Makes a mechanism's accountant when called, as its class does: at registration that class may be half imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, **arguments: Any) -> Any:
        from opacus_shuffle.accountants.accountant import accountant_class

        return accountant_class(MECHANISMS[self._name])(**arguments)  # type: ignore[arg-type]


def _registered_by_us(name: str) -> bool:
    """Whether Opacus already holds this accountant or an earlier load of it."""
    try:
        existing = type(create_accountant(name))
    except ValueError:  # Opacus's word for "not registered"
        return False
    return (existing.__module__, existing.__qualname__) == (__package__, f"{MECHANISMS[name].__name__}Accountant")


register_accountants()
