"""One launch of a stage: planned with names for arrays, bound to a call's arrays, and launched by the driver."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from helpers import device
from helpers.attention.ladder import tensor_maps
from helpers.attention.ladder.layout import Spec, address, flat_view


@dataclass(frozen=True)
class Part:
    """An argument that is a part of an array: the memory of array[index], from its first element to its last.

    index: begins with the array's first axis, or also has axes before the array's own.
    """

    name: str
    index: tuple[int | slice, ...]


@dataclass(frozen=True)
class Map:
    """An argument that is the tensor map of an array, for copies of `box_rows` rows: see tensor_maps.py."""

    name: str
    box_rows: int


class Launch(NamedTuple):
    """One launch of one kernel.

    args: an array by its name, or as a `Part` or a `Map`; None for a null pointer; NumPy scalars and structs
    themselves. file, sizes: the kernel's file and -D options, if they are not the stage's own. once: its results depend
    only on the call's shapes, so that a later call of the same shapes on the same stream can skip it.
    """

    kernel: str  # its name in the file, or the name of an instance of a template
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    args: tuple[Any, ...]
    file: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    once: bool = False

    def arguments(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments, with the arrays in place of their names."""
        return tuple(_argument(arg, arrays) for arg in self.args)


def _argument(arg: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(arg, str):
        return flat_view(arrays[arg])
    if isinstance(arg, Part):
        array = arrays[arg.name]
        return flat_view(array[arg.index[max(len(arg.index) - array.ndim, 0) :]])
    if isinstance(arg, Map):
        array = arrays[arg.name]
        return tensor_maps.tensor_map(Spec.of(array), address(array), box_rows=arg.box_rows)
    return arg


class Arguments:
    """The memory where the driver finds a kernel's arguments, shared by all calls with the same kinds of arguments.

    They point into one block of memory: the addresses of arrays, those of parts of arrays, then the values.
    """

    __slots__ = ("function", "launch", "maps", "offsets", "parts", "values")

    def __init__(self, launch: Launch, function: Any, slots: Mapping[str, int]) -> None:
        """
        Args:
            slots: the offset of each array's address, in bytes from the first.
        """
        self.function = function.kernel  # CuPy's, which keeps the module alive
        self.launch = device.cp.cuda.driver.launchKernel
        self.parts = [i for i, arg in enumerate(launch.args) if type(arg) is Part]
        self.maps = [i for i, arg in enumerate(launch.args) if type(arg) is Map]
        self.values = [i for i, arg in enumerate(launch.args) if type(arg) not in (str, Part, Map)]
        parts, end = 8 * len(slots), 8 * (len(slots) + len(self.parts))
        self.offsets: list[int] = []
        for i, arg in enumerate(launch.args):
            if type(arg) is str:
                self.offsets.append(slots[arg])
            elif i in self.parts:
                self.offsets.append(parts + 8 * self.parts.index(i))
            else:
                self.offsets.append(end)
                end += len(_bytes(arg)) if i in self.values else 0


class DirectLaunch:
    """A launch whose arguments lack only the addresses of its arrays: the driver's call, and little else."""

    __slots__ = ("_arguments", "_maps", "_parts", "_sizes", "_values")

    def __init__(
        self, arguments: Arguments, launch: Launch, slots: Mapping[str, int], arrays: Mapping[str, Spec]
    ) -> None:
        """
        Args:
            arguments: the kernel's. slots: see `Arguments`. arrays: their descriptions.
        """
        grid, block, args = launch.grid, launch.block, launch.args
        self._arguments = arguments
        self._sizes = (*grid, *_ONES[len(grid)], *block, *_ONES[len(block)], launch.shared_bytes)
        self._values = array("q", b"".join([_bytes(args[i]) for i in arguments.values]))
        self._parts = [_part(args[i], slots, arrays) for i in arguments.parts]
        self._maps = [
            (i, slots[args[i].name] // 8, tensor_maps.MapCache(arrays[args[i].name], args[i].box_rows))
            for i in arguments.maps
        ]

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the arrays at these addresses, in the order of the names, on the stream with this handle."""
        if self._parts:
            addresses = [*addresses, *[addresses[slot] + offset for slot, offset in self._parts]]
        arguments = self._arguments
        values = array("q", addresses) + self._values
        first = values.buffer_info()[0]
        pointers = array("q", [first + offset for offset in arguments.offsets])
        if self._maps:
            held = []  # until the driver has read them
            for i, slot, maps in self._maps:
                pointers[i], room = maps.at(addresses[slot])
                held.append(room)
        arguments.launch(arguments.function.ptr, *self._sizes, stream, pointers.buffer_info()[0], 0)


class EngineLaunch:
    """A launch on the CPU engine whose arguments are complete except for its arrays."""

    __slots__ = ("_args", "_kernel", "_launch", "_others", "_views", "_whole")

    def __init__(
        self,
        launch: Launch,
        kernel: Any,
        slots: Mapping[str, int],
        views: Callable[[Iterable[tuple[str, Any]]], Mapping[str, Any]],
    ) -> None:
        """
        Args:
            kernel: a `helpers.attention.kernel.Kernel` that was compared with arguments like these.
            slots: the place of each array. views: converts arrays by name to the stage's layout.
        """
        self._launch, self._kernel, self._args, self._views = launch, kernel, launch.args, views
        self._whole = [(i, slots[arg]) for i, arg in enumerate(launch.args) if isinstance(arg, str)]
        others = [(i, arg) for i, arg in enumerate(launch.args) if isinstance(arg, (Part, Map))]
        self._others = [(i, arg.name, slots[arg.name]) for i, arg in others]

    def __call__(self, arrays: Sequence[Any], stream: int) -> None:
        """Launch on these arrays, in the order of the names."""
        args, launch = [*self._args], self._launch
        for i, slot in self._whole:
            a = arrays[slot]
            args[i] = a if a.flags.c_contiguous else flat_view(a)
        for i, name, slot in self._others:
            args[i] = _argument(args[i], self._views([(name, arrays[slot])]))
        self._kernel.launch_known(launch.grid, launch.block, tuple(args), shared_mem=launch.shared_bytes)


_ONES = {1: (1, 1), 2: (1,), 3: ()}


def _part(arg: Part, slots: Mapping[str, int], arrays: Mapping[str, Spec]) -> tuple[int, int]:
    """Return (slot of the array, bytes from its first element to the part)."""
    first = [i.start or 0 if isinstance(i, slice) else i for i in arg.index]
    steps = sum(i * step for i, step in zip(first, arrays[arg.name].strides, strict=False))
    return slots[arg.name] // 8, steps


def _bytes(arg: Any) -> bytes:
    """Return a value as the kernel reads it, in whole words of 8 bytes: a null pointer for None."""
    if arg is None:
        return bytes(8)
    value = arg.tobytes()
    return value + bytes(-len(value) % 8)
