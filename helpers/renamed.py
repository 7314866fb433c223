"""Old names that notebooks and learners' copies import: each works for one more release, and warns with the new name.

old_names(__name__, look="xray_stage")     # in the module, at its end
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any


def old_names(module: str, **names: str) -> None:
    """Make a module answer to old names, each given with its new one: a full name if it has moved."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is called {names[name]} now; the old name goes with the next release"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        other, _, new = names[name].rpartition(".")
        return getattr(importlib.import_module(other or module), new)

    sys.modules[module].__dict__["__getattr__"] = get
