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
from opacus.accountants.registry import create_accountant

from opacus_shuffle.accountants.mechanisms import MECHANISMS


def register_accountants() -> None:
    """Registers every mechanism's accountant; again under a reload, never over a stranger's of the same name.

    Raises:
        ValueError: If Opacus has a stranger's; nothing is then registered.
    """
    known = {name: _registered(name) for name in MECHANISMS}
    if strangers := [name for name, owner in known.items() if owner is False]:
        raise ValueError(
            f"Opacus has other accountants already registered as {', '.join(strangers)}: register "
            "those under other names"
        )
    for name, owner in known.items():
        register_accountant(name, functools.partial(_make, name), force=owner is True)  # type: ignore[arg-type]


def _make(name: str, **arguments: Any) -> Any:
    """Makes a mechanism's accountant when called: at registration its class may be half imported."""
    from opacus_shuffle.accountants.accountant import ShuffleAccountant

    return ShuffleAccountant(MECHANISMS[name], **arguments)


def _registered(name: str) -> bool | None:
    """Whether what Opacus holds under this name is our accountant, or an earlier load of it; None if it holds nothing."""
    try:
        existing = type(create_accountant(name))
    except Exception as error:
        # a stranger's may want arguments; a ValueError is Opacus's word for "not registered"
        return None if isinstance(error, ValueError) else False
    return (existing.__module__, existing.__qualname__) == (
        f"{__package__}.accountant",
        "ShuffleAccountant",
    )


register_accountants()
