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
    """Registers every mechanism's accountant with Opacus; again after a reload.

    Raises:
        ValueError: If Opacus has somebody else's under one of the names; nothing is then
            registered.
    """
    if strangers := [name for name in MECHANISMS if _belongs_to_a_stranger(name)]:
        raise ValueError(
            f"Opacus has other accountants already registered as {', '.join(strangers)}: register "
            "those under other names"
        )
    for name in MECHANISMS:
        register_accountant(name, functools.partial(_make, name), force=True)  # type: ignore[arg-type]


def _make(name: str, **arguments: Any) -> Any:
    """Makes a mechanism's accountant."""
    # Opacus is imported in the middle of the accountant's own imports, and this module after it.
    from opacus_shuffle.accountants.accountant import ShuffleAccountant

    return ShuffleAccountant(MECHANISMS[name], **arguments)


def _belongs_to_a_stranger(name: str) -> bool:
    """Whether what Opacus makes under this name is no accountant of ours, of any load."""
    try:
        kind = type(create_accountant(name))
    except Exception as error:
        # A stranger's may want arguments; a ValueError is Opacus's word for "not registered".
        return not isinstance(error, ValueError)
    return (kind.__module__, kind.__qualname__) != (
        f"{__package__}.accountant",
        "ShuffleAccountant",
    )


register_accountants()
