"""Bugs planted in kernels' texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helpers.attention import check
from helpers.engine.cuda_source.edit import edit

ALL = -1


@dataclass(frozen=True)
class Bug:
    """One change of a kernel's text that makes it wrong.

    old occurs `times` times in the kernel; the one numbered `which` becomes new, or ALL of them.
    inputs: the inputs that show it. error: how it shows in the results.
    finds: the kind of the X-ray's finding in a launch with `options`, if it is checked. here, there: words of the
    finding's line and of the other line, "" without one. cpu_only: it always shows on the CPU engine, but on a GPU only
    by luck (a race, unwritten memory), or would leave a GPU's context unusable (an address out of bounds).
    """

    name: str
    old: str
    new: str
    times: int = 1
    which: int = 0
    inputs: str = "unit-normal"
    error: type[Exception] = check.CheckFailed
    cpu_only: bool = False
    finds: str = ""
    here: str = ""
    there: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def plant(self, text: str) -> str:
        """Return the text with the bug in it. Raises AssertionError if the bug was written for another kernel."""
        only = None if self.which == ALL else self.which
        try:
            return edit(text, (self.old, self.new), count=self.times, only=only)
        except ValueError as error:
            raise AssertionError(
                f"the kernel has changed: {self.old!r} was there {self.times} times. {error}. "
                f"Write the bug {self.name!r} again, for the kernel as it is now."
            ) from None


def check_all_can_be_planted(bugs: Iterable[tuple[str, Bug]]) -> None:
    """Check that each (text, bug) changes its text, including those of the full run: a kernel's change is noticed."""
    for text, bug in bugs:
        assert bug.plant(text) != text, bug.name
