"""One launch of a kernel: its arguments by name, then with arrays in place of the names, and the driver's call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from helpers import device
from helpers.attention.ladder import tensor_maps
from helpers.attention.ladder.call import Spec
from helpers.attention.ladder.layout import address, span


@dataclass(frozen=True)
class Part:
    """An argument that is a part of an array: array[index]."""

    name: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class Map:
    """An argument that is the tensor map of an array, for copies of `box_rows` rows: see tensor_maps.py."""

    name: str
    box_rows: int


@dataclass(frozen=True, eq=False)
class Constant:
    """An argument that is an array of what depends on the call's sizes alone: copied to the device once."""

    values: np.ndarray

    @functools.cached_property
    def on_device(self) -> Any:
        """The array on the device. The copy has ended: launches on any stream may read it."""
        copied = device.cp.asarray(self.values)
        if device.ON_GPU:
            device.cp.cuda.get_current_stream().synchronize()
        return copied


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    args: an array by its name, or as a `Part` or a `Map`; a `Constant`; None for a null pointer; NumPy scalars and
        structs as they are.
    """

    kernel: str  # its name in the file, or the name of an instance of a template
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    args: tuple[Any, ...]

    def arguments(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments, with the arrays in place of their names."""
        return tuple(_argument(arg, arrays) for arg in self.args)

    def form(self, arrays: Mapping[str, Spec]) -> tuple[Any, ...]:
        """What a kernel's signature is compared with: shared memory, and of each argument what it is and its dtype."""
        return self.shared_bytes, *(_form(arg, arrays) for arg in self.args)


def _argument(arg: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(arg, str):
        return span(arrays[arg])
    if isinstance(arg, Part):
        return arrays[arg.name][arg.index]
    if isinstance(arg, Map):
        array = arrays[arg.name]
        return tensor_maps.tensor_map(Spec.of(array), address(array), box_rows=arg.box_rows)
    if isinstance(arg, Constant):
        return arg.on_device
    return arg


def _form(arg: Any, arrays: Mapping[str, Spec]) -> Any:
    if isinstance(arg, str):
        return arrays[arg].dtype
    if isinstance(arg, (Part, Map)):
        return type(arg), arrays[arg.name].dtype
    return type(arg), getattr(arg, "dtype", None)


class DirectLaunch:
    """A launch whose arguments are laid out but for the addresses of its arrays: the driver's call, and little else."""

    def __init__(self, launch: Launch, function: Any, slots: Mapping[str, int], arrays: Mapping[str, Spec]) -> None:
        """
        Args:
            slots: where the address of each array will be, in bytes from the first. arrays: what they are like.
        """
        self._function = function.kernel  # CuPy's, which holds the module
        grid, block = (tuple(size) + (1,) * (3 - len(size)) for size in (launch.grid, launch.block))
        self._sizes = (*grid, *block, launch.shared_bytes)
        self._launch = device.cp.cuda.driver.launchKernel
        self._constants = [arg for arg in launch.args if isinstance(arg, Constant)]  # kept alive
        self._arguments: list[tuple[bool, int]] = []  # (in the slots?, offset or address)
        self._parts: list[tuple[int, int]] = []  # (slot of the array, bytes to the part)
        self._maps: list[tuple[int, int, tensor_maps.Kept]] = []  # (argument, slot of the array, its maps)
        values = bytearray()  # what arguments that stay the same point to
        extra = 8 * len(slots)
        for arg in launch.args:
            if isinstance(arg, str):
                self._arguments.append((True, slots[arg]))
            elif isinstance(arg, Part):
                self._arguments.append((True, extra + 8 * len(self._parts)))
                steps = sum(i * step for i, step in zip(arg.index, arrays[arg.name].strides, strict=False))
                self._parts.append((slots[arg.name] // 8, steps))
            elif isinstance(arg, Map):
                maps = tensor_maps.Kept(arrays[arg.name], arg.box_rows)
                self._maps.append((len(self._arguments), slots[arg.name] // 8, maps))
                self._arguments.append((False, 0))
            else:
                self._arguments.append((False, len(values)))
                values += _bytes(arg)
                values += bytes(-len(values) % 16)
        self._bytes = ctypes.create_string_buffer(bytes(values), len(values) + 16)
        first = ctypes.addressof(self._bytes)
        self._arguments = [(in_slots, at if in_slots else first + at) for in_slots, at in self._arguments]
        self._values = ctypes.c_int64 * (len(slots) + len(self._parts))
        self._pointers = ctypes.c_int64 * len(self._arguments)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the arrays at these addresses, in the order of the names, on the stream of this handle."""
        if self._parts:
            addresses = [*addresses, *[addresses[slot] + offset for slot, offset in self._parts]]
        values = self._values(*addresses)
        first = ctypes.addressof(values)
        pointers = self._pointers(*[first + place if in_slots else place for in_slots, place in self._arguments])
        for argument, slot, maps in self._maps:
            pointers[argument] = maps.pointer(addresses[slot])
        self._launch(self._function.ptr, *self._sizes, stream, ctypes.addressof(pointers), 0)


def _bytes(arg: Any) -> bytes:
    """A value as the kernel reads it: a null pointer for None, an address for a `Constant`."""
    if arg is None:
        return bytes(8)
    if isinstance(arg, Constant):
        return np.int64(address(arg.on_device)).tobytes()
    return arg.tobytes()
