"""Grading: a learner's text goes through its grader on the CPU engine, then on the GPU if there is one."""

from __future__ import annotations

import contextlib
import math
import os
import re
import textwrap
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from helpers import engine
from helpers.device import ON_GPU, cp
from helpers.engine import first_build
from helpers.engine.nvrtc import CuteMissing
from helpers.lesson.exercises import hints, holes
from helpers.lesson.exercises.trial import AWKWARD, COMPILES, EXERCISES, FIRST, LIMIT, ROWS, XRAY, Row, Stopped, Trial
from helpers.xray import Report

SECONDS = 10.0  # the time limit of a block of an exercise

_WIDTH = max(map(len, ROWS)) + 2
_COLUMNS = 100  # what JupyterLab shows without a break beside its list of files, in a window of 1280 pixels
_MOST_LINES = 6  # shown of one row's reasons


@dataclass(frozen=True)
class Grade:
    """The result of grading, true if everything is right. text: the lines to print.

    rows: those that apply, by title. symptom: that of the failure that the hint is about; "" if all is right.
    printed: what the kernel printed, at one of the sizes.
    size: the first one, in words. reports: the X-rays of its launches; none without a C++ compiler.
    """

    passed: bool
    text: str
    rows: dict[str, Row] = field(default_factory=dict)
    symptom: str = ""
    size: str = ""
    reports: tuple[Report, ...] = ()
    printed: str = ""

    def __bool__(self) -> bool:
        return self.passed

    def failed(self) -> list[str]:
        """List the titles of the rows that failed."""
        return [title for title, row in self.rows.items() if row.passed is False]


def table(rows: dict[str, Row]) -> str:
    """Format the rows as aligned lines: [PASS] or [FAIL], the title, the reason."""
    lines = []
    if _repeats(rows.get(XRAY, Row()), rows.get(FIRST, Row())):
        rows = {**rows, XRAY: Row(False, ["the same"])}
    for title, row in rows.items():
        mark = {True: "[PASS]", False: "[FAIL]", None: "[    ]"}[row.passed]
        reasons = row.lines if row.passed is not None else row.lines or ["not tried"]
        hidden = len(reasons) - 1 - _MOST_LINES
        shown = reasons if hidden <= 0 else [*reasons[: 1 + _MOST_LINES], f"... and {hidden} more lines"]
        first, *others = [part for line in shown for part in _wrapped(line)] or [""]
        lines.append(f"{mark} {title:<{_WIDTH}}{first}".rstrip())
        lines += [f"{'':7}{'':<{_WIDTH}}{line}".rstrip() for line in others]
    return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    """Break a reason between words where JupyterLab would break it at the margin; quoted code stays whole."""
    if not first_build.in_jupyterlab() or re.match(r" *\d* \| | *\^", line):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    room = _COLUMNS - len("[PASS] ") - _WIDTH
    wrapped = textwrap.wrap(line, room, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
    return wrapped or [line]


def _repeats(row: Row, earlier: Row) -> bool:
    """Check whether two failures are about the same line of the cell in nearly the same words.

    A crash says less than the X-ray's finding, and depends on what happens to be next to an array.
    """
    if row.passed is not False or earlier.passed is not False or row.lines[1:] != earlier.lines[1:]:
        return False
    if any("SIG" in line for line in earlier.lines):
        return False
    messages = (lines[0] if lines else "" for lines in (row.lines, earlier.lines))
    return SequenceMatcher(None, *messages, autojunk=False).ratio() > 0.5


def grade(name: str, code: str, *, seed: int | None = None) -> Grade:
    """Compile a learner's text, run it, and compare the results with NumPy's.

    If there is a C++ compiler, the CPU engine grades first: there a wild pointer gives a message, while on a GPU it
    would make every later cell fail.

    Args:
        seed: of the inputs; None for fresh ones in every try.

    Raises:
        KeyError: there is no exercise with that name.
    """
    if name not in EXERCISES:
        raise KeyError(f"no exercise {name!r}; there are: {', '.join(sorted(EXERCISES))}")
    rows: dict[str, Row] = {}
    seen: Trial | None = None  # the trial that was X-rayed
    no_compiler = False
    for device, on_gpu in ((engine, False), (cp, True)) if _has_gpu_for(name) else ((engine, False),):
        try:
            trial = Trial(name, code, device, on_gpu, _seconds(), seed)
            tried = _rows(trial)
        except engine.NoCompilerError as error:
            if not ON_GPU:
                return Grade(False, f"[FAIL] {name}: {error}")
            no_compiler = True
            continue
        except CuteMissing as error:
            return Grade(False, f"[FAIL] {name}: {error}")
        except Exception as error:  # a text that the grader did not expect: report it in a line, never a traceback
            return Grade(False, f"[FAIL] {name}: the grader stopped with {type(error).__name__}: {error}")
        if not rows:
            rows, seen = tried, trial
        else:  # everything passed on the CPU
            for title in (COMPILES, FIRST, AWKWARD):
                if title in tried and tried[title].passed is False:
                    tried[title].lines.insert(0, "on this GPU (right on the CPU engine):")
                    rows[title] = tried[title]
        if not _passed(rows):
            break
    if no_compiler and EXERCISES[name].calls("launch"):
        rows[XRAY] = Row(lines=["not tried: the CPU engine has no C++ compiler"])
    return _grade(name, code, rows, seen)


def _has_gpu_for(name: str) -> bool:
    """Check whether there is a GPU with the instructions of the exercise."""
    only = EXERCISES[name].only_cc
    return ON_GPU and (not only or int(cp.cuda.Device().compute_capability) == only)


def _passed(rows: dict[str, Row]) -> bool:
    tried = [row.passed for title, row in rows.items() if row.passed is not None or title != XRAY]
    return bool(tried) and all(tried)


def _seconds() -> float:
    """Return the time limit of a block: COURSE_CPU_TIMEOUT if set, else SECONDS; 0 means no limit."""
    return float(os.environ.get("COURSE_CPU_TIMEOUT") or SECONDS) or math.inf


def _is_try(name: str, code: str) -> bool:
    """Check whether a text is a learner's, and not the skeleton as it is."""
    return code.strip() != holes.skeleton(name).strip()


def _rows(trial: Trial) -> dict[str, Row]:
    """Run one trial. Returns the rows that apply to its exercise."""
    exercise = EXERCISES[trial.name]
    with contextlib.suppress(Stopped):
        exercise.grade(trial)
    rows = dict(trial.rows)
    wrong = any(rows[title].passed is False for title in (COMPILES, FIRST, AWKWARD))
    if wrong and rows[COMPILES].passed and not trial.on_gpu and _is_try(trial.name, trial.code):
        trial.warn()
    if trial.has_awkward_sizes is False:
        del rows[AWKWARD]
    if trial.on_gpu or not exercise.calls("launch"):
        del rows[XRAY]
    if trial.on_gpu or not exercise.calls("limit"):
        del rows[LIMIT]
    elif wrong:
        rows[LIMIT] = Row()
    return rows


def _grade(name: str, code: str, rows: dict[str, Row], seen: Trial | None) -> Grade:
    more = {"size": seen.first_size, "reports": tuple(seen.reports), "printed": seen.printed()} if seen else {}
    if _passed(rows):
        solved = f'Solved. exercise.compare("{name}") shows your lines beside ours.'
        return Grade(True, f"{table(rows)}\n{solved}", rows, **more)
    symptoms, is_try = _symptoms(rows), _is_try(name, code)
    failed = [f"{title}: {row.lines[:1]}" for title, row in rows.items() if row.passed is False]
    slip = re.sub(r"\d+", "", " ".join(failed))  # inputs change with every try, so numbers differ
    hint = hints.hint(name, EXERCISES[name].hints, symptoms, slip=slip, counts=is_try) if symptoms else ""
    give_up = f'To give up: exercise.solution("{name}")' if is_try else ""
    text = "\n".join(filter(None, [table(rows), hint, is_try and hint and hints.offer(name), give_up]))
    return Grade(False, text, rows, symptoms[0] if symptoms else "", **more)


_STOPS = {"compile", "return", "crash", "null", "never ends", "deadlock"}  # the launch's own error says what is wrong


def _symptoms(rows: dict[str, Row]) -> tuple[str, ...]:
    """List the symptoms of the failed rows: the X-ray's first, since they may explain those of a wrong result."""
    if rows.get(COMPILES, Row()).passed and rows[COMPILES].symptoms:  # a slip that the compiler takes
        return rows[COMPILES].symptoms
    failed = [row for row in rows.values() if row.passed is False]
    xrayed = rows.get(XRAY, Row())
    if xrayed.passed is False and ("overrun" in failed[0].symptoms or not _STOPS & set(failed[0].symptoms)):
        failed.insert(0, xrayed)
    return tuple(dict.fromkeys(symptom for row in failed for symptom in row.symptoms))
