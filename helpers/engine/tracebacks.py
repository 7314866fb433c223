"""Short tracebacks in notebooks: for an error that a package reports, only the reader's frames are shown.

A wrong argument is noticed several calls deep in the package, but a reader needs only the line of the cell and the
message. An error that was not raised on purpose keeps all its frames, and so does every error with
`COURSE_TRACEBACK=full`. Outside IPython nothing changes: pytest and plain Python show whole tracebacks.
"""

from __future__ import annotations

import dis
import os
import sys
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from . import settings

_folders: list[str] = []  # of the packages whose frames are hidden

# The exceptions that they raise. SyntaxError is not among them: IPython displays it differently.
REPORTED = (TypeError, ValueError, RuntimeError, LookupError, OSError, MemoryError, AssertionError, ImportError)


def install(folder: Path, *more: type[Exception]) -> None:
    """Show short tracebacks in the running IPython, if any. Other error handlers stay in place.

    Args:
        folder: that of the package whose frames are hidden. more: exceptions besides REPORTED.
    """
    _folders.append(str(folder.resolve()) + os.sep)
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or shell.custom_exceptions or settings.value("TRACEBACK") == "full":
        return
    shell.set_custom_exc((*REPORTED, *more, KeyboardInterrupt), _show)


def _show(
    shell: Any, kind: type, error: BaseException, trace: TracebackType | None, tb_offset: int | None = None
) -> None:
    short = shortened(trace) if isinstance(error, KeyboardInterrupt) or is_reported(trace) else trace
    if short is not trace:
        _shorten_causes(error)
    shell.showtraceback((kind, error, short), tb_offset=tb_offset)


def is_reported(trace: TracebackType | None) -> bool:
    """Return True if one of our `raise` statements made the error."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return _is_ours(code) and _opname(code, trace.tb_lasti) == "RAISE_VARARGS"


def shortened(trace: TracebackType | None) -> TracebackType | None:
    """Remove our frames from a traceback, unless no other frame would be left."""
    frames: list[TracebackType] = []
    at = trace
    while at is not None:
        if not _is_ours(at.tb_frame.f_code):
            frames.append(at)
        at = at.tb_next
    result: TracebackType | None = None
    for one in reversed(frames):
        result = TracebackType(result, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return result or trace


def _shorten_causes(error: BaseException) -> None:
    """Hide the traceback of an error's cause: the message names the cause if that matters."""
    error.__suppress_context__ = True
    error.__cause__ = None


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(tuple(_folders))


def _opname(code: CodeType, offset: int) -> str:
    return dis.opname[code.co_code[offset]]
