"""All exercises of the course, by name: their graders, what they take, their hints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helpers.lesson.exercises.hints import Hints

Grader = Callable[[Any], None]  # takes a Trial


@dataclass(frozen=True)
class Exercise:
    """One exercise. grade: its grader. minutes: what it takes a learner. hints: by symptom, in their order.

    only_cc: the one compute capability whose GPUs have its instructions, 90 for 9.0; 0 where there is no such limit.
    """

    name: str
    grade: Grader
    minutes: int
    hints: Hints
    only_cc: int = 0

    def calls(self, method: str) -> bool:
        """Whether the grader calls this method of its trial."""
        return method in self.grade.__code__.co_names


EXERCISES: dict[str, Exercise] = {}


def exercise(name: str, *, minutes: int, hints: Hints | None = None, only_cc: int = 0) -> Callable[[Grader], Grader]:
    """Decorator: this function grades the exercise `name`.

    Args:
        minutes: what a learner needs. hints: by symptom, one or several, for the first, second, ... failing try; those
            under "" are for all other symptoms.
        only_cc: as `Exercise` has it. On other GPUs the CPU engine alone grades.
    """

    def register(function: Grader) -> Grader:
        EXERCISES[name] = Exercise(name, function, minutes, dict(hints or {}), only_cc)
        return function

    return register
