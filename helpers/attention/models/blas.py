"""NumPy's matrix products on one thread for a while."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

_MAPS = Path("/proc/self/maps")  # Linux: the files in this process's memory, a line each


@functools.lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """How to ask and to set the number of OpenBLAS's threads; None where NumPy has another library, or not on Linux."""
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
    """A context in which OpenBLAS multiplies matrices on the calling thread alone. Then it has its threads again.

    After a product, OpenBLAS's other threads wait for the next one in a busy loop. A kernel that is launched on the CPU
    engine at that time has fewer cores. Small products gain nothing from more threads.
    """
    found = _openblas()
    if not found:
        yield
        return
    get, put = found
    threads = get()
    put(1)
    try:
        yield
    finally:
        put(threads)
