"""The graders, in a module for each notebook. Importing this package registers all of them."""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if _module.name.startswith("n"):
        importlib.import_module(f"{__name__}.{_module.name}")
