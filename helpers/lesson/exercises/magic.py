"""The cell magic `%%cuda NAME`: grade the cell's text and print what came out."""

from __future__ import annotations

import sys
from typing import Any

from helpers.lesson.exercises import holes, progress
from helpers.lesson.exercises.grade import grade
from helpers.lesson.exercises.registry import EXERCISES


def cuda(line: str, cell: str) -> None:
    """Grade the text of a cell. What it prints ends in no traceback, whatever the text is."""
    name = line.strip()
    if name not in EXERCISES:
        print(f"[FAIL] %%cuda {name}: no such exercise; there are: {', '.join(sorted(EXERCISES))}")
        return
    try:
        result = grade(name, cell)
    except KeyboardInterrupt:
        print(f"[FAIL] {name}: interrupted")
        return
    if result.printed:
        print(result.printed)
    print(result.text)
    progress.note(name, cell, passed=result.passed)
    if result.passed and _shell() is not None:
        sys.modules["IPython.display"].display(compare(name))


def compare(name: str) -> object:
    """A learner's last right text beside ours: the lines that differ, folded in Jupyter."""
    from helpers.draw import sources  # which needs matplotlib: no grade waits for that

    mine = progress.solved_text(name)
    if mine is None:
        return sources.Text(f"`{name}` is not solved yet.")
    left = [line for line in mine.splitlines() if not line.lstrip().startswith("// TODO, ")]  # the skeleton's
    if " ".join(left).split() == holes.ours(name).split():
        return sources.Text(f"`{name}`: your lines are the same as ours.")
    title = f"{name}, yours is right; beside ours"
    return sources.folded(sources.diff_of("\n".join(left), holes.ours(name), title, sides=("yours", "ours")))


def best(name: str) -> tuple[str, str]:
    """The learner's last right text where there is one, else ours, and whose it is: "yours" or "ours".

    The text is complete: `helpers.attention.kernel.load(text, kernel's name)` compiles it.
    """
    mine = progress.solved_text(name)
    return (holes.complete(mine), "yours") if mine is not None else (holes.complete(holes.ours(name)), "ours")


def register() -> None:
    """Add the magic where a notebook runs. IPython is not imported for this: there it is already."""
    shell = _shell()
    if shell is not None:
        shell.register_magic_function(cuda, magic_kind="cell", magic_name="cuda")


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
