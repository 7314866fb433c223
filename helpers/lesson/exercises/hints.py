"""The hint for a symptom: the exercise's own, or one that is always true. What makes a symptom is in symptoms.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Hints = Mapping[str, str | Sequence[str]]

# In order: the first, second, ... failing try with this symptom reads the first, second, ... hint.
GENERIC: dict[str, tuple[str, ...]] = {
    "compile": (
        "Begin with the first error; later ones often follow from it. Keep the kernel's name and its parameters.",
        "Is every name declared before its use, and spelt as there? Does every statement end with a semicolon?",
        "The line is where the compiler noticed it: a missing semicolon or bracket is often in the line before.",
    ),
    "return": ("On which path does the function end without a value? The compiler only warns; the result is garbage.",),
    "infinity": (
        "A GPU's compiler includes no header by itself, so it has no INFINITY. Minus infinity is NEG_INF where the "
        "kernel defines it, or __int_as_float(0xff800000).",
    ),
    "std": (
        "A GPU's compiler includes no header by itself, so it has no std::max and the like. Use fmaxf and fminf for "
        "floats, max and min for ints, expf and fabsf.",
    ),
    "no header": (
        "A GPU's compiler includes no header by itself. Use what needs none: unsigned, long long, a number written "
        "out, fmaxf, expf.",
    ),
    "shared memory": (
        "The arrays in shared memory are too long for one block: see the message. How many elements does each of them "
        "need?",
    ),
    "crash": (
        "The message names the array, the index and the thread. Is the index the right one for this thread, by the "
        "array's shape, or is it a thread that should not be here?",
        "Threads without a row or a key of their own must not read or write there: compare with N and N_kv first.",
    ),
    "overrun": (
        "No array that the kernel was given is near. Has a loop gone past the end of one of the thread's own arrays, "
        "such as acc, and written over other variables? Compare its last index with the array's size.",
        "Is every pointer and every index given a value before it is used?",
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
    "mask": (
        "The mask names the lanes that call this together, a bit for each; a lane calls it whose bit is not set.",
        "Where all 32 lanes of the warp call it, the mask is 0xffffffff.",
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
    "width": (
        "Right for one HEAD_DIM, wrong for another. Which number or constant stands in your lines where HEAD_DIM "
        "belongs?",
    ),
    "columns": ("The first columns are right in every row, the later ones are not. Which loop ends too early?",),
    "flat": ("All columns of a row have the same value. Which index chooses the column, and does it change?",),
    "factor": (
        "In each row, all columns are wrong by the same factor. So the sums are right, and what the row is multiplied "
        "or divided by is not.",
    ),
    "zero score": (
        "Only one row is wrong: it is all zeros in Q, so its scores are 0. What takes a score of 0 for a key that is "
        "not there?",
        "A score of 0 counts like any other. Whether a key exists, its number says, not its score.",
    ),
    "one key": (
        "A row that sees one key has l_i = 1 and gives that key all the weight: its output is that row of V, to the "
        "last bit. What is acc multiplied or divided by there, and is something added to it?",
        "A small number that is added to avoid a division by 0 makes every row a little wrong. Ask whether l_i is 0.",
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

_OF_THE_TEXT = ("compile", "return", "infinity", "std", "no header")  # no hint of the solution: nothing has run yet
_SAY_ALL = ("one key", "zero score", "overrun")  # whose general hints name the slip
_OF_THE_RESULT = ("wrong", "tail", "large", "index", "limit", "overflow")  # where the exercise's own "" says more

# Failing tries of this session, by exercise and symptom, and by the slip as well.
_tries: Counter[tuple[str, ...]] = Counter()
# By exercise: the last hint for the last failing try, and whether that try was told another one.
_last: dict[str, tuple[str, bool]] = {}

_SAME_SLIP = 3  # failures with the same slip: from then on its last hint is given without being asked for


def forget() -> None:
    """Hints begin with the first one again."""
    _tries.clear()
    _last.clear()


def last(name: str) -> str:
    """The last hint for the last failing try of an exercise in this session: the one that says nearly everything."""
    return _last[name][0] if name in _last else f"{name} has not failed in this session: no hint is due."


def offer(name: str) -> str:
    """How to read the last hint, where it was held back; "" where it was not."""
    if name not in _last or not _last[name][1]:
        return ""
    return f'The last hint says nearly everything; to read it: exercise.hint("{name}")'


def hint(name: str, hints: Hints, symptoms: Sequence[str], *, slip: str = "", counts: bool = True) -> str:
    """The hint for a failing try: `Hint 2 of 3: ...`, or "" if there is none.

    The last one of several says nearly everything. It is held back until the same slip has failed three times, or
    until it is asked for: see `offer`.

    Args:
        hints: the exercise's, by symptom; those under "" are for all others.
        symptoms: of this try, the most telling one first.
        slip: what tells this failure from others with the same symptom.
        counts: this is a try of the learner's, so that the next one with the same symptom reads the next hint.
    """
    symptom = next((s for s in symptoms if s in hints), symptoms[0])
    if symptom in hints:
        texts = _several(hints[symptom])
    else:
        generic, own = GENERIC.get(symptom, ()), _several(hints.get("", ()))
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


def _several(hints: str | Sequence[str]) -> tuple[str, ...]:
    return (hints,) if isinstance(hints, str) else tuple(hints)
