"""The first build of the engine takes half a minute: show a message meanwhile, and let a notebook start it early."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from . import compiler

T = TypeVar("T")

SOON = 1.0  # seconds; no build is this fast
DOING = "compiling the CPU engine, once on this machine: half a minute or a little more"


def in_jupyterlab() -> bool:
    """Return True if JupyterLab or Notebook 7 sent the running cell: they send its id, and nbval does not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return False
    try:
        return "cellId" in kernel.get_parent().get("metadata", {})
    except Exception:  # another kind of kernel
        return False


class _Line(Protocol):
    def __call__(self, text: str, *, last: bool) -> None: ...


def _line() -> _Line | None:
    """Return a function that shows one changing line in JupyterLab or a terminal; None without either."""
    if in_jupyterlab():
        display = sys.modules["IPython"].display.display
        handle: Any = None

        def in_cell(text: str, *, last: bool) -> None:
            nonlocal handle
            data = {"text/plain": text}
            if handle is None:
                handle = display(data, raw=True, display_id=True)
            else:
                handle.update(data, raw=True)

        return in_cell
    if sys.stderr is not None and sys.stderr.isatty():

        def in_terminal(text: str, *, last: bool) -> None:
            print(f"\r{text}", end="\n" if last else "", file=sys.stderr, flush=True)

        return in_terminal
    return None


def run_with_message(work: Callable[[], T], doing: str) -> T:
    """Run a function in a thread, and return its result or raise its exception; after SOON, show that it runs."""
    line = _line()
    if line is None:
        return work()
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    begin = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON)
    was_said = thread.is_alive()
    while thread.is_alive():
        line(f"{doing} ... {time.monotonic() - begin:.0f} s", last=False)
        thread.join(1)
    if failure:
        raise failure[0]
    if was_said:
        line(f"{doing} ... done in {time.monotonic() - begin:.0f} s", last=True)
    return result[0]


def begin() -> None:
    """Build the engine in a thread, if it is not built: a launch meanwhile waits for it, with a message.

    Errors are left to that launch.
    """

    def build() -> None:
        try:
            compiler.engine_library()
        except Exception:  # no compiler, or a full disk: the launch raises the same error again
            compiler.engine_library.cache_clear()

    threading.Thread(target=build, daemon=True).start()
