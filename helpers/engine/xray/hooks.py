"""Hooks from the X-ray into the program that uses it: to read a GPU's tensor maps, and to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol


class DescribedTensor(Protocol):
    """An array on a GPU that a tensor map describes; sizes and strides (in bytes) in the driver's order."""

    @property
    def dtype(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def strides(self) -> Sequence[int]: ...
    @property
    def box(self) -> Sequence[int]: ...
    @property
    def swizzle(self) -> int:
        """Bytes of a swizzled row: 32, 64 or 128; 0 without a swizzle."""
        ...


# Each takes an argument of a launch and returns what it describes, if it is a tensor map that it knows; else None. The
# format of a driver's map is undocumented, so only the program that made it can tell.
tensor_map_readers: list[Callable[[Any], DescribedTensor | None]] = []

# Returns a module by its name: charts (`heatmap`), threads (`bank_picture`), timeline (`picture`) or moving.launch
# (`moving_launch`).
find_drawings: Callable[[str], ModuleType] | None = None


def tensor_of(argument: Any) -> DescribedTensor | None:
    """Return the array that an argument of a launch describes; None if no reader knows it as a tensor map."""
    return next((tensor for read in tensor_map_readers if (tensor := read(argument)) is not None), None)


def drawings(name: str) -> ModuleType:
    """Return a module that draws.

    Raises:
        RuntimeError: the program provides none.
    """
    if find_drawings is None:
        raise RuntimeError(
            "the X-ray itself cannot draw: set hooks.find_drawings, or use the report's fetches, worst, steps() "
            "and trace"
        )
    return find_drawings(name)
