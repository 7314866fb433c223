"""All exercises of the course, by name: their graders, what they take, their hints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helpers.exercises.hints import Hints

Grader = Callable[[Any], None]  # takes a Trial


@dataclass(frozen=True)
class Exercise:
    """One exercise. grade: its grader. minutes: what it takes a learner. hints: by symptom, in their order."""

    name: str
    grade: Grader
    minutes: int
    hints: Hints

    def calls(self, method: str) -> bool:
        """Whether the grader calls this method of its trial."""
        return method in self.grade.__code__.co_names


EXERCISES: dict[str, Exercise] = {}


def exercise(name: str, *, minutes: int, hints: Hints | None = None) -> Callable[[Grader], Grader]:
    """Decorator: this function grades the exercise `name`.

    Args:
        minutes: what a learner needs. hints: by symptom, one or several, for the first, second, ... failing try; those
            under "" are for all other symptoms.
    """

    def register(function: Grader) -> Grader:
        EXERCISES[name] = Exercise(name, function, minutes, dict(hints or {}))
        return function

    return register
