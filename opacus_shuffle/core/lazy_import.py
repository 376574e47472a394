"""Importing late: names of a package when they are first asked for, and ours after another package has been imported.

PyTorch and Opacus take seconds to import, and a number or a line of help needs neither.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def names_of(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package whose names are imported when first asked for.

    Args:
        package: Its ``__name__``.
        homes: The module that has each name; an empty one for a module of the package itself.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = (
            getattr(importlib.import_module(home), name)
            if home
            else importlib.import_module(f"{package}.{name}")
        )
        setattr(module, name, value)  # so that it is asked for once
        return value

    return get, lambda: sorted({*vars(module), *homes})


def after_import(name: str, action: Callable[[], object]) -> None:
    """Acts once a package has been imported: now if it has been, else at the end of its import."""
    if sys.modules.get(name) is not None:  # None stands for a package that must not be imported
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting(MetaPathFinder):
    """Has the import of one package followed by an action; the package is found and loaded as it would be anyway."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        # Those before found nothing. This one stays until an import succeeds: many only ask whether
        # the package is there.
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            # Every search makes a loader of its own, so that no other import is followed.
            spec.loader.exec_module = partial(self._follow, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _follow(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Runs the package's code, then acts, and waits no longer."""
        execute(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._action()
