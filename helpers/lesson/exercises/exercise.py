"""Exercises: a skeleton made from the solution, and a cell that compiles and grades itself.

    from helpers.lesson.exercises import exercise        # in a notebook: adds the cell magic

    %%cuda 01_coalesced_scores
    ...CUDA C++...

Running the cell compiles it, X-rays it, launches it on fresh random inputs at awkward sizes, compares the results
with NumPy's, and prints a table of what is right, what is wrong, and where to look. It never shows a traceback.
A new exercise is one file in kernels/exercises/ (see holes.py), a grader in graders/ (see trial.py), and its typical
wrong answers in tests/.
"""

from __future__ import annotations

import sys
from typing import Any

from helpers.lesson.certify import certificate
from helpers.lesson.exercises import graders as _graders  # noqa: F401 (its modules register themselves)
from helpers.lesson.exercises import holes
from helpers.lesson.exercises import progress as _progress
from helpers.lesson.exercises.grade import Grade, grade
from helpers.lesson.exercises.hints import last as hint
from helpers.lesson.exercises.holes import FOLDER, cell, ours, skeleton, solution
from helpers.lesson.exercises.progress import Board, minutes
from helpers.lesson.exercises.trial import COMPILES, EXERCISES, Trial

__all__ = [
    "FOLDER",
    "GRADERS",
    "Grade",
    "Trial",
    "best",
    "cell",
    "certificate",
    "compare",
    "cuda",
    "grade",
    "hint",
    "minutes",
    "ours",
    "progress",
    "skeleton",
    "solution",
    "tried",
]

GRADERS = EXERCISES
_tried: dict[str, str] = {}  # the last text of each exercise that compiled in this session


def progress() -> Board:
    """Show all exercises of the course: solved or tried, and the minutes that the others take."""
    return Board()


def cuda(line: str, cell: str) -> None:
    """Grade the text of a cell and print the result (`%%cuda NAME`). No text causes a traceback."""
    name = line.strip()
    if name not in EXERCISES:
        print(f"[FAIL] %%cuda {name}: no such exercise; there are: {', '.join(sorted(EXERCISES))}")
        return
    try:
        result = grade(name, cell)
    except KeyboardInterrupt:
        print(f"[FAIL] {name}: interrupted")
        return
    if (compiles := result.rows.get(COMPILES)) and compiles.passed:
        _tried[name] = cell
    if result.printed:
        print(result.printed)
    print(result.text)
    _progress.note(name, cell, passed=result.passed)
    if result.passed and _shell() is not None:
        sys.modules["IPython.display"].display(compare(name))


def compare(name: str) -> object:
    """Compare a learner's last right text with ours: the lines that differ, folded in Jupyter."""
    from helpers.draw import sources  # needs matplotlib, which grading should not wait for

    mine = _progress.solved_text(name)
    if mine is None:
        return sources.Text(f"`{name}` is not solved yet.")
    left = [line for line in mine.splitlines() if not line.lstrip().startswith("// TODO, ")]  # lines of the skeleton
    if " ".join(left).split() == holes.ours(name).split():
        return sources.Text(f"`{name}`: your lines are the same as ours.")
    title = f"{name}, yours is right; beside ours"
    return sources.folded(sources.diff_of("\n".join(left), holes.ours(name), title, sides=("yours", "ours")))


def best(name: str) -> tuple[str, str]:
    """Return the learner's last passing text, else ours, and whose it is: "yours" or "ours".

    The text is complete: `helpers.attention.kernel.load(text, kernel's name)` compiles it.
    """
    mine = _progress.solved_text(name)
    return (holes.complete(mine), "yours") if mine is not None else (holes.complete(holes.ours(name)), "ours")


def tried(name: str) -> str:
    """Return the last text of an exercise that compiled in this session, right or wrong; else the skeleton.

    The text is complete, like that of `best`.
    """
    return holes.complete(_tried.get(name) or holes.skeleton(name))


def _register() -> None:
    """Register the magic if IPython is running. A notebook has imported IPython, so this module need not."""
    shell = _shell()
    if shell is not None:
        shell.register_magic_function(cuda, magic_kind="cell", magic_name="cuda")


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


_register()
