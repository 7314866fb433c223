"""The grade of an exercise as a table: five rows, each passed, failed with its reason, or not tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from helpers.xray import Report

COMPILES = "compiles"
FIRST = "right at the first size"
AWKWARD = "right at awkward sizes"
XRAY = "clean under the X-ray"
LIMIT = "meets its limit"
ROWS = (COMPILES, FIRST, AWKWARD, XRAY, LIMIT)

_WIDTH = max(map(len, ROWS)) + 2
_MOST_LINES = 6  # of one row's reasons


@dataclass
class Row:
    """One row. passed: None where it was not tried. lines: the reason, or what passed. symptoms: nearest first."""

    passed: bool | None = None
    lines: list[str] = field(default_factory=list)
    symptoms: tuple[str, ...] = ()

    def fail(self, lines: Sequence[str], *symptoms: str) -> None:
        """The row has failed; the first failure is the one that is told."""
        if self.passed is not False:
            self.passed, self.lines, self.symptoms = False, list(lines), symptoms


@dataclass(frozen=True)
class Grade:
    """What grading found. True in an `if` when all is right. text: the lines to print.

    rows: by title, those that apply. symptom: of the failure that the hint is for; "" where all is right.
    printed: what the kernel printed, at one of the sizes.
    size: the first one, in words. reports: the X-rays of the launches there; none where there is no C++ compiler.
    """

    passed: bool
    text: str
    rows: dict[str, Row] = field(default_factory=dict)
    symptom: str = ""
    size: str = ""
    reports: tuple[Report, ...] = ()
    printed: str = ""

    def __bool__(self) -> bool:
        return self.passed

    def failed(self) -> list[str]:
        """The titles of the rows that failed."""
        return [title for title, row in self.rows.items() if row.passed is False]


def text(rows: dict[str, Row]) -> str:
    """The rows as aligned lines: [PASS] or [FAIL], the title, the reason."""
    lines = []
    for title, row in rows.items():
        mark = {True: "[PASS]", False: "[FAIL]", None: "[    ]"}[row.passed]
        reasons = row.lines if row.passed is not None else row.lines or ["not tried"]
        first, *others = reasons or [""]
        lines.append(f"{mark} {title:<{_WIDTH}}{first}".rstrip())
        hidden = len(others) - _MOST_LINES
        shown = others if hidden <= 0 else [*others[:_MOST_LINES], f"... and {hidden} more lines"]
        lines += [f"{'':7}{'':<{_WIDTH}}{line}".rstrip() for line in shown]
    return "\n".join(lines)
