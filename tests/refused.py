"""Check that the calls of a table are refused; a failure names the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check_refused(case: object, error: type[BaseException], message: str, call: Callable[[], Any]) -> None:
    """Check that a call raises that error, and that its text has the message in it."""
    try:
        call()
    except error as raised:
        assert message in str(raised), f"{case}: {raised}"
    else:
        raise AssertionError(f"{case}: it is not refused")
