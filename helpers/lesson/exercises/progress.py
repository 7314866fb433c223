"""The solved exercises and the guesses: a small local file, and the board that displays it.

The file is `.progress.json` in the root of the repository, or the one that `COURSE_PROGRESS` names. It is a
convenience: if it is broken, or cannot be read or written, exercises are still graded.

    {"exercises": {"01_coalesced_scores": {...}, ...}, "guesses": {"01": {"rows that go wrong": {...}, ...}, ...}}
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from helpers.attention import kernel
from helpers.lesson.exercises import holes
from helpers.lesson.exercises.holes import number_of
from helpers.lesson.exercises.trial import EXERCISES


@dataclass
class Entry:
    """A learner's record of one exercise.

    tries: attempts so far. solved: True if any passed. text: the last passing solution. skeleton: the checksum of the
    skeleton it was written for; if that has changed, the text is ignored.
    """

    tries: int = 0
    solved: bool = False
    text: str = ""
    skeleton: int = 0


_session: dict[str, Entry] = {}  # used even if the file cannot be written


def file() -> Path:
    """Return the path of the file."""
    return Path(os.environ.get("COURSE_PROGRESS") or kernel.KERNELS.parent / ".progress.json")


def read() -> dict[str, Entry]:
    """Read all entries by exercise: from the file, or from this session where that is newer."""
    entries: dict[str, Entry] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        for name, entry in _kept("exercises").items():
            entries[str(name)] = Entry(
                int(entry["tries"]), bool(entry["solved"]), str(entry["text"]), int(entry["skeleton"])
            )
    for name, entry in _session.items():
        if name not in entries or entries[name].tries < entry.tries:
            entries[name] = entry
    return entries


def note(name: str, code: str, *, passed: bool) -> None:
    """Count a try. The unchanged skeleton does not count."""
    if not passed and code.strip() == holes.skeleton(name).strip():
        return
    entries = read()
    entry = entries.setdefault(name, Entry())
    entry.tries += 1
    if passed:
        entry.solved, entry.text, entry.skeleton = True, code, _version(name)
    _session[name] = entry
    _keep("exercises", {key: asdict(value) for key, value in sorted(entries.items())})


def guesses(notebook: str) -> dict[str, dict[str, Any]]:
    """Read a notebook's earlier guesses, by question: "guess", "unit" and, if answered, "value"."""
    kept = _kept("guesses").get(notebook)
    return {str(k): one for k, one in kept.items() if isinstance(one, dict)} if isinstance(kept, dict) else {}


def note_guess(notebook: str, question: str, guess: Mapping[str, Any]) -> None:
    """Save a guess."""
    _keep("guesses", {**_kept("guesses"), notebook: {**guesses(notebook), question: dict(guess)}})


def _kept(part: str) -> dict[str, Any]:
    """Read a part of the file; {} if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        kept = json.loads(file().read_text(encoding="utf-8")).get(part)
        return kept if isinstance(kept, dict) else {}
    return {}


def _keep(part: str, entries: Mapping[str, Any]) -> None:
    """Write a part of the file and keep the others. Does nothing if the file cannot be written."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        target = file()
        parts = {name: _kept(name) for name in ("exercises", "guesses")}
        parts = {name: kept for name, kept in {**parts, part: entries}.items() if kept}
        handle, path = tempfile.mkstemp(dir=target.parent, prefix=".progress-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(parts, out, indent=1)
            os.replace(path, target)  # atomically: another notebook may be reading it
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


def solved_text(name: str) -> str | None:
    """Return the learner's last passing text, or None."""
    entry = read().get(name)
    return entry.text if entry is not None and entry.text and entry.skeleton == _version(name) else None


def _version(name: str) -> int:
    return zlib.crc32(holes.skeleton(name).encode())


def minutes(notebook: str) -> int:
    """Add up the minutes of a notebook's exercises. notebook: its number or its name: "02", "02_tiled"."""
    return sum(one.minutes for one in EXERCISES.values() if one.notebook == number_of(notebook))


class Board:
    """A table of all exercises: notebook, minutes, solved or not."""

    def __init__(self) -> None:
        entries = read()
        exercises = sorted(EXERCISES.values(), key=lambda one: (one.notebook, one.name))
        self.rows = [(one, entries.get(one.name, Entry())) for one in exercises]

    @staticmethod
    def _state(entry: Entry) -> str:
        if entry.solved:
            return "solved"
        return f"{entry.tries} {'try' if entry.tries == 1 else 'tries'}" if entry.tries else ""

    def _total(self) -> str:
        solved = sum(entry.solved for _, entry in self.rows)
        left = sum(one.minutes for one, entry in self.rows if not entry.solved)
        words = f"{solved} of {len(self.rows)} exercises solved; about {left} minutes to go."
        return f"{words} exercise.certificate() writes them to a file for your teacher." if solved else words

    def _repr_markdown_(self) -> str:
        lines = ["| notebook | exercise | minutes | |", "|---|---|---:|---|"]
        for one, entry in self.rows:
            lines.append(
                f"| {one.notebook} | {one.name[3:].replace('_', ' ')} | {one.minutes} | {self._state(entry)} |"
            )
        return "\n".join([*lines, "", self._total()])

    def __repr__(self) -> str:
        width = max(len(one.name) for one, _ in self.rows)
        lines = [f"{one.name:<{width}}  {one.minutes:>3} min  {self._state(e)}".rstrip() for one, e in self.rows]
        return "\n".join([*lines, self._total()])
