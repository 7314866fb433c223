"""A bug planted in the text of a kernel."""

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
    finds: the kind of the X-ray's finding, where it is looked at, in a launch with `options`. here, there: words of the
    finding's line and of the other one, "" where there is none.
    cpu_only: it shows on the CPU engine for certain and on a GPU by luck (a race, memory that nobody wrote), or would
    leave a GPU's context unusable (an address out of bounds).
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
        """The text with the bug in it. AssertionError where it is not the kernel that the bug was written for."""
        only = None if self.which == ALL else self.which
        try:
            return edit(text, (self.old, self.new), count=self.times, only=only)
        except ValueError as error:
            raise AssertionError(
                f"the kernel has changed: {self.old!r} was there {self.times} times. {error}. "
                f"Write the bug {self.name!r} anew for the kernel as it is now."
            ) from None


def check_all_can_be_planted(bugs: Iterable[tuple[str, Bug]]) -> None:
    """Each (text, bug) changes its text: also those that only the full run looks for, so a kernel's change is told."""
    for text, bug in bugs:
        assert bug.plant(text) != text, bug.name
