"""The engine's shared library in Python: loading it, and running one launch."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from . import compiler, first_build, settings, structures, symbols
from .structures import DEADLOCK, Failure, LaunchRequest, Reason

_launching = threading.RLock()  # one launch at a time, as in one stream


def _after_fork() -> None:
    """Discard the parent's launches: a child process has none of its parent's threads."""
    global _launching
    _launching = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def library() -> ctypes.CDLL:
    """Load the engine. Its symbols are global: the kernels' libraries find them when they are loaded.

    Raises:
        RuntimeError: its structs differ from those of structures.py.
    """
    try:
        path = first_build.run_with_message(compiler.engine_library, first_build.DOING)
        lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "static TLS" in str(error):  # other libraries have used up the space
            compiler.use_any_tls()
        else:  # a broken file in the cache
            compiler.engine_library().unlink(missing_ok=True)
            compiler.engine_library.cache_clear()
        lib = ctypes.CDLL(str(compiler.engine_library()), mode=ctypes.RTLD_GLOBAL)
    structures.check(lib)
    lib.engine_allocate.restype = ctypes.c_void_p
    lib.engine_allocate.argtypes = [ctypes.c_size_t, ctypes.c_uint]
    lib.engine_release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    lib.engine_release.restype = None
    lib.engine_overrun.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    lib.engine_overrun.restype = ctypes.c_int64
    lib.engine_start.argtypes = [ctypes.POINTER(LaunchRequest), ctypes.c_uint]
    lib.engine_wait.argtypes = [ctypes.c_int]
    lib.engine_result.argtypes = [ctypes.POINTER(Failure)]
    lib.engine_printed.restype = lib.engine_waits.restype = ctypes.c_char_p
    lib.engine_blocks.restype = lib.engine_without_room.restype = ctypes.c_uint64
    lib.engine_check_start.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64]
    lib.engine_check_start.restype = None
    return lib


@functools.cache
def n_workers() -> int:
    """Return the number of OS threads that run blocks: the usable cores, at most 16.

    `COURSE_CPU_THREADS` overrides it.
    """
    chosen = settings.value("CPU_THREADS")
    if chosen and not (chosen.isdecimal() and 1 <= int(chosen) <= 16):
        raise ValueError(f"{settings.variable('CPU_THREADS')} must be a number from 1 to 16; got {chosen!r}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(chosen) if chosen else min(cores, 16)


def order() -> int:
    """Return the order in which threads run: 0, warp after warp, or the seed in `COURSE_CPU_ORDER`.

    A GPU guarantees no order, so a kernel that hangs or is wrong in only some orders has a bug.

    Raises:
        ValueError: it is not a number.
    """
    chosen = settings.value("CPU_ORDER", "0")
    if not chosen.isdecimal():
        raise ValueError(
            f"{settings.variable('CPU_ORDER')} must be a whole number, the seed of an order of threads; got {chosen!r}"
        )
    return int(chosen) % 2**63


def time_limit(default: float = 20.0) -> float:
    """Return the seconds that a block may take: `COURSE_CPU_TIMEOUT` or the default; infinite if that is 0.

    Raises:
        ValueError: `COURSE_CPU_TIMEOUT` is not a number of seconds.
    """
    chosen = settings.value("CPU_TIMEOUT", str(default))
    try:
        seconds = float(chosen)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"{settings.variable('CPU_TIMEOUT')} must be a number of seconds, where 0 means no limit; got {chosen!r}"
        )
    return seconds or math.inf


@dataclass(frozen=True)
class Ended:
    """The end of a launch: its failure, if any, and what the kernel printed."""

    failure: Failure | None
    printed: str


def launch(request: LaunchRequest, workers: int | None = None, timeout: float = math.inf) -> Ended:
    """Run a launch to its end.

    Args:
        timeout: seconds that one block may take, in both wall-clock and CPU time; then the launch is stopped, and its
            failure's reason is EXPIRED.

    Raises:
        KeyboardInterrupt: the user interrupted it; the launch has been stopped.
        MemoryError: the system denies the engine memory or a thread.
    """
    lib = library()
    with _launching:
        try:
            if lib.engine_start(ctypes.byref(request), workers or n_workers()) != 0:
                raise MemoryError("the system denies the CPU engine memory for its stacks, or a thread")
            # Short waits, so that Python handles an interrupt while the kernel runs.
            begun = without_room = 0
            since, used = time.monotonic(), time.process_time()
            while not lib.engine_wait(50):
                now = lib.engine_blocks()
                if now != begun:
                    begun, since, used = now, time.monotonic(), time.process_time()
                elif min(time.monotonic() - since, time.process_time() - used) > timeout:
                    without_room = lib.engine_without_room()
                    lib.engine_expire()
        except BaseException:
            lib.engine_cancel()
            raise
        failure = Failure()
        lib.engine_result(ctypes.byref(failure))
        failure.without_room = without_room
        if failure.reason in DEADLOCK:
            failure.waits = lib.engine_waits().decode(errors="replace")
        printed = lib.engine_printed().decode(errors="replace")
    return Ended(failure if failure.reason != Reason.NONE else None, printed)


def exclusive() -> threading.RLock:
    """Return a context manager that blocks other threads' launches."""
    return _launching


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class KernelLibrary:
    """A compiled module in memory. As on a GPU it has its own state: a second one has initial values.

    base: its symbols' values are relative to this address.
    """

    _in_memory: ClassVar[set[Path]] = set()

    def __init__(self, path: Path) -> None:
        """Load a compiled module.

        Raises:
            OSError: the file is not a library.
        """
        library()
        self.path = path
        self.symbols = symbols.table(path)
        if path in self._in_memory and self.symbols.has_state():
            # The same file would share its variables: load a copy, and delete it.
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="loading-") as scratch:
                copy = shutil.copy(path, scratch)
                self.handle = ctypes.CDLL(str(copy), mode=ctypes.RTLD_LOCAL)
        else:
            self.handle = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        self._in_memory.add(path)
        self.handle.engine_entries.restype = ctypes.c_void_p
        entries = self.symbols.find("engine_entries")
        self.base = ctypes.cast(self.handle.engine_entries, ctypes.c_void_p).value - entries.value if entries else 0
        self.anchor = ctypes.cast(self.handle.engine_anchor, ctypes.c_void_p).value
        offsets = [s.value for s in self.symbols.symbols if s.is_thread_local and "engine_anchor_byte" in s.name]
        self.anchor_offset = offsets[0] if offsets else 0

    def symbol_at(self, address: int) -> str | None:
        """Return the linker symbol of the function at an address; None if symbols are unknown."""
        return symbols.name_at(self.symbols, address - self.base)

    def counter(self, name: str) -> ctypes.c_uint64 | None:
        """Return a counter of a checked build's assembly by its name; None if there is none."""
        try:
            return ctypes.c_uint64.in_dll(self.handle, name)
        except ValueError:
            return None

    def variable(self, name: str) -> ctypes.Array | None:
        """Return the bytes of a variable of external linkage; None if there is none."""
        symbol = self.symbols.find(name)
        if symbol is None or not symbol.is_variable:
            return None
        return (ctypes.c_byte * symbol.size).from_address(self.base + symbol.value)


def echo(text: str) -> None:
    """Show what a kernel printed."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
