"""Find the symptoms of a failed trial, the most specific first, and choose a hint for one of them.

A hint is the exercise's own, from the file next to its grader (graders/nNN.txt), or a general one that is always true
(hints.txt).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from helpers.attention.check import CheckResult
from helpers.engine import failures
from helpers.engine.structures import Reason
from helpers.xray import Finding

# Bits that no arithmetic produces: signalling NaNs, which every operation would quiet. By element size in bytes.
_PATTERN = {2: 0x7DAD, 4: 0x7FA0DEAD, 8: 0x7FF4DEADDEADDEAD}

# The symptom for each kind of finding of the X-ray.
OF_FINDING = {
    "race": "race",
    "same value": "race",
    "out of bounds": "bounds",
    "misaligned": "bounds",
    "uninitialised": "unset",
    "not waited for": "wait",
    "never waited for": "wait",
    "barrier divergence": "deadlock",
    "skipped barrier": "deadlock",
    "deadlock": "deadlock",
    "endless loop": "never ends",
    "inactive lane": "deadlock",
    "overtaken wait": "deadlock",
}

_ILLEGAL = ("crash", "bounds")
# A thread that writes past its own arrays overwrites its stack: pointers become wild, or it runs past the stack's end.
_OVERRUN = ("overrun", *_ILLEGAL)
OF_REASON: dict[Reason, tuple[str, ...]] = {
    Reason.EXPIRED: ("never ends",),
    **dict.fromkeys((*failures.DIVERGENCE, *failures.DEADLOCK), ("deadlock",)),
    **dict.fromkeys((Reason.LEFT_BEFORE_GRID_SYNC, Reason.INCOMPLETE_WARP, Reason.WRONG_NAMED_BARRIER), ("deadlock",)),
    Reason.NOT_IN_OWN_MASK: ("mask", "deadlock"),
    **dict.fromkeys((*failures.MISALIGNED, Reason.ILLEGAL_ACCESS), _ILLEGAL),
    Reason.STACK_OVERFLOW: _OVERRUN,
    **dict.fromkeys((Reason.OUTSIDE_TILE, Reason.OUTSIDE_SHARED, Reason.NO_SHARED_POINTER), ("bounds", "crash")),
}
_CUDA_STATUS = {700: _ILLEGAL, 716: _ILLEGAL}  # for an illegal address and a misaligned one

# Names from headers that a GPU's compiler does not include, as its message or the engine's quotes them.
_OF_REFUSAL = {
    "infinity": r"\b(?:INFINITY|HUGE_VALF?|numeric_limits)\b",
    "std": r'(?<!cuda::)\bstd::|namespace "std"',
    "no header": r"\b(?:u?int(?:8|16|32|64)_t|INT_MAX|UINT_MAX|FLT_MAX|FLT_MIN|FLT_EPSILON|M_PI|M_LOG2E|assert)\b",
}

# What the first error means, where its message and the line that it quotes say so, for people who know Python: each
# pattern in the words of g++, clang and NVRTC.
_PYTHON = r"and|as|def|elif|False|in|is|len|None|not|or|pass|print|range|self|then|True"
_OF_FIRST_ERROR = {
    "comment": r"(?:invalid|unrecognized) preprocessing directive|stray .#|empty character constant",
    "python": r"""expected\W+(?:a ")?\(|@|(?:[)\]]|\b(?!(?:float|int|char|half|__half|void)\b)\w+) *\*\* *[\w(]"""
    r"""|\|[^;{}]*=[^;{}]* if (?!\()[^;{}]*\belse\b|\bfor +\w+ +in\b"""
    rf"""|["'‘](?:{_PYTHON})["'’] (?:was not declared|is undefined)|(?:identifier|before) ["'‘](?:{_PYTHON})["'’]""",
    "semicolon": r"""expected .*;\W+(?:before|after|at)|expected a ";\"""",
    "part": r"\|.*\b(?:threadIdx|blockIdx|blockDim|gridDim)\b(?! *\.)",
    "undeclared": r"was not declared|undeclared identifier|is undefined",
    "read only": r"read-only|const-qualified|modifiable lvalue",
    "no value": r"return-statement with a value|should not return a value|return value type does not match",
    "length": r"variable.length|[Ss]ize of .* constant|must have a constant value|not an integral constant",
    "arguments": r"no matching function|no instance of|too (?:few|many) arguments",
    "one index": r"array subscript|pointer-to-object|subscripted value",
    "signature": r"has no kernel",
}

# What a compiler accepts with a warning, or without one, and a kernel with wrong results may not have meant.
_OF_WARNING = {
    "chain": r"comparisons? like|chained comparison",
    "assignment": r"assignment.*(?:as truth value|as a condition)",
    "no effect": r"no effect|result unused|is not used",
}
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_STEP = r"(?:\+\+\w+|\w+\+\+|\w+\s*[-+*/]?=\s*\w+)?"  # of a loop that does nothing else
_EMPTY_BODY = re.compile(rf"^[^#\n]*?\b(?:if\s*{_PARENTHESES}|for\s*\([^;]*;[^;]*;\s*{_STEP}\s*\))\s*;", re.M)
_COMMENT = re.compile(r"//.*|/\*.*?\*/")


class Failure(NamedTuple):
    """A failure: the lines that report it, and its symptoms, the most telling one first."""

    lines: list[str]
    symptoms: tuple[str, ...]


def poison(array: np.ndarray) -> None:
    """Fill a plain NumPy array with bits that identify unwritten elements afterwards."""
    size = array.dtype.itemsize
    array.view(f"u{size}" if size in _PATTERN else "u1")[...] = _PATTERN.get(size, 0xAD)


def untouched(array: np.ndarray) -> np.ndarray:
    """Mark the elements that still hold the bits of `poison`."""
    size = array.dtype.itemsize
    if size not in _PATTERN:
        return np.zeros(array.shape, bool)
    return np.ascontiguousarray(array).view(f"u{size}").reshape(array.shape) == _PATTERN[size]


def displaced(got: np.ndarray, expected: np.ndarray, tolerance: float) -> tuple[int, ...] | None:
    """Return the index where the first wrong value belongs, if nearly all of them belong elsewhere; else None."""
    if got.dtype.kind not in "fV" or expected.size < 4 or got.shape != expected.shape:
        return None
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(got).all() and np.isfinite(expected).all()):
        return None
    wrong = np.abs(got - expected) > tolerance
    values, order = np.sort(expected, axis=None), np.argsort(expected, axis=None)
    if not wrong.any() or values[0] == values[-1]:
        return None
    if np.ptp(got[wrong]) <= tolerance:  # for example all zeros: one expected value may be near it by chance
        return None
    low = np.searchsorted(values, got[wrong] - tolerance)
    high = np.searchsorted(values, got[wrong] + tolerance, side="right")
    # If every number is near some expected value, a match means nothing.
    span = values[-1] - values[0]
    if (high > low).mean() < 0.9 or 2 * tolerance * len(values) > 0.2 * span:
        return None
    return tuple(int(i) for i in np.unravel_index(order[low[0]], expected.shape)) if high[0] > low[0] else None


def _pattern(got: np.ndarray, expected: np.ndarray, tolerance: float) -> tuple[str, str] | None:
    """Describe what all rows of a wrong output have in common, in words and as a symptom; None if unknown."""
    if got.ndim != 2 or min(got.shape) < 4 or got.dtype.kind not in "fV":
        return None
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(got).all() and np.isfinite(expected).all()):
        return None
    wrong = np.abs(got - expected) > tolerance
    varied = np.ptp(expected, axis=1) > 0.1
    if np.ptp(got) > tolerance and varied.any() and (np.ptp(got[varied], axis=1) <= tolerance).all():
        return "all columns of a row have the same value", "flat"
    first = int(wrong.any(axis=0).argmax())
    if first and wrong.any(axis=0)[first:].all():
        which = "column 0 is" if first == 1 else f"columns 0-{first - 1} are"
        return f"{which} right in every row, all others are wrong", "columns"
    squares = (expected**2).sum(axis=1)
    factors = (got * expected).sum(axis=1) / np.where(squares > 0, squares, 1.0)
    is_multiple = np.abs(got - factors[:, None] * expected).max() <= 2 * tolerance
    off = np.abs(factors - 1)[wrong.any(axis=1)].max()
    if is_multiple and off > 1e-3 and np.abs(factors[squares > 0]).min(initial=1.0) > 0.01:
        return "in each row, all columns are wrong by the same factor", "factor"
    return None


def of_result(output: str, at: str, result: CheckResult, got: np.ndarray, expected: np.ndarray) -> Failure:
    """Describe a wrong output by its worst element and row.

    Args:
        output: its name. at: the size. result: the comparison's.
    """
    what, _, rest = result.message.partition(": ")[2].partition("; ")
    heading = f"{output} at {at}" if at else output
    lines = [heading, what, *([rest.partition("; ")[0]] if rest else [])]
    if result.worst is None:  # the shapes differ
        return Failure(lines, ("wrong",))
    unwritten = untouched(got)
    if unwritten.any():
        first = np.unravel_index(int(unwritten.argmax()), got.shape)
        place = ", ".join(f"{name} {i}" for name, i in zip(("row", "column")[: len(first)], first, strict=False))
        count = f"{int(unwritten.sum())} of {got.size}"
        return Failure([heading, f"{count} elements were never written, the first at {place}"], ("empty",))
    if result.nan:
        return Failure(lines, ("nan",))
    place, pattern = displaced(got, expected, result.tolerance), _pattern(got, expected, result.tolerance)
    if place is None or (pattern is not None and pattern[1] == "flat"):
        return Failure([*lines, pattern[0]], (pattern[1], "wrong")) if pattern else Failure(lines, ("wrong",))
    wrong = np.argwhere(np.abs(got.astype(np.float64) - expected) > result.tolerance)[0]
    lines.append(f"element {_index(wrong)} has the value that belongs to {_index(place)}")
    return Failure(lines, ("index", "wrong"))


def of_findings(findings: Sequence[Finding], code: str) -> Failure:
    """Describe an X-ray's findings: the first one with its lines of the cell, and how many others there are."""
    first, more = findings[0], len(findings) - 1
    message = f"{first.kind}: {first.message}"
    for words in (" races with ", ", while "):
        message = message.replace(words, f"\n{words.strip(', ')} ")
    lines = message.split("\n")
    for line in dict.fromkeys((first.line, first.other_line)):
        lines += quoted(code, first.file, line)
    lines += [f"and {more} more finding{'s' * (more > 1)}"] if more else []
    return Failure(lines, tuple(dict.fromkeys(OF_FINDING.get(f.kind, "finding") for f in findings)))


def of_endless_loop(file: str | None, line: int | None, seconds: float, code: str) -> Failure:
    """Describe a launch that was stopped at its time limit: where it was, with the line of the cell."""
    place = f"at {file}:{line}" if file and line else "at an unknown line"
    words = f"stopped after {seconds:g} s: an endless loop, or a wait for something that never happens, {place}"
    return Failure([words, *quoted(code, file, line)], ("never ends",))


def of_refusal(message: str) -> tuple[str, ...]:
    """List the symptoms in a compiler's message, from what it quotes and its lines of the source."""
    if "static __shared__ memory" in message:
        return ("shared memory",)
    lines = message.splitlines()
    places = [number for number, line in enumerate(lines) if "error" in line]
    errors = "\n".join(lines[place] for place in places)
    first = "\n".join(_COMMENT.sub("", line) for line in lines[places[0] : places[0] + 2]) if places else message
    patterns = [(symptom, pattern, errors) for symptom, pattern in _OF_REFUSAL.items()]
    patterns += [(symptom, pattern, first) for symptom, pattern in _OF_FIRST_ERROR.items()]
    return (*(symptom for symptom, pattern, text in patterns if re.search(pattern, text)), "compile")


def of_warnings(message: str, code: str, plain: str) -> Failure | None:
    """Describe what a text with wrong results may not mean: its first empty body, else the compiler's first warning.

    Returns None if there is neither.

    Args:
        message: the compiler's warnings. code: the learner's text. plain: the same without comments.
    """
    if empty := _EMPTY_BODY.search(plain):
        line = plain.count("\n", 0, empty.end()) + 2  # the magic is line 1
        words = f"cell:{line}: warning: a semicolon ends this statement"
        return Failure([words, *quoted(code, "cell", line)], ("empty body",))
    for words in re.findall(r"^cell:\d+: warning: (?!.*(?:signedness|different signs)).*", message, re.M):
        symptoms = tuple(symptom for symptom, pattern in _OF_WARNING.items() if re.search(pattern, words))
        line = int(words.split(":")[1])
        return Failure([re.sub(r" \[-W.*", "", words), *quoted(code, "cell", line)], symptoms)
    return None


def of_error(error: Exception, seconds: float, code: str) -> Failure:
    """Describe a failed launch by the engine's reason or CUDA's status. seconds: the limit for a block."""
    reason = getattr(error, "reason", None)
    if reason == Reason.EXPIRED:
        return of_endless_loop(getattr(error, "file", None), getattr(error, "line", None), seconds, code)
    symptoms = OF_REASON.get(reason) or _CUDA_STATUS.get(getattr(error, "status", None)) or ("stopped", "crash")
    if getattr(error, "is_null", False):
        symptoms = ("null", *_ILLEGAL)
    elif reason == Reason.ILLEGAL_ACCESS and getattr(error, "array", None) is None:  # far from all arrays
        symptoms = _OVERRUN
    return Failure([line.rstrip() for line in str(error).strip().splitlines()], symptoms)


def quoted(code: str, file: str | None, line: int | None) -> list[str]:
    """Quote a line of the cell by its number; the magic is line 1."""
    lines = code.splitlines()
    if file != "cell" or line is None or not 0 <= line - 2 < len(lines):
        return []
    return [f"{line:>6} | {lines[line - 2].rstrip()}"]


def _index(index: Sequence[int]) -> str:
    return f"[{', '.join(map(str, index))}]"


Hints = Mapping[str, Sequence[str]]

OTHERWISE = "otherwise"  # stands for all symptoms without hints of their own


def read(file: Path) -> dict[str, Hints]:
    """Read a file of hints, by exercise and symptom.

    [02_load_tile]
    tail, bounds:
      - the first hint for both symptoms
      - the second one: a hint may take several lines,
        which are indented further
    """
    _, *parts = re.split(r"^\[(.+)\]\n", file.read_text(encoding="utf-8"), flags=re.M)
    hints: dict[str, Hints] = {}
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        of_symptoms: dict[str, Sequence[str]] = {}
        for symptoms, listed in re.findall(r"^(\S.*):\n((?: .+\n)+)", part, re.M):
            texts = [" ".join(text.split()) for text in re.split(r"^  - ", listed, flags=re.M)[1:]]
            of_symptoms.update(dict.fromkeys(symptoms.split(", "), tuple(texts)))
        hints[name] = of_symptoms
    return hints


# In order: the n-th failing try with this symptom reads the n-th hint.
GENERIC = read(Path(__file__).with_suffix(".txt"))["any exercise"]

# No hints about the solution, since nothing has run yet, or its text says something else than its author means.
_OF_THE_TEXT = ("compile", "return", *_OF_REFUSAL, *_OF_FIRST_ERROR, "empty body", *_OF_WARNING)
_SAY_ALL = ("one key", "zero score", "overrun")  # the general hint names the mistake
_OF_THE_RESULT = ("wrong", "tail", "large", "index", "limit", "overflow")  # the exercise's own OTHERWISE says more

# Failed tries of this session, by exercise and symptom, and by the mistake as well.
_tries: Counter[tuple[str, ...]] = Counter()
# By exercise: the last hint for its last failed try, and whether another hint was given.
_last: dict[str, tuple[str, bool]] = {}

_SAME_SLIP = 3  # failures with the same mistake after which the last hint is given unasked


def forget() -> None:
    """Start again with the first hints."""
    _tries.clear()
    _last.clear()


def last(name: str) -> str:
    """Return the last hint for the last failed try of an exercise in this session: it says nearly everything."""
    return _last[name][0] if name in _last else f"{name} has not failed in this session: no hint is due."


def offer(name: str) -> str:
    """Say how to read the last hint if it was held back; otherwise ""."""
    if name not in _last or not _last[name][1]:
        return ""
    return f'The last hint says nearly everything; to read it: exercise.hint("{name}")'


def hint(name: str, hints: Hints, symptoms: Sequence[str], *, slip: str = "", counts: bool = True) -> str:
    """Choose the hint for a failing try: `Hint 2 of 3: ...`, or "".

    The last of several says nearly everything. It is held back until the same mistake has failed three times, or the
    learner asks for it: see `offer`.

    Args:
        hints: the exercise's, by symptom; those under OTHERWISE are for all others.
        symptoms: of this try, the most telling one first.
        slip: distinguishes this failure from others with the same symptom.
        counts: this is a learner's try, so the next one with the same symptom reads the next hint.
    """
    symptom = next((s for s in symptoms if s in hints), symptoms[0])
    if symptom in hints:
        texts = hints[symptom]
    else:
        generic, own = GENERIC.get(symptom, ()), hints.get(OTHERWISE, ())
        own = () if symptom in (*_OF_THE_TEXT, *_SAY_ALL) else own
        texts = (own or generic) if symptom in _OF_THE_RESULT else (*generic[:1], *own, *generic[1:])
    if not texts:
        return ""
    end = len(texts) - 1
    number = min(_tries[name, symptom], end)
    if number == end and _tries[name, symptom, slip] < _SAME_SLIP - 1:
        number = max(end - 1, 0)
    _tries[name, symptom] += counts
    _tries[name, symptom, slip] += counts
    _last[name] = texts[end], number == end - 1
    return f"Hint {number + 1} of {len(texts)}: {texts[number]}"
