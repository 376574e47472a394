"""Importing late: names of a package when they are first asked for, and ours after another package has been imported.

PyTorch and Opacus take seconds to import, and a number or a line of help needs neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def names_of(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
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
        found = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"{package}.{name}")
        setattr(module, name, found)  # so that it is asked for once
        return found

    return get, lambda: sorted({*vars(module), *homes})


def after_import(name: str, action: Callable[[], object]) -> None:
    """Acts once a package has been imported: now if it has been, else at the end of its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))


class _Waiting(MetaPathFinder):
    """Has the import of one package followed by an action; the package is found and loaded as it would be anyway."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action = name, action

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None:
            sys.meta_path.insert(0, self)  # it may be installed later on
        elif spec.loader is not None:
            spec.loader = _Followed(spec.loader, self)
        return spec

    def follow(self) -> None:
        """Acts."""
        self._action()

    def wait_again(self) -> None:
        """Prepares for another attempt."""
        sys.meta_path.insert(0, self)


class _Followed(Loader):
    """A loader, and what comes after it; the module itself keeps the loader alone."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self._loader, self._waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            self._waiting.wait_again()
            raise
        self._waiting.follow()
