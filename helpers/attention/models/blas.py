"""Limit NumPy's matrix products to one thread within a context."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

_MAPS = Path("/proc/self/maps")  # Linux: the files in this process's memory, a line each


@functools.lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Find the functions that get and set OpenBLAS's number of threads; None with another library or off Linux."""
    lines = _MAPS.read_text(encoding="utf-8").splitlines() if _MAPS.is_file() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    for path in sorted(path for path in paths if "openblas" in Path(path).name):
        library = ctypes.CDLL(path)
        for before in ("scipy_openblas", "openblas"):  # of NumPy's wheels, and of others; with 64-bit integers or not
            for after in ("64_", ""):
                names = (f"{before}_{what}_num_threads{after}" for what in ("get", "set"))
                get, put = (getattr(library, name, None) for name in names)
                if get and put:
                    return get, put
    return None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Make OpenBLAS multiply matrices on the calling thread only; restore its threads at the end of the context.

    After a product, OpenBLAS's other threads wait for the next one in a busy loop. A kernel that is launched on the CPU
    engine at that time has fewer cores. Small products gain nothing from more threads.
    """
    functions = _openblas()
    if not functions:
        yield
        return
    get, put = functions
    threads = get()
    put(1)
    try:
        yield
    finally:
        put(threads)
