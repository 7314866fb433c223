"""Exercises: a skeleton made from its solution, a cell that compiles and grades itself.

    from helpers.lesson.exercises import exercise        # in a notebook: adds the cell magic

    %%cuda 01_coalesced_scores
    ...CUDA C++...

Running the cell compiles it, looks at it under the X-ray, launches it on fresh random inputs at awkward sizes, compares
with NumPy and says in a table what is right, what is not, and where to look. It never ends in a traceback.
A new exercise is one file in kernels/exercises/ (see holes.py), a grader in graders/ (see trial.py), and its typical
wrong answers in tests/.
"""

from __future__ import annotations

from helpers.lesson.exercises import graders as _graders  # noqa: F401 (its modules register themselves)
from helpers.lesson.exercises.certificate import certificate
from helpers.lesson.exercises.grade import grade
from helpers.lesson.exercises.grade_table import Grade
from helpers.lesson.exercises.hints import last as hint
from helpers.lesson.exercises.holes import FOLDER, cell, ours, skeleton, solution
from helpers.lesson.exercises.magic import best, compare, cuda, register
from helpers.lesson.exercises.progress import Board, minutes
from helpers.lesson.exercises.registry import EXERCISES
from helpers.lesson.exercises.trial import Trial

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
]

GRADERS = EXERCISES


def progress() -> Board:
    """All exercises of the course: what is solved, what was tried, how long the others take."""
    return Board()


register()
