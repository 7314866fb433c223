"""What a wrong answer looks like, by symptom, and the hint for it: the exercise's own, or one that is always true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Hints = Mapping[str, str | Sequence[str]]

# Bits that no arithmetic makes: signalling NaNs, which every operation would quiet. By the bytes of an element.
_PATTERN = {2: 0x7DAD, 4: 0x7FA0DEAD, 8: 0x7FF4DEADDEADDEAD}

# In order: the first, second, ... failing try with this symptom reads the first, second, ... hint.
GENERIC: dict[str, tuple[str, ...]] = {
    "compile": (
        "Begin with the first error; later ones often follow from it. Keep the kernel's name and its parameters.",
        "Is every name declared before its use, and every statement closed by a semicolon?",
    ),
    "return": ("On which path does the function end without a value? The compiler only warns; the result is garbage.",),
    "crash": (
        "The message names the array and the index. Which thread computes this index, and should it be here at all?",
        "Threads without a row or a key of their own must not read or write there: compare with N and N_kv first.",
    ),
    "null": ("The kernel reads through a null pointer. Use the pointers that the kernel gets as its parameters.",),
    "never ends": (
        "The loop at this line never ends. What changes its condition from one turn to the next?",
        "Does the loop's counter grow, and is it compared with the right bound?",
    ),
    "deadlock": (
        "Some threads wait for others that never come. All threads of the block or warp must reach this line.",
        "Is the barrier inside an if, or after a return that some of the threads take?",
    ),
    "nan": (
        "The kernel computed NaN: 0 / 0, inf - inf, inf / inf or 0 * inf. Which of them can occur here?",
        "Is every variable given a value before it is used?",
    ),
    "empty": (
        "Part of the output was never written. Which thread should write this element, and does it get there?",
        "Do the loop or the grid's threads cover all rows and all columns?",
    ),
    "tail": (
        "Right where sizes are whole multiples, wrong where they are not. What happens in the last, incomplete part?",
        "Which rows or keys of the last tile do not exist, and what does the kernel do with them?",
    ),
    "large": (
        "Right for small scores, wrong for large ones. Which exponential overflows, or becomes 0 where it should not?",
        "exp(89) is infinite in float32. Subtract the row's maximum before every exponential.",
    ),
    "overflow": ("The index is wrong where it exceeds 32 bits. In which type is each product computed?",),
    "index": (
        "The values are right, but in other places. Compare the index of the store, or of the load, with the shapes.",
        "Which index is the row and which the column, and how long is a row?",
    ),
    "bounds": (
        "An index is outside its array. The line above names the array, the index and the thread.",
        "For which value of each index is this the largest? Compare it with the array's size.",
    ),
    "finding": ("The line above names what the kernel does there, and which thread. May it do that at all?",),
    "stopped": ("The message says what the launch asked for, or what stopped it, and where.",),
    "race": (
        "One thread reads what another has not written yet, or writes what another still reads: see the two lines.",
        "What makes threads wait for each other between these two lines, in every turn of the loop?",
    ),
    "wait": (
        "Memory is used while an asynchronous copy to it is still in flight. Which copies does the wait wait for?",
        "First the wait, for the thread's own copies, then the barrier, for those of the other threads.",
    ),
    "unset": ("A value is used that nobody has written. Which thread writes it, and does it do so before?",),
    "limit": (
        "The result is right. The limit is missed: see what was counted, and at which line the kernel spends it.",
    ),
    "wrong": (
        "Take the element above and follow its computation by hand: which line gives the first wrong value?",
        "Print that value for this one row from the kernel: if (row == ...) printf(...).",
    ),
}

# What the X-ray calls its findings, as symptoms.
OF_FINDING = {
    "race": "race",
    "same value": "race",
    "out of bounds": "bounds",
    "misaligned": "bounds",
    "uninitialised": "unset",
    "not waited for": "wait",
    "never waited for": "wait",
    "barrier divergence": "deadlock",
    "deadlock": "deadlock",
    "endless loop": "never ends",
    "inactive lane": "deadlock",
}

_OF_THE_RESULT = ("wrong", "tail", "large", "index", "limit", "overflow")  # where the exercise's own "" says more

_tries: Counter[tuple[str, str]] = Counter()  # failing tries of this session, by exercise and symptom


def poison(array: np.ndarray) -> None:
    """Fill an array, a plain NumPy one, with bits that are recognised where they are still there afterwards."""
    size = array.dtype.itemsize
    array.view(f"u{size}" if size in _PATTERN else "u1")[...] = _PATTERN.get(size, 0xAD)


def untouched(array: np.ndarray) -> np.ndarray:
    """Where an array still holds the bits of `poison`."""
    size = array.dtype.itemsize
    if size not in _PATTERN:
        return np.zeros(array.shape, bool)
    return np.ascontiguousarray(array).view(f"u{size}").reshape(array.shape) == _PATTERN[size]


def displaced(got: np.ndarray, expected: np.ndarray, tolerance: float) -> tuple[int, ...] | None:
    """Where the first wrong element's value belongs, if nearly all wrong elements have the value of another place."""
    if got.dtype.kind not in "fV" or expected.size < 4 or got.shape != expected.shape:
        return None
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        wrong = ~((np.abs(got - expected) <= tolerance) | (got == expected))
    if not np.isfinite(expected).all():
        return None
    values, order = np.sort(expected, axis=None), np.argsort(expected, axis=None)
    if not wrong.any() or not (np.isfinite(got).all() and np.isfinite(values).all()) or values[0] == values[-1]:
        return None
    if np.ptp(got[wrong]) <= tolerance:  # all zeros, say: one of the values may be near it by chance
        return None
    low = np.searchsorted(values, got[wrong] - tolerance)
    high = np.searchsorted(values, got[wrong] + tolerance, side="right")
    # Values of places must be telling ones: if every number is near one of them, nothing follows.
    span = values[-1] - values[0]
    if (high > low).mean() < 0.9 or 2 * tolerance * len(values) > 0.2 * span:
        return None
    return tuple(int(i) for i in np.unravel_index(order[low[0]], expected.shape)) if high[0] > low[0] else None


def of_message(message: str) -> tuple[str, ...]:
    """The symptoms of a launch that stopped, from the engine's words."""
    if "its time was up" in message:
        return ("never ends",)
    if "null pointer" in message:
        return ("null", "crash", "bounds")
    if "deadlock" in message or "barrier" in message or "lanes" in message:
        return ("deadlock",)
    if "illegal" in message or "misaligned" in message or "wrote to" in message:
        return ("crash", "bounds")
    return ("stopped", "crash")


def forget() -> None:
    """Hints begin with the first one again."""
    _tries.clear()


def hint(name: str, hints: Hints, symptoms: Sequence[str], *, counts: bool = True) -> str:
    """The hint for a failing try: `Hint 2 of 3: ...`, or "" if there is none.

    Args:
        hints: the exercise's, by symptom; those under "" are for all others.
        symptoms: of this try, the most telling one first.
        counts: this is a try of the learner's, so that the next one with the same symptom reads the next hint.
    """
    symptom = next((s for s in symptoms if s in hints), symptoms[0])
    if symptom in hints:
        found = _several(hints[symptom])
    else:
        generic, own = GENERIC.get(symptom, ()), _several(hints.get("", ()))
        found = (*own, *(() if own else generic)) if symptom in _OF_THE_RESULT else (*generic[:1], *own, *generic[1:])
    if not found:
        return ""
    tries = _tries[name, symptom]
    if counts:
        _tries[name, symptom] += 1
    number = min(tries, len(found) - 1)
    return f"Hint {number + 1} of {len(found)}: {found[number]}"


def _several(hints: Any) -> tuple[str, ...]:
    return (hints,) if isinstance(hints, str) else tuple(hints)
