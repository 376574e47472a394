"""The bounds, one file for each family of mechanisms, and their registry.

All files of this folder are imported.
"""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
