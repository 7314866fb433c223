"""The structs and enums that Python shares with the engine's C++, as ctypes structures.

`check` compares their sizes with C++'s own when the engine is loaded: a field that only one side knows would shift all
that follow.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum


class LaunchRequest(ctypes.Structure):
    """`EngineLaunch` of engine/worker.h."""

    _fields_ = [
        ("run", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_uint64),
        ("static_begin", ctypes.c_uint64),
        ("static_end", ctypes.c_uint64),
        ("static_align", ctypes.c_uint64),
        ("static_aligned", ctypes.c_uint64),
        ("anchor_offset", ctypes.c_uint64),
        ("anchor", ctypes.c_void_p),
        ("most_blocks", ctypes.c_uint64),
        ("cooperative", ctypes.c_uint64),
        ("dynamic_align", ctypes.c_uint64),
        ("registers", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("maps", ctypes.c_void_p),
        ("n_maps", ctypes.c_uint64),
    ]


class Reason(IntEnum):
    """`FailureReason` of engine/worker.h, which says what each of them has in the fields of a Failure."""

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


class Failure(ctypes.Structure):
    """`EngineFailure` of engine/worker.h."""

    _fields_ = [
        ("reason", ctypes.c_int),
        ("signal", ctypes.c_int),
        ("is_write", ctypes.c_int),
        ("line", ctypes.c_int),
        ("other_line", ctypes.c_int),
        ("block", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("place", ctypes.c_uint64),
        ("static_base", ctypes.c_uint64),
        ("dynamic_base", ctypes.c_uint64),
        ("dynamic_size", ctypes.c_uint64),
        ("thread", ctypes.c_uint),
        ("other_thread", ctypes.c_uint),
        ("lane", ctypes.c_uint),
        ("other_lane", ctypes.c_uint),
        ("mask", ctypes.c_uint),
        ("lanes", ctypes.c_uint),
        ("number", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("other_count", ctypes.c_uint),
        ("file", ctypes.c_char * 256),
        ("other_file", ctypes.c_char * 256),
        ("name", ctypes.c_char * 96),
        ("other_name", ctypes.c_char * 96),
        ("message", ctypes.c_char * 1024),
    ]


class CheckedRegion(ctypes.Structure):
    """`EngineRegion` of engine/checker.h."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("element", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("fetches", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
    ]


class CheckedSite(ctypes.Structure):
    """`EngineSite` of engine/checker.h."""

    _fields_ = [
        ("pc", ctypes.c_uint64),
        ("region", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("is_write", ctypes.c_uint32),
        ("is_atomic", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
        ("requests", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("worst", ctypes.c_uint64),
        ("worst_lanes", ctypes.c_uint32),
        ("worst_offsets", ctypes.c_uint32 * 32),
    ]


class CheckedStep(ctypes.Structure):
    """`EngineStep` of engine/checker.h."""

    _fields_ = [
        ("block", ctypes.c_uint64),
        ("interval", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
    ]


class CheckedBarrier(ctypes.Structure):
    """`EngineBarrier` of engine/checker.h."""

    _fields_ = [("block", ctypes.c_uint64), ("file", ctypes.c_char_p), ("line", ctypes.c_int)]


class CheckedFinding(ctypes.Structure):
    """`EngineFinding` of engine/checker.h."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("region", ctypes.c_uint32),
        ("offset", ctypes.c_int64),
        ("count", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
        ("other_block", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("other_thread", ctypes.c_uint32),
        ("is_write", ctypes.c_uint32),
        ("other_is_write", ctypes.c_uint32),
        ("is_volatile", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
        ("source", ctypes.c_uint32),
        ("line", ctypes.c_int32),
        ("file", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
    ]


class CheckedEvent(ctypes.Structure):
    """`EngineEvent` of engine/checker.h."""

    _fields_ = [
        ("block", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("thread", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("value", ctypes.c_uint32),
    ]


class CheckedPartialBarrier(ctypes.Structure):
    """`EngineLeft` of engine/checker.h."""

    _fields_ = [
        ("block", ctypes.c_uint64),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_int),
        ("count", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("other_line", ctypes.c_int),
    ]


class EntryParameter(ctypes.Structure):
    """`engine::Parameter` of include/engine_entries.h."""

    _fields_ = [
        ("kind", ctypes.c_char),
        ("text", ctypes.c_char_p),
        ("is_const", ctypes.c_bool),
        ("size", ctypes.c_uint),
    ]


class Entry(ctypes.Structure):
    """`engine::Entry` of include/engine_entries.h: one kernel of a module."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("run", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("parameters", ctypes.POINTER(EntryParameter)),
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
    "FailureReason": len(Reason),
}


def check(lib: ctypes.CDLL) -> None:
    """Compare sizes with those of the loaded engine.

    Raises:
        RuntimeError: structures.py and the engine's sources do not belong together.
    """
    lib.engine_size_of.restype = ctypes.c_uint64
    lib.engine_size_of.argtypes = [ctypes.c_char_p]
    compare({name: (size, lib.engine_size_of(name.encode())) for name, size in _IN_THE_ENGINE.items()})


def compare(sizes: dict[str, tuple[int, int]]) -> None:
    """Compare sizes by name, Python's and C++'s."""
    wrong = [f"{name}: {ours} in Python, {theirs} in C++" for name, (ours, theirs) in sizes.items() if ours != theirs]
    if wrong:
        raise RuntimeError(f"structures.py does not match the engine's C++: {'; '.join(wrong)}")
