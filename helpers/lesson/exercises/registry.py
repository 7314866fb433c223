"""All exercises of the course, by name: their graders, what they take, their hints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helpers.lesson.exercises.hints import Hints

Grader = Callable[[Any], None]  # takes a Trial


def number_of(name: str) -> str:
    """What stands before the first _ in the name of a notebook or an exercise: "04b" of "04b_last_fifth.ipynb"."""
    return name.partition("_")[0]


@dataclass(frozen=True)
class Exercise:
    """One exercise. grade: its grader. minutes: what it takes a learner. hints: by symptom, in their order.

    notebook: the number of the notebook that has it, such as "04b"; where it is empty, the one in the exercise's name.
    only_cc: the one compute capability whose GPUs have its instructions, 90 for 9.0; 0 where there is no such limit.
    """

    name: str
    grade: Grader
    minutes: int
    hints: Hints
    only_cc: int = 0
    notebook: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "notebook", self.notebook or number_of(self.name))

    def calls(self, method: str) -> bool:
        """Whether the grader calls this method of its trial."""
        return method in self.grade.__code__.co_names


EXERCISES: dict[str, Exercise] = {}


def exercise(
    name: str, *, minutes: int, hints: Hints | None = None, only_cc: int = 0, notebook: str = ""
) -> Callable[[Grader], Grader]:
    """Decorator: this function grades the exercise `name`.

    Args:
        minutes: what a learner needs. hints: by symptom, one or several, for the first, second, ... failing try; those
            under "" are for all other symptoms.
        only_cc, notebook: as `Exercise` has them. On other GPUs than only_cc's the CPU engine alone grades.
    """

    def register(function: Grader) -> Grader:
        EXERCISES[name] = Exercise(name, function, minutes, dict(hints or {}), only_cc, notebook)
        return function

    return register
