"""The structs and enums that Python shares with the engine's C++: the fields are read from the C++ headers.

`check` compares their sizes with C++'s when the engine is loaded: a wrongly read field would shift all that follow.
"""

from __future__ import annotations

import ctypes
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

from .tracing import KINDS

_HERE = Path(__file__).resolve().parent
_TEXT = re.sub(
    r"//.*",
    "",
    "".join(
        (_HERE / file).read_text()
        for file in ("cpp/worker.h", "cpp/checker.h", "cpp/trace.cpp", "include/engine_entries.h")
    ),
)
_TYPES: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "unsigned": ctypes.c_uint,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}
# One declarator: "unsigned grid[3]", " *name", "void (*run)(void** args)".
_DECLARATOR = re.compile(r".*?(?P<stars>\**) *(?P<name>\w+)(?:\[(?P<count>\d+)\]|\)\(.*\))?")


def _fields(name: str) -> list[tuple[str, Any]]:
    """Read the fields of a C++ struct: numbers, arrays of them, texts (const char*) and other pointers (void*)."""
    fields = []
    for declaration in re.search(rf"struct {name} {{(.*?)\n}};", _TEXT, re.S)[1].split(";")[:-1]:
        is_text = re.match(r"const char\b", declaration.strip())
        for one in declaration.split(","):
            part = _DECLARATOR.fullmatch(one.strip())
            kind = _TYPES.get(declaration.split()[0])
            if part["stars"]:
                kind = ctypes.c_char_p if is_text else ctypes.c_void_p
            fields.append((part["name"], kind * int(part["count"]) if part["count"] else kind))
    return fields


class LaunchRequest(ctypes.Structure):
    """One launch, as passed to the engine."""

    _fields_ = _fields("EngineLaunch")


class Reason(IntEnum):
    """`FailureReason` of engine/worker.h, which documents the fields of a Failure for each."""

    NONE = 0
    STATED = 1
    MISALIGNED = 2
    LEFT_BEFORE_GRID_SYNC = 3
    TWO_BARRIERS = 4
    LANES_NEVER_COME = 5
    NAMED_BARRIER_STARVED = 6
    NOT_IN_OWN_MASK = 7
    DIFFERENT_OPERATIONS = 8
    INCOMPLETE_WARP = 9
    WRONG_NAMED_BARRIER = 10
    NO_SHARED_POINTER = 11
    SHARED_MISALIGNED = 12
    OUTSIDE_SHARED = 13
    ILLEGAL_ACCESS = 14
    MISALIGNED_ACCESS = 15
    STACK_OVERFLOW = 16
    WRONG_DIVISION = 17
    TRAPPED = 18
    EXPIRED = 19
    ABORTED = 20
    MBARRIER_STARVED = 21
    WARPGROUP_STARVED = 22
    OUTSIDE_TILE = 23
    REGISTERS_STARVED = 24
    CLUSTER_STARVED = 25


DEADLOCK = (
    Reason.LANES_NEVER_COME,
    Reason.NAMED_BARRIER_STARVED,
    Reason.MBARRIER_STARVED,
    Reason.WARPGROUP_STARVED,
    Reason.REGISTERS_STARVED,
    Reason.CLUSTER_STARVED,
    Reason.NOT_IN_OWN_MASK,
    Reason.DIFFERENT_OPERATIONS,
)


class Failure(ctypes.Structure):
    """Why a launch failed; `Reason` determines which fields have a meaning."""

    _fields_ = _fields("EngineFailure")
    waits = ""  # for a deadlock: what each thread waits for, as read by `waits.py`
    without_room = 0  # for a launch that timed out: blocks that had not begun because no more could be resident


class CheckedRegion(ctypes.Structure):
    """A region of memory that a checked run knows."""

    _fields_ = _fields("EngineRegion")


class CheckedSite(ctypes.Structure):
    """An instruction and a region that it touched."""

    _fields_ = _fields("EngineSite")


class CheckedStep(ctypes.Structure):
    """A step that lanes of a warp executed together between two barriers."""

    _fields_ = _fields("EngineStep")


class CheckedBarrier(ctypes.Structure):
    """A barrier that a block reached."""

    _fields_ = _fields("EngineBarrier")


class CheckedFinding(ctypes.Structure):
    """A finding of the checker."""

    _fields_ = _fields("EngineFinding")


class CheckedEvent(ctypes.Structure):
    """A request of a warp to TMA, tensor cores or a barrier, or its completion."""

    _fields_ = _fields("EngineEvent")


class TracedEvent(ctypes.Structure):
    """An event of a trace; `tracing.KINDS` names its kind."""

    _fields_ = _fields("EngineTraced")


class CheckedPartialBarrier(ctypes.Structure):
    """A barrier reached after some threads had exited."""

    _fields_ = _fields("EngineLeft")


class EntryParameter(ctypes.Structure):
    """A parameter of a kernel."""

    _fields_ = _fields("Parameter")


class Entry(ctypes.Structure):
    """One kernel of a module; `parameters` points to `count` EntryParameters."""

    _fields_ = [
        (name, {"parameters": ctypes.POINTER(EntryParameter), "cluster": ctypes.c_uint * 3}.get(name, kind))
        for name, kind in _fields("Entry")
    ]


_IN_THE_ENGINE = {
    "EngineLaunch": ctypes.sizeof(LaunchRequest),
    "EngineFailure": ctypes.sizeof(Failure),
    "EngineRegion": ctypes.sizeof(CheckedRegion),
    "EngineSite": ctypes.sizeof(CheckedSite),
    "EngineStep": ctypes.sizeof(CheckedStep),
    "EngineBarrier": ctypes.sizeof(CheckedBarrier),
    "EngineFinding": ctypes.sizeof(CheckedFinding),
    "EngineLeft": ctypes.sizeof(CheckedPartialBarrier),
    "EngineEvent": ctypes.sizeof(CheckedEvent),
    "EngineTraced": ctypes.sizeof(TracedEvent),
    "EngineTraceKind": len(KINDS),
    "FailureReason": len(Reason),
}


def check(lib: ctypes.CDLL) -> None:
    """Compare sizes with those of the loaded engine.

    Raises:
        RuntimeError: structures.py does not match the engine's sources.
    """
    lib.engine_size_of.restype = ctypes.c_uint64
    lib.engine_size_of.argtypes = [ctypes.c_char_p]
    compare({name: (size, lib.engine_size_of(name.encode())) for name, size in _IN_THE_ENGINE.items()})


def compare(sizes: dict[str, tuple[int, int]]) -> None:
    """Compare Python's and C++'s sizes, by name."""
    wrong = [f"{name}: {ours} in Python, {theirs} in C++" for name, (ours, theirs) in sizes.items() if ours != theirs]
    if wrong:
        raise RuntimeError(f"structures.py does not match the engine's C++: {'; '.join(wrong)}")
