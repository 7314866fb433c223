"""The engine's X-ray, with the course's additions: pictures, and the tensor maps that stages make on a GPU."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from helpers.engine.xray import *  # noqa: F403 - its __all__
from helpers.engine.xray import hooks


def _tensor_of(argument: Any) -> hooks.DescribedTensor | None:
    """Return what a tensor map was made from, if `attention` made it on a GPU."""
    from helpers.attention.ladder import tensor_maps  # only needed for a launch on a GPU

    return tensor_maps.made_of(argument)


def _drawings(name: str) -> ModuleType:
    """Return a module of `draw`, which needs matplotlib."""
    return importlib.import_module(f"helpers.draw.{name}")


hooks.tensor_map_readers.append(_tensor_of)
hooks.find_drawings = _drawings
