"""The certificate: a learner's passing texts with the X-ray's figures, in a small file that a teacher can confirm.

    exercise.certificate("03")                                     # in a notebook: writes certificate_03.json
    python3 -m helpers.lesson.certify FILE [FILE ...]              # a teacher: confirms or refuses the files

The digest of an exercise shows whether its entry was changed afterwards. Anybody can compute another digest, so the
texts are graded again, on fresh inputs, and the figures compared: a text that passes then is right, whoever wrote it.
The FLOP of threads are not compared, because they vary a little with g++'s version and clang counts none; the row shows
those counted here. The exit status is 1 if an exercise is refused. **Confirming runs the learners' code on your
machine.**
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.lesson.exercises import graders as _graders  # noqa: F401 (its modules register themselves)
from helpers.lesson.exercises import progress
from helpers.lesson.exercises.grade import Grade, grade, table
from helpers.lesson.exercises.holes import number_of
from helpers.lesson.exercises.trial import EXERCISES, FIRST, Row
from helpers.xray import Report

COURSE = "FlashAttention from scratch, in CuPy"
FLOP = "FLOP"
_KEYS = {"text", "size", "launches", "digest"}


def certificate(notebook: str = "", file: str | Path | None = None) -> None:
    """Grade the learner's solved exercises again, print the results, and write those that pass to a file.

    Args:
        notebook: its number or its name; all exercises if it is empty. file: certificate_NN.json by default, in the
            notebook's folder.
    """
    number = number_of(notebook)
    wanted = [name for name in sorted(EXERCISES) if number in ("", EXERCISES[name].notebook)]
    entries: dict[str, Any] = {}
    rows: dict[str, Row] = {}
    for name in wanted:
        mine = progress.solved_text(name)
        if mine is not None:
            result = grade(name, mine)
            rows[name] = _row(result)
            if result:
                entries[name] = entry(name, mine, result)
    target = Path(file or f"certificate{f'_{number}' * bool(number)}.json")
    if entries:
        target.write_text(json.dumps({"course": COURSE, "exercises": entries}, indent=1) + "\n", encoding="utf-8")
    written = f"written to {target}" if entries else "nothing is written"
    print(
        "\n".join([*([table(rows)] if rows else []), f"{len(entries)} of {len(wanted)} exercises solved: {written}."])
    )


def entry(name: str, code: str, result: Grade) -> dict[str, Any]:
    """Make an exercise's entry in the file."""
    content = {"text": code, "size": result.size, "launches": [figures(report) for report in result.reports]}
    return {**content, "digest": digest(name, content)}


def figures(report: Report) -> dict[str, int | str]:
    """List what a launch cost: {quantity: count}."""
    counted: dict[str, int | str] = {"kernel": report.name}
    for name, array in report.traffic.items():
        counted |= {f"bytes of {name} read": array.read, f"bytes of {name} written": array.written}
    shared = report.shared.values()
    return counted | {
        "bytes of shared memory read": sum(array.read for array in shared),
        "bytes of shared memory written": sum(array.written for array in shared),
        "bank conflicts": sum(array.conflicts for array in shared),
        "barriers": report.barriers,
        "FLOP on tensor cores": report.tensor_flop,
        **({FLOP: report.flop} if report.flop is not None else {}),
    }


def digest(name: str, content: Mapping[str, Any]) -> str:
    """Hash everything that the file says about an exercise."""
    said = [name, *(content[key] for key in sorted(_KEYS - {"digest"}))]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def confirm(name: str, said: Any) -> Row:
    """Grade the text of an entry again, and compare the file's figures with what the X-ray counts here."""
    if name not in EXERCISES:
        return Row(False, ["the course has no exercise of this name"])
    if not isinstance(said, Mapping) or set(said) != _KEYS or not isinstance(said["text"], str):
        return Row(False, ["this is not what exercise.certificate() writes"])
    result = grade(name, said["text"])
    row = _row(result)
    reasons = [] if said["digest"] == digest(name, said) else ["changed after the file was written"]
    if result.passed and result.reports:  # without a compiler only the GPU graded it, and nothing was counted
        reasons += _differences(said, entry(name, said["text"], result))
    if reasons:
        row = Row(False, [*reasons, *(["the text itself is right"] if result.passed else row.lines)])
    return row


def _differences(said: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    if said["size"] != here["size"]:
        yield f"the file says {said['size']!r}, the grader's first size is {here['size']}"
    launches = said["launches"] if isinstance(said["launches"], list) else []
    if [type(launch) for launch in launches] != [dict] * len(here["launches"]):
        yield f"the file has {len(launches)} launches, the X-ray {len(here['launches'])}"
        return
    for theirs, ours in zip(launches, here["launches"], strict=True):
        for what in dict.fromkeys((*ours, *theirs)):
            if what != FLOP and theirs.get(what) != ours.get(what):
                yield f"{ours['kernel']}, {what}: the file says {theirs.get(what)}, the X-ray {ours.get(what)}"


def _row(result: Grade) -> Row:
    """Summarise a grade in one row: the first size and what the launches cost there, or the first failure."""
    if not result.passed:
        failed = [f"{title}: {line}" for title in result.failed() for line in result.rows[title].lines[:1]]
        return Row(False, failed or result.text.splitlines()[:1])
    lines = list(result.rows[FIRST].lines)
    for report in result.reports:
        read, written = (sum(getattr(a, what) for a in report.traffic.values()) for what in ("read", "written"))
        conflicts = sum(a.conflicts for a in report.shared.values())
        lines.append(
            f"{report.name}: {read:,} bytes read, {written:,} written, {conflicts:,} bank conflicts, "
            f"{report.barriers:,} barriers{_flop(report)}"
        )
    return Row(True, lines)


def _flop(report: Report) -> str:
    if report.flop_per_byte is None:
        return ""
    tensor = f", {report.tensor_flop:,} on tensor cores" if report.tensor_flop else ""
    return f", {report.flop:,} FLOP{tensor}: {report.flop_per_byte:.2f} per byte"


def confirmed(path: Path) -> bool:
    """Print a row for each exercise of a file. Returns whether all are confirmed."""
    try:
        exercises = json.loads(path.read_text(encoding="utf-8"))["exercises"]
        rows = {name: confirm(name, said) for name, said in exercises.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        print(f"{path}: no file of exercise.certificate(): {type(error).__name__}: {error}")
        return False
    right = sum(row.passed is True for row in rows.values())
    notebooks = {EXERCISES[name].notebook for name in rows if name in EXERCISES}
    missing = [name for name in sorted(EXERCISES) if EXERCISES[name].notebook in notebooks and name not in rows]
    print(f"{path}: {right} of {len(rows)} confirmed")
    print("\n".join(filter(None, [table(rows), missing and f"not in the file: {', '.join(missing)}"])))
    return bool(rows) and right == len(rows)


def main(files: Sequence[str]) -> int:
    """Confirm or refuse all files. Returns the exit status."""
    if not files or files[0].startswith("-"):
        print(__doc__)
        return 2
    return 0 if all([confirmed(Path(file)) for file in files]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
