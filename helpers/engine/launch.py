"""One launch of a compiled kernel: its arguments as C values, and its errors in terms of the arguments."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from . import failures, limits, runtime, structures, symbols, tensor_map, waits
from .array import address_of, ndarray
from .array import at as array_at
from .copies import extent_of
from .cuda_source import signatures, source
from .cuda_source.signatures import Parameter
from .failures import LaunchError, format_dim3
from .limits import Sizes
from .messages import SOURCE_NAME
from .observed import Access, Place
from .structures import LaunchRequest, Reason

_STRUCT_ALIGNMENT = 128
TILE_ALIGNMENT = 1024  # alignment of TMA's and wgmma's tiles, and of a GPU's dynamic shared memory
_FAR = 1 << 20  # width of the guards around arrays


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel in memory.

    run: the address of the function that runs one block. shared_arrays: its static `__shared__` arrays, and the
    compiler's flags for them. most_threads, least_blocks: from `__launch_bounds__`; 1024 and 0 without it. cluster: its
    sizes in blocks, from `__cluster_dims__`.
    """

    name: str
    code: str
    library: runtime.KernelLibrary
    run: int
    parameters: tuple[Parameter, ...]
    shared_arrays: tuple[symbols.SharedArray, ...]
    most_threads: int
    least_blocks: int
    uses_tiles: bool
    cluster: Sizes = (1, 1, 1)

    @cached_property
    def static_shared(self) -> int:
        """Bytes of its static `__shared__` arrays."""
        return sum(shared.size for shared in self.shared_arrays if not shared.is_guard)

    @cached_property
    def _static_layout(self) -> dict[str, int]:
        """The fields of `LaunchRequest` that locate its static `__shared__` arrays in the library."""
        begins = [shared.offset for shared in self.shared_arrays]
        ends = [shared.offset + shared.size for shared in self.shared_arrays]
        # A GPU's static shared memory begins where a tile of TMA or wgmma may, even if a smaller alignment is declared.
        own = self.library.symbols.alignment
        first = min((shared.offset for shared in self.shared_arrays if not shared.is_guard), default=0)
        as_on_gpu = self.uses_tiles and first % own == 0
        return {
            "static_begin": min(begins, default=0),
            "static_end": max(ends, default=0),
            "static_align": max(own, TILE_ALIGNMENT) if as_on_gpu else own,
            "static_aligned": first if as_on_gpu else 0,
        }

    def line_at(self, place: int) -> Place | None:
        """Return (file, line) in the source, not in a header, for a place in the library; None if there is none."""
        table = source.line_table(self.code, SOURCE_NAME)
        places = symbols.places_of(self.library.path, place) if place else []
        return next((at for at in places if at in table and not at[0].endswith(failures.HEADERS)), None)

    def arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """Replace raw addresses, such as `array.data.ptr`, with the arrays that begin there.

        Raises:
            TypeError: an address passed for a pointer is not in a device array.
        """
        if not isinstance(args, (tuple, list)) or len(args) != len(self.parameters):
            return args  # `signatures.check_all` refuses these
        args = list(args)
        for number, (parameter, value) in enumerate(zip(self.parameters, args, strict=True)):
            if value is None or isinstance(value, ndarray):
                continue
            if parameter.kind == "p" and signatures.is_address(value):
                args[number] = self._array_at(parameter, value)
        return args

    def _array_at(self, parameter: Parameter, value: Any) -> ndarray | None:
        address = int(getattr(value, "ptr", value))
        if not address:
            return None
        memory = array_at(address)
        if memory is None:
            raise TypeError(
                f"parameter {parameter} of {self.name} is a pointer and got the number {address} (0x{address:x}), "
                "which is not an address in an existing device array"
            )
        if parameter.dtype in ("void", "struct"):
            return memory
        dtype = signatures.dtype_of(parameter.dtype)
        if address % dtype.itemsize:
            return memory
        return memory[: memory.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def tensors(self, args: Sequence[Any]) -> dict[int, tuple[tensor_map.Described, ndarray]]:
        """Return the tensor maps among the arguments and the arrays that they describe, by the parameter's number.

        A map in device memory, passed by its address, gets a number after all parameters, because its own memory is not
        the array that it describes.

        Raises:
            LaunchError: the array of a map no longer exists, or has fewer bytes than the map says.
        """
        tensors = {}
        for number, (parameter, value) in enumerate(zip(self.parameters, args, strict=True)):
            if parameter.kind == "s" or getattr(value, "nbytes", 0) != tensor_map.BYTES:
                continue
            described = tensor_map.described(value)
            if described is None:
                continue
            memory = array_at(described.address)
            if memory is None:
                raise LaunchError(
                    f"the tensor map {parameter.name!r} of {self.name} is of an array at 0x{described.address:x}, "
                    "where there is no device array (any more): keep the array alive until the launch has ended"
                )
            if described.nbytes > memory.nbytes:
                raise LaunchError(
                    f"the tensor map {parameter.name!r} of {self.name} covers {described.nbytes:,} bytes, and the "
                    f"array has only {memory.nbytes:,} from its address on: check its dims {described.dims} and "
                    f"strides {described.strides}"
                )
            number += len(self.parameters) * (parameter.kind == "p")
            tensors[number] = described, memory.typed(described.shape, described.dtype, described.byte_strides)
        return tensors

    def prepare(
        self,
        grid: Sizes,
        block: Sizes,
        args: Sequence[Any],
        shared_mem: int,
        locate: Callable[[int, ndarray], int],
        *,
        cooperative: bool = False,
    ) -> PreparedLaunch:
        """Prepare a checked launch for `runtime.launch`.

        Args:
            locate: (parameter's number, array) -> the address that the kernel gets; 0 for no elements.
        """
        args, maps = list(args), []
        for number, (_, tensor) in self.tensors(args).items():
            own = number % len(args)
            maps.append(tensor_map.moved(args[own], locate(number, tensor)))
            if own == number:
                args[own] = maps[-1]
            elif locate(own, args[own]) != args[own].data.ptr:  # a copy of the map, which describes the original
                ctypes.memmove(locate(own, args[own]), maps[-1].tobytes(), tensor_map.BYTES)
        values: list[Any] = []
        for number, (parameter, value) in enumerate(zip(self.parameters, args, strict=True)):
            if parameter.kind == "p":
                values.append(ctypes.c_void_p(0 if value is None else locate(number, value)))
            elif parameter.kind == "s" and type(value) is parameter.scalar:
                values.append(ctypes.create_string_buffer(value.tobytes(), value.itemsize))
            else:
                values.append(self._packed(parameter, value))
        n_maps, maps = len(maps), ctypes.create_string_buffer(b"".join(one.tobytes() for one in maps))
        pointers = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        threads = block[0] * block[1] * block[2]
        request = LaunchRequest(
            run=self.run,
            args=ctypes.addressof(pointers),
            grid=grid,
            block=block,
            cluster=self.cluster,
            dynamic_shared=int(shared_mem),
            **self._static_layout,
            anchor_offset=self.library.anchor_offset,
            anchor=self.library.anchor,
            most_blocks=limits.blocks_at_once(threads, self.static_shared + int(shared_mem)),
            cooperative=int(cooperative),
            dynamic_align=TILE_ALIGNMENT if self.uses_tiles else 0,
            registers=limits.registers(threads, self.least_blocks),
            order=runtime.order(),
            maps=ctypes.addressof(maps),
            n_maps=n_maps,
        )
        return PreparedLaunch(self, grid, block, tuple(args), [*values, maps], pointers, request)

    def _packed(self, parameter: Parameter, value: Any) -> Any:
        """Convert a scalar or a struct to a C value."""
        if parameter.kind == "S":
            data = np.asarray(value)
            if data.nbytes != parameter.size:
                raise TypeError(
                    f"parameter {parameter.name!r} of {self.name} is a struct of {parameter.size} bytes; "
                    f"got {type(value).__name__} of {data.nbytes}"
                )
            memory = np.empty(parameter.size + _STRUCT_ALIGNMENT, np.uint8)  # enough for the most aligned struct
            begin = -memory.ctypes.data % _STRUCT_ALIGNMENT
            memory[begin : begin + parameter.size] = np.frombuffer(data.tobytes(), np.uint8)
            return (ctypes.c_byte * parameter.size).from_buffer(memory.data, begin)
        dtype = signatures.dtype_of(parameter.dtype)
        return (ctypes.c_byte * dtype.itemsize).from_buffer_copy(np.asarray(value, dtype).tobytes())


@dataclass(frozen=True)
class _Near:
    """An array near an address: the distance in bytes, its name, the element at the address, and a description."""

    distance: int
    array: str | None
    index: int | None
    words: str


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that is ready to run. `request` points to values (the arguments, then the tensor maps) and to pointers,
    so these live as long as it.
    """

    kernel: CompiledKernel
    grid: Sizes
    block: Sizes
    args: tuple[Any, ...]
    values: list[Any]
    pointers: ctypes.Array
    request: LaunchRequest

    def describe(self, failure: structures.Failure) -> str:
        """Describe why it failed; the caller adds the block, the thread and the place."""
        nearest = partial(self._nearest, failure=failure)
        described = failures.describe(
            failure,
            self.block,
            lambda address: nearest(address).words,
            lambda address: self._mbarrier(nearest(address)),
            self.kernel.line_at,
        )
        return described + self.blocks_without_room(failure)

    def blocks_without_room(self, failure: structures.Failure) -> str:
        """Describe, for a launch that timed out, blocks that had no room and may be awaited; otherwise ""."""
        if not failure.without_room:
            return ""
        here = self.request.most_blocks
        on_gpu = limits.blocks_on_gpu(math.prod(self.block), self.kernel.static_shared + self.request.dynamic_shared)
        return (
            f". {failure.without_room:,} of {math.prod(self.grid):,} blocks had not begun: {here:,} of this size are "
            f"resident at once here, {on_gpu:,} on an H200, and waiting for one without room never ends"
        )

    def explain(self, failure: structures.Failure) -> str:
        """Explain which threads wait for which in a deadlock; "" for other failures."""
        nearest = partial(self._nearest, failure=failure)
        return waits.explain(failure.waits, lambda address: self._mbarrier(nearest(address)), self.kernel.line_at)

    def name_of_mbarrier(self, address: int, static_base: int, dynamic_base: int) -> str:
        """Name an mbarrier of a block whose shared memory is at these addresses, such as "full[1]"."""
        bases = structures.Failure(static_base=static_base, dynamic_base=dynamic_base)
        bases.dynamic_size = self.request.dynamic_shared
        name = self._mbarrier(self._nearest(address, bases))
        name = name.removeprefix("mbarrier ")
        return name.removeprefix("the ").removesuffix(" of dynamic shared memory")

    def _mbarrier(self, near: _Near) -> str:
        """Name an mbarrier by its array and its index, if the source declares an array of 8-byte words there."""
        words = near.words.partition(", which has ")[0]
        place = re.fullmatch(r"byte (\d+) of __shared__ (\w+)", words)
        declared = place and re.search(
            rf"\b(long long|u?int64_t|barrier)\b[^;(]*\b{place[2]}\b\s*(\[?)", self.kernel.code
        )
        if not declared or int(place[1]) % 8:
            return f"the mbarrier at {words}"
        return f"mbarrier {place[2]}[{int(place[1]) // 8}]" if declared[2] else f"mbarrier {place[2]}"

    def error(self, failure: structures.Failure) -> LaunchError:
        """Return the error of a failed launch."""
        block = failures.index(failure.block, self.grid)
        thread = failures.index(failure.thread, self.block)
        who = f"{self.kernel.name}, block {format_dim3(block)}, thread {format_dim3(thread)}"
        what = self.describe(failure)
        place = failures.place_of(failure, self.kernel.line_at)
        if place is not None:
            message = f"{place[0]}:{place[1]}: {what} [{who}]"
        else:
            place, where = self._place_of_fault(failure)
            signal = f"; {runtime.signal_name(failure.signal)}" if failure.signal else ""
            message = f"{what} {where} [{who}{signal}]"
        message += self._line_in_words(place)
        file, line = place or (None, None)
        error = LaunchError(message, reason=Reason(failure.reason), file=file, line=line, block=block, thread=thread)
        error.waits = self.explain(failure)
        if error.waits and hasattr(error, "add_note"):
            error.add_note(error.waits)
        if error.reason == Reason.ILLEGAL_ACCESS:
            near = self._nearest(failure.address, failure)
            error.array, error.index, error.address = near.array, near.index, failure.address
        return error

    def error_of_overrun(self, address: int, by: Access | None) -> LaunchError:
        """Return the error of a launch that wrote next to an array, which was noticed afterwards.

        by: the access past an end in a checked run of the same launch; None if there was none.
        """
        near = self._nearest(address, None)
        about: dict[str, Any] = {"array": near.array, "index": near.index, "address": address}
        if by is None or by.place is None:
            message = (
                f"{self.kernel.name} wrote to {near.words}. It was seen after the launch, so the thread is not known: "
                "look for an index that no condition keeps inside the array"
            )
            return LaunchError(message, reason=Reason.ILLEGAL_ACCESS, **about)
        who = f"{self.kernel.name}, block {format_dim3(by.block)}, thread {format_dim3(by.thread)}"
        message = f"illegal write to {near.words} at {by.place[0]}:{by.place[1]} [{who}]"
        message += self._line_in_words(by.place)
        about |= {"file": by.place[0], "line": by.place[1], "block": by.block, "thread": by.thread}
        return LaunchError(message, reason=Reason.ILLEGAL_ACCESS, **about)

    def _line_in_words(self, place: Place | None) -> str:
        """Return the source's line at a place, for the end of a message; "" if there is none."""
        table = source.line_table(self.kernel.code, SOURCE_NAME)
        return f"\n{place[1]:>6} | {table[place].rstrip()}" if place in table else ""

    def _place_of_fault(self, failure: structures.Failure) -> tuple[Place | None, str]:
        """Return the place of a fault by its address, and its description.

        A line of the source is preferred to a line of a header whose function was inlined there.
        """
        path, table = self.kernel.library.path, source.line_table(self.kernel.code, SOURCE_NAME)
        places = symbols.places_of(path, failure.place) if failure.place else []
        expired = failure.reason == Reason.EXPIRED
        if expired:  # an empty loop has no line of its own, but its caller's, or that of code moved out of it
            places += symbols.statements_at(path, failure.place) if failure.place else []
            places = [place for place in places if place in table and table[place].strip() != "}"]
        if places:
            place = next((place for place in places if place in table), places[0])
            return place, f"at {place[0]}:{place[1]}"
        before = symbols.place_before(path, failure.place, {file for file, _ in table}) if expired else None
        if before is None:
            return None, "at an unknown line"
        place = _loop_at(before, table)
        return place, f"near {place[0]}:{place[1]}"

    def _nearest(self, address: int, failure: structures.Failure | None) -> _Near:
        """Describe an address by the nearest argument or shared memory."""
        if address < failures.NULL_PAGE:
            words = "a null pointer" if address == 0 else f"address {address}: a null pointer and an index"
            without = [
                parameter.name or "an array"
                for parameter, value in zip(self.kernel.parameters, self.args, strict=True)
                if parameter.kind == "p" and value is not None and not address_of(value)
            ]
            words += f"; {' and '.join(without)} {'has' if len(without) == 1 else 'have'} no elements" * bool(without)
            return _Near(0, None, None, words)
        near = [*self._near_arguments(address), *(self._near_shared(address, failure) if failure else [])]
        nearest = min(near, default=None, key=lambda one: one.distance)
        if nearest is None or nearest.distance >= _FAR:
            return _Near(_FAR, None, None, f"address 0x{address:x}, which is far from every array")
        return nearest

    def _near_arguments(self, address: int) -> list[_Near]:
        near = []
        for parameter, value, packed in zip(self.kernel.parameters, self.args, self.values[:-1], strict=True):
            if parameter.kind == "p" and value is not None and value.nbytes:
                begin, end = (at - value.ctypes.data for at in extent_of(value))
                inside, item = address - packed.value, value.dtype.itemsize
                index, size = inside // item, (end - begin) // item  # a view with gaps spans more than it contains
                words = f"{parameter.name or 'an array'}[{index}], which has {size:,} elements"
                near.append(_Near(_distance(inside - begin, end - begin), parameter.name or None, index, words))
        return near

    def _near_shared(self, address: int, failure: structures.Failure) -> list[_Near]:
        pieces = []
        if failure.static_base:
            arrays = [shared for shared in self.kernel.shared_arrays if not shared.is_guard]
            pieces = [(s.name, f"__shared__ {s.name}", failure.static_base + s.offset, s.size) for s in arrays]
        dynamic = "dynamic shared memory"
        if failure.dynamic_size:
            pieces.append((dynamic, dynamic, failure.dynamic_base, failure.dynamic_size))
        near = []
        for name, label, begin, size in pieces:
            inside = address - begin
            words = f"byte {inside} of {label}, which has {size:,} bytes"
            near.append(_Near(_distance(inside, size), name, inside // 4, words))
        is_forgotten = failure.dynamic_base and not failure.dynamic_size
        if is_forgotten and source.has_dynamic_shared(self.kernel.code):
            inside = address - failure.dynamic_base
            words = (
                f"byte {inside} of dynamic shared memory (extern __shared__), but the launch gave 0 bytes of dynamic "
                "shared memory: kernel(grid, block, args, shared_mem=bytes)"
            )
            near.append(_Near(_distance(inside, 1), dynamic, inside // 4, words))
        return near


def _distance(inside: int, size: int) -> int:
    return max(-inside, inside - (size - 1), 0)


def _loop_at(place: Place, table: Mapping[Place, str]) -> Place:
    """Return the nearest line at or before a place that begins a loop; the place itself if there is none."""
    file, line = place
    words = re.compile(r"\b(for|while|do)\b")
    return next(((file, n) for n in range(line, 0, -1) if words.search(table.get((file, n), ""))), place)
