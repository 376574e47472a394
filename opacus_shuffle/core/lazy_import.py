"""Importing late: a package's names when first asked for, and ours after another package's import.

PyTorch and Opacus take seconds to import, and a number or a line of help needs neither.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


def names_of(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a package's ``__getattr__`` and ``__dir__``, which import names when first asked for.

    Args:
        package: Its ``__name__``.
        homes: The module that has each name; an empty one for a module of the package itself.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)  # so that it is asked for once
        return value

    return get, lambda: sorted({*vars(module), *homes})


def after_import(name: str, action: Callable[[], object]) -> None:
    """Acts once a package has been imported: now if it has been, else at the end of its import.

    The package is found and loaded as it would be anyway. The action may run more than once.
    """
    if sys.modules.get(name) is not None:  # None stands for a package that must not be imported
        action()
        return

    def find_spec(fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != name:
            return None
        later = sys.meta_path[sys.meta_path.index(waiting) + 1 :]  # type: ignore[arg-type]
        specs = (finder.find_spec(fullname, path, target) for finder in later)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def follow(module: ModuleType) -> None:
            execute(module)
            action()

        # Every search makes a loader of its own, so that no other import is followed.
        spec.loader.exec_module = follow  # type: ignore[method-assign]
        return spec

    # This finder stays: many only ask whether the package is there, and an import may fail and be
    # tried again.
    waiting = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, waiting)  # type: ignore[arg-type]
