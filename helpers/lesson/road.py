"""A learner's progress as text: what is solved and guessed in each notebook, and how long the rest takes.

python3 helpers/course.py progress
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from helpers.attention import kernel
from helpers.lesson.exercises import exercise, progress
from helpers.lesson.exercises.trial import Exercise

NOTEBOOKS = kernel.KERNELS.parent / "notebooks"


@dataclass(frozen=True)
class Stop:
    """One notebook. minutes: to read and run it. solved: of its exercises. guesses: the answered ones."""

    path: Path
    title: str
    minutes: int
    exercises: tuple[Exercise, ...]
    solved: frozenset[str]
    guesses: int

    @property
    def left(self) -> list[Exercise]:
        """List the exercises that are not solved."""
        return [one for one in self.exercises if one.name not in self.solved]

    @property
    def is_begun(self) -> bool:
        """Check whether any guess or solution was made in it."""
        return bool(self.solved or self.guesses)

    def line(self, width: int) -> str:
        """Format the notebook as a row of the table."""
        done = f"{len(self.solved)} of {len(self.exercises)} solved" if self.exercises else "no exercises"
        left = sum(one.minutes for one in self.left)
        columns = [f"{self.minutes:4} min to read", f"{done:14}", f"{left:3} min to do" if left else ""]
        columns += [f"{self.guesses} guess{'es' * (self.guesses != 1)}"] if self.guesses else []
        return f"{self.path.name.partition('_')[0]:3} {self.title:<{width}} {'  '.join(columns)}".rstrip()


def stops() -> list[Stop]:
    """List the notebooks in order."""
    entries = progress.read()
    road = []
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        number = path.name.partition("_")[0]
        cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        title, minutes = re.match(r"# \w+ · (.+)", cells[0]), re.search(r"\*\*Minutes:\*\* (\d+) to read", cells[0])
        magics = (re.match(r"%%cuda (\w+)", cell) for cell in cells)
        names = [magic[1] for magic in magics if magic]
        exercises = tuple(exercise.GRADERS[name] for name in names if name in exercise.GRADERS)
        solved = frozenset(one.name for one in exercises if one.name in entries and entries[one.name].solved)
        guesses = sum(guess.get("value") is not None for guess in progress.guesses(number).values())
        name, reading = title[1] if title else number, int(minutes[1]) if minutes else 0
        road.append(Stop(path, name, reading, exercises, solved, guesses))
    return road


def text() -> str:
    """Write the table, what comes next, and the total time."""
    road = stops()
    width = max(len(stop.title) for stop in road)
    left = [one for stop in road for one in stop.left]
    solved = sum(len(stop.solved) for stop in road)
    lines = [stop.line(width) for stop in road]
    lines += ["", f"{solved} of {solved + len(left)} exercises solved."]
    if not left:
        return "\n".join([*lines, "exercise.certificate() in a notebook writes them to a file for your teacher."])
    begun = [stop for stop in road if stop.is_begun and stop.left]
    stop = begun[-1] if begun else next(stop for stop in road if stop.left)
    one = stop.left[0]
    tries = progress.read().get(one.name, progress.Entry()).tries
    after = f", after {tries} {'try' if tries == 1 else 'tries'}" if tries else ""
    reading = "" if stop.is_begun else f" The notebook takes about {stop.minutes} minutes to read and run."
    minutes = sum(one.minutes for one in left)
    lines.append(f"Next: {one.name}, about {one.minutes} minutes{after}, in {stop.path.name}.{reading}")
    lines.append(f"All exercises that are left: about {minutes // 60} h {minutes % 60:02} min.")
    return "\n".join(lines)
