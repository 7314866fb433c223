"""Confirms or refuses what learners hand in: files that `exercise.certificate()` wrote.

python3 -m helpers.lesson.certify FILE [FILE ...]

Each text is graded again on fresh inputs, and has a row. The exit status is 1 where one is refused. **This runs the
learners' code on your machine.**
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from helpers.lesson.exercises import exercise, grade_table
from helpers.lesson.exercises.certificate import confirm


def confirmed(path: Path) -> bool:
    """Print a row for each exercise of a file; whether all are confirmed."""
    try:
        exercises = json.loads(path.read_text(encoding="utf-8"))["exercises"]
        rows = {name: confirm(name, said) for name, said in exercises.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        print(f"{path}: no file of exercise.certificate(): {type(error).__name__}: {error}")
        return False
    right = sum(row.passed is True for row in rows.values())
    graders = exercise.GRADERS
    notebooks = {graders[name].notebook for name in rows if name in graders}
    missing = [name for name in sorted(graders) if graders[name].notebook in notebooks and name not in rows]
    print(f"{path}: {right} of {len(rows)} confirmed")
    print("\n".join(filter(None, [grade_table.text(rows), missing and f"not in the file: {', '.join(missing)}"])))
    return bool(rows) and right == len(rows)


def main(files: Sequence[str]) -> int:
    """All files; the exit status."""
    if not files or files[0].startswith("-"):
        print(__doc__)
        return 2
    return 0 if all([confirmed(Path(file)) for file in files]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
