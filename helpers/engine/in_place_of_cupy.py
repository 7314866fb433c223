"""Let `import cupy.cuda` work in a program in which the engine replaces CuPy.

    sys.modules["cupy"] = engine

Python would look for `cupy.cuda` in the engine's folder, and import its files again under that name: with a second
class of arrays, and a module `cupy.array` although that is a function in CuPy. So the engine resolves these names
itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .from_numpy import FromNumPy

ENGINE = __name__.rpartition(".")[0]
OURS = tuple(f"{ENGINE}.{name}." for name in ("cuda", "cupyx", "testing"))  # modules with CuPy's names


class Names(MetaPathFinder, Loader):
    """Find the modules `cupy.…` and `cupyx.…` among the engine's own, and nothing else."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the engine's module.

        Raises:
            ModuleNotFoundError: the engine, which replaces CuPy, has no such module.
        """
        top = name.partition(".")[0]
        engine = sys.modules.get(ENGINE)
        if top not in ("cupy", "cupyx") or engine is None or sys.modules.get("cupy") is not engine:
            return None
        if _module(name) is None:
            raise ModuleNotFoundError(
                f"No module named {name!r}: the CPU engine, which replaces CuPy here, has only what kernels need",
                name=name,
            )
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the engine's module, which exists already."""
        module = _module(spec.name)
        spec.loader_state = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has already run, and keeps its own attributes."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _module(name: str) -> Any:
    """Return the engine's module with CuPy's name; None if there is none."""
    top, *rest = name.split(".")
    found: Any = importlib.import_module(f"{ENGINE}.cupyx") if top == "cupyx" else sys.modules[ENGINE]
    for part in rest:
        try:
            found = getattr(found, part)
        except AttributeError:
            return None
    is_numpys = isinstance(found, FromNumPy) and isinstance(found._theirs, ModuleType)
    is_ours = isinstance(found, ModuleType) and f"{found.__name__}.".startswith(OURS)
    return found if is_numpys or is_ours else None  # not modules that only the engine has


def answer() -> None:
    """Import the engine's modules under CuPy's names from now on."""
    if not any(isinstance(finder, Names) for finder in sys.meta_path):
        sys.meta_path.insert(0, Names())
