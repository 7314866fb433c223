"""The engine's shared library in Python: loading it, and one launch from start to end."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from . import compiler

_launching = threading.Lock()  # one launch at a time, as one stream has it


class Launch(ctypes.Structure):
    """`EngineLaunch` of engine.cpp."""

    _fields_ = [
        ("run", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_uint64),
        ("shared_anchor", ctypes.c_void_p),
    ]


class Failure(ctypes.Structure):
    """`EngineFailure` of engine.cpp."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("signal", ctypes.c_int),
        ("is_write", ctypes.c_int),
        ("line", ctypes.c_int),
        ("block", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("module_base", ctypes.c_uint64),
        ("module_pc", ctypes.c_uint64),
        ("thread", ctypes.c_uint),
        ("file", ctypes.c_char * 256),
        ("module", ctypes.c_char * 512),
        ("message", ctypes.c_char * 2048),
    ]


NONE, MESSAGE, FAULT = 0, 1, 2


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded engine. Its symbols are global: the kernels' libraries find them when they are loaded."""
    lib = ctypes.CDLL(str(compiler.engine_library()), mode=ctypes.RTLD_GLOBAL)
    lib.engine_allocate.restype = ctypes.c_void_p
    lib.engine_allocate.argtypes = [ctypes.c_size_t]
    lib.engine_release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.engine_release.restype = None
    lib.engine_start.argtypes = [ctypes.POINTER(Launch), ctypes.c_uint]
    lib.engine_wait.argtypes = [ctypes.c_int]
    lib.engine_result.argtypes = [ctypes.POINTER(Failure)]
    lib.engine_printed.restype = ctypes.c_char_p
    return lib


@functools.cache
def n_workers() -> int:
    """OS threads that run blocks: the cores this process may use, at most 16; `COURSE_CPU_THREADS` overrides."""
    chosen = os.environ.get("COURSE_CPU_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(chosen) if chosen else cores, 16))


@dataclass(frozen=True)
class Ended:
    """How a launch ended: a failure or none, and what the kernel printed."""

    failure: Failure | None
    printed: str


def launch(request: Launch) -> Ended:
    """Run a launch to its end.

    Raises:
        KeyboardInterrupt: the user interrupted it; the launch has been stopped.
    """
    lib = library()
    with _launching:
        if lib.engine_start(ctypes.byref(request), n_workers()) != 0:
            raise RuntimeError("the CPU engine is still busy with a launch of another thread")
        try:
            # Short waits, so that Python sees an interrupt while the kernel runs.
            while not lib.engine_wait(50):
                pass
        except BaseException:
            lib.engine_cancel()
            raise
        failure = Failure()
        lib.engine_result(ctypes.byref(failure))
        printed = lib.engine_printed().decode(errors="replace")
    return Ended(failure if failure.kind != NONE else None, printed)


def signal_name(number: int) -> str:
    """SIGSEGV and friends by name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def library_of(path: Path) -> ctypes.CDLL:
    """Load a kernel's library beside others that have the same names in it."""
    library()
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)


def echo(text: str) -> None:
    """Show what a kernel printed."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
