"""What is wrong with a trial, in the few lines that a row of the table has for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from helpers.attention.check import CheckResult
from helpers.lesson.exercises import hints
from helpers.xray import Finding


def result(
    output: str, at: str, found: CheckResult, got: np.ndarray, expected: np.ndarray
) -> tuple[list[str], tuple[str, ...]]:
    """A wrong output: the worst element and its row, and the symptoms, the most telling one first.

    Args:
        output: what it is called. at: the size. found: of the comparison.
    """
    what, _, rest = found.message.partition(": ")[2].partition("; ")
    lines = [f"{output}{' at ' if at else ''}{at}", what]
    if rest:
        lines.append(rest.partition("; ")[0])
    if found.worst is None:  # another shape
        return lines, ("wrong",)
    untouched = hints.untouched(got)
    if untouched.any():
        first = np.unravel_index(int(untouched.argmax()), got.shape)
        place = ", ".join(f"{name} {i}" for name, i in zip(("row", "column")[: len(first)], first, strict=False))
        lines[1:] = [f"{int(untouched.sum())} of {got.size} elements were never written, the first at {place}"]
        return lines, ("empty",)
    if found.nan:
        return lines, ("nan",)
    place = hints.displaced(got, expected, found.tolerance)
    if place is not None:
        wrong = np.argwhere(np.abs(got.astype(np.float64) - expected) > found.tolerance)[0]
        lines.append(f"element {_index(wrong)} has the value that belongs to {_index(place)}")
        return lines, ("index", "wrong")
    return lines, ("wrong",)


def findings(found: Sequence[Finding], code: str) -> list[str]:
    """The first finding of an X-ray with its lines of the cell; how many more there are."""
    first = found[0]
    message = f"{first.kind}: {first.message}"
    for words in (" races with ", ", while "):
        message = message.replace(words, f"\n{words.strip(', ')} ")
    lines = message.split("\n")
    for line in dict.fromkeys((first.line, first.other_line)):
        lines += quoted(code, line) if first.file == "cell" else []
    more = len(found) - 1
    return [*lines, *([f"and {more} more finding{'s' * (more > 1)}"] if more else [])]


def quoted(code: str, line: int | None) -> list[str]:
    """A line of the cell, by its number there; line 1 is the magic's."""
    lines = code.splitlines()
    return [f"{line:>6} | {lines[line - 2].rstrip()}"] if line is not None and 0 <= line - 2 < len(lines) else []


def endless(found: Finding, code: str, seconds: float) -> str:
    """An endless loop, as the X-ray found it."""
    place = f"at {found.file}:{found.line}" if found.line else "at an unknown line"
    return "\n".join([_endless(place, seconds), *quoted(code, found.line if found.file == "cell" else None)])


def endless_launch(message: str, code: str, seconds: float) -> str:
    """The same of a launch that the engine has stopped; message: the engine's."""
    place = message.partition("never happens ")[2].partition(" [")[0]
    line = re.search(r"\bcell:(\d+)", place)
    return "\n".join([_endless(place, seconds), *quoted(code, int(line[1]) if line else None)])


def _endless(place: str, seconds: float) -> str:
    return f"stopped after {seconds:g} s: an endless loop, or a wait for something that never happens, {place}"


def _index(index: Sequence[int]) -> str:
    return f"[{', '.join(map(str, index))}]"
