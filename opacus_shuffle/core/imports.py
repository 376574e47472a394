"""Lazy imports, actions after the import of another package, and missing optional packages.

PyTorch and Opacus take seconds to import, and neither is needed to compute an ε or to print help.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


def missing_extra(feature: str, package: str, extra: str) -> str:
    """Returns a message for a missing optional package: what needs it, and how to install it.

    Args:
        feature: What needs the package, such as ``"plot"``.
        package: The package that could not be imported.
        extra: The extra of ``setup.cfg`` that installs it.
    """
    command = f"pip install '.[{extra}]'"
    return f"{feature} needs the package {package}: run {command} in your clone of opacus_shuffle"


def lazy_attributes(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a ``__getattr__`` and a ``__dir__`` for a package that imports names on first use.

    Args:
        package: Its ``__name__``.
        homes: The module of each name; an empty one if the name is a module of the package itself.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)  # the next access does not come here
        return value

    return get, lambda: sorted({*vars(module), *homes})


def after_import(name: str, action: Callable[[], object]) -> None:
    """Runs an action once a package has been imported: now, or at the end of its import.

    The package is found and loaded as usual. The action may run more than once.
    """
    if sys.modules.get(name) is not None:  # None marks a package that must not be imported
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

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action()

        # Every search makes a new loader, so this changes no other import.
        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec

    # This finder is never removed: a search need not lead to an import, and an import may fail and
    # be tried again.
    waiting = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, waiting)  # type: ignore[arg-type]
