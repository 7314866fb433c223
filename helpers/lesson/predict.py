"""Predictions: the learner writes a number down before it is computed, and compares afterwards.

    from helpers.lesson.predict import board, predict

    gib = predict("S at N = 131,072", unit="GiB", guess=...)          # the learner writes a number for the dots
    ...
    gib.answer(4 * N * N / 2**30, because="4 bytes for each of N * N scores")     # in a cell that ships collapsed
    board()                                                           # at the end of a notebook: all of its guesses

In JupyterLab, where ipywidgets is installed, `predict` also shows a box to type the guess into, and `answer` asks once
for a missing guess, in place of all that its cell shows. Nothing ever waits for a guess: run again, or elsewhere,
`answer` prints what was computed. In JupyterLab guesses are saved with the solved exercises
(`exercises/progress.py`), for restarted kernels.
"""

from __future__ import annotations

import ast
import contextlib
import html
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

from helpers.engine import first_build
from helpers.lesson import first_cell
from helpers.lesson.exercises import progress

Guess = float | int | str

NEAR = 0.1  # a guess within 10 % is right


class Prediction:
    """One question. name: as on the board. guess, value: None until guessed, answered."""

    def __init__(self, name: str, unit: str, choices: Sequence[str]) -> None:
        self.name, self.unit, self.choices = name, unit, tuple(choices)
        self.guess: Guess | None = None
        self.value: Guess | None = None

    def take(self, guess: Guess) -> None:
        """Set the guess.

        Raises:
            TypeError: it is not a number or, with choices, not a text. ValueError: it is none of the choices.
        """
        number = isinstance(guess, int | float) and not isinstance(guess, bool)
        if not (isinstance(guess, str) if self.choices else number):
            raise TypeError(f"guess is {guess!r}: expected {self.wanted()}")
        if guess not in self.choices if self.choices else not math.isfinite(guess):
            raise ValueError(f"guess is {guess!r}: expected {self.wanted()}")
        self.guess = guess
        self._keep()

    def _keep(self) -> None:
        if self.guess is not None and first_build.in_jupyterlab():
            progress.note_guess(_notebook(), self.name, {"guess": self.guess, "unit": self.unit, "value": self.value})

    def wanted(self) -> str:
        """Describe what kind of guess is expected."""
        if self.choices:
            return f"one of {', '.join(map(repr, self.choices))}"
        return f"a number of {self.unit}" if self.unit else "a number"

    def answer(self, value: Any, *, because: str = "", slips: Mapping[Any, str] | None = None) -> None:
        """Print what was computed, how far off the guess was, and why.

        Args:
            value: a number, or one of the choices. because: one sentence that derives the answer.
            slips: likely wrong guesses, and what each of them forgets.
        """
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"the answer {value!r} is not one of the choices {self.choices}")
        else:
            value = value if isinstance(value, int) else float(value)  # also for NumPy's numbers
        if self.guess is None and self.value is None and first_build.in_jupyterlab():
            self.value = value
            # The cell computes the answer before it calls this, and often prints or draws it.
            first_cell.show_instead(f"{self.name}: first make a guess, in the cell above; any is better than none.")
            first_cell.show_instead("Then run this cell again: with a guess or without, it shows the answer.")
            return
        self.value = value
        self._keep()
        print(f"{self.name}: {self.text(value)}. {self.verdict()}")
        slip = None if self.right() else next((why for wrong, why in (slips or {}).items() if self._same(wrong)), None)
        for sentence in (slip, because):
            if sentence:
                print(sentence)

    def right(self) -> bool:
        """Check that the guess is the answer: the same choice, or a number within 10 %."""
        return self.guess is not None and self.value is not None and self._same(self.value)

    def verdict(self) -> str:
        """Say in a few words how far the guess is from the answer."""
        if self.guess is None or self.value is None:
            return "No guess yet."
        if self.right():
            return f"Your guess, {self.text(self.guess)}, is right."
        off = f"Your guess: {self.text(self.guess)}"
        if self.choices:
            return f"{off}."
        if self.guess * self.value <= 0:
            return f"{off}, {self.text(abs(self.guess - self.value))} away."
        ratio = self.guess / self.value
        return f"{off}, {ratio:.3g}× too much." if ratio > 1 else f"{off}, {1 / ratio:.3g}× too little."

    def mark(self) -> str:
        """Return the verdict for a column of the board."""
        if self.guess is None or self.right():
            return "" if self.guess is None else "right"
        return "" if self.choices else self.verdict().rpartition(", ")[2].rstrip(".")

    def text(self, value: Guess) -> str:
        """Format a value: at most three significant digits, thousands with commas, and the unit."""
        if isinstance(value, str):
            return value
        if float(value).is_integer() and abs(value) < 1e15:
            number = f"{int(value):,}"
        else:
            number = f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"
        return f"{number} {self.unit}".rstrip()

    def _same(self, value: Any) -> bool:
        if self.choices or isinstance(value, str):
            return self.guess == value
        if not isinstance(self.guess, int | float):
            return False
        return abs(self.guess - value) <= NEAR * abs(value)


_asked: dict[str, Prediction] = {}  # those of this notebook, in order


def predict(name: str, *, unit: str = "", guess: Guess | EllipsisType = ..., choices: Sequence[str] = ()) -> Prediction:
    """Ask for a guess.

    Args:
        name: what is predicted, in a few words; its name on the board. unit: what the number counts, such as "GiB".
        guess: the learner's, `...` before one is made. choices: the possible answers, if they are not numbers.

    Raises:
        TypeError, ValueError: the guess is not a number, or none of the choices.
    """
    earlier = _asked.get(name)
    asked = Prediction(name, unit, choices)
    if guess is not ...:
        asked.take(guess)
        print(f"{name}: your guess is {asked.text(guess)}. Run the next cells to see the answer.")
    else:
        if earlier is not None and (earlier.unit, earlier.choices) == (asked.unit, asked.choices):
            asked.guess = earlier.guess  # the cell was rerun
        elif earlier is None:
            asked.guess = _kept_guess(asked)
        if not _shown_line(asked):
            print(f"{name}: write {asked.wanted()} for the dots after guess=, and run this cell.")
    _asked[name] = asked
    return asked


def _notebook() -> str:
    """Return the number of this kernel's notebook, such as "07", from Jupyter's server; else ""."""
    return os.path.basename(os.environ.get("JPY_SESSION_NAME", "")).partition("_")[0]


def _kept_guess(asked: Prediction) -> Guess | None:
    """Return an earlier kernel's guess if it answers the question."""
    if not first_build.in_jupyterlab():
        return None
    kept = progress.guesses(_notebook()).get(asked.name, {})
    known = Prediction(asked.name, asked.unit, asked.choices)
    with contextlib.suppress(TypeError, ValueError):
        if "guess" in kept and kept.get("unit") == asked.unit:
            known.take(kept["guess"])
    return known.guess


def _earlier() -> list[Prediction]:
    """List earlier kernels' answered guesses that have not been asked again in this one."""
    earlier = []
    for name, kept in progress.guesses(_notebook()).items() if first_build.in_jupyterlab() else ():
        guess, value = kept.get("guess"), kept.get("value")
        alike = isinstance(guess, str) == isinstance(value, str)
        if name not in _asked and alike and isinstance(guess, int | float | str) and value is not None:
            one = Prediction(name, str(kept.get("unit", "")), (guess, str(value)) if isinstance(guess, str) else ())
            one.guess, one.value = guess, value
            earlier.append(one)
    return earlier


class Board:
    """A table of a notebook's guesses and answers."""

    def __init__(self, asked: Sequence[Prediction]) -> None:
        self.asked = [one for one in asked if one.value is not None]

    def _repr_markdown_(self) -> str:
        rows = ["| prediction | your guess | answer | |", "|---|---|---|---|"]
        for one in self.asked:
            guess = "–" if one.guess is None else one.text(one.guess)
            rows.append(f"| {one.name} | {guess} | {one.text(one.value or 0)} | {one.mark()} |")
        return "\n".join([*rows, "", str(self)])

    def __repr__(self) -> str:
        if not self.asked:
            return "No guess has an answer yet: run the cells that ask, and the folded ones below them."
        guessed = [one for one in self.asked if one.guess is not None]
        right = sum(one.right() for one in guessed)
        return f"{right} right of {len(guessed)} guesses; {len(self.asked)} predictions."


def board() -> Board:
    """Show all predictions answered so far in this notebook, those before a kernel restart first."""
    return Board([*_earlier(), *_asked.values()])


# ---- the input line, in front ends with widgets


def _shown_line(asked: Prediction) -> bool:
    """Display an input line for the guess: the question, a box, and how it was read. Returns whether it was shown."""
    if not first_build.in_jupyterlab():
        return False
    try:
        import ipywidgets
    except ImportError:
        return False
    label = ipywidgets.HTML(f"<b>{html.escape(asked.name)}</b>{f' ({html.escape(asked.unit)})' if asked.unit else ''}")
    if asked.choices:
        value = asked.guess if asked.guess in asked.choices else None
        line = ipywidgets.ToggleButtons(options=asked.choices, value=value, style={"button_width": "auto"})
    else:
        value = "" if asked.guess is None else str(asked.guess).removesuffix(".0")
        wide = ipywidgets.Layout(width="10em")
        line = ipywidgets.Text(value=value, placeholder="your guess", continuous_update=False, layout=wide)
    note = ipywidgets.Label("" if asked.guess is None else f"noted: {asked.text(asked.guess)}")

    def typed(change: Mapping[str, Any]) -> None:
        new = change["new"]
        if new in ("", None):
            asked.guess, note.value = None, ""
            return
        try:
            asked.take(new if asked.choices else number(str(new), asked.unit))
            note.value = f"noted: {asked.text(asked.guess or 0)}"
        except (TypeError, ValueError) as error:
            note.value = str(error)

    line.observe(typed, names="value")
    # Only the course's own extension of JupyterLab shows and handles this: it runs the cell below.
    button = ipywidgets.Button(description="show the answer", layout=ipywidgets.Layout(display="none"))
    button.add_class("course-show-answer")
    sys.modules["IPython.display"].display(ipywidgets.VBox([label, ipywidgets.HBox([line, note, button])]))
    return True


def number(text: str, unit: str = "") -> float:
    """Read a number as people type it: 16, 1,024, 0,135, 1e9, 3×, 13.5 %, 1/7, 2^20, exp(-2), e^-2, 16 GiB.

    unit: that of the answer; it may follow the number. If it is %, 25 % is 25, else 0.25.

    Raises:
        ValueError: it is not a number; the message says what to type.
    """
    plain = text.strip().replace("_", "").replace("−", "-")
    percent = plain.endswith("%") and not unit.startswith("%")
    for ending in (unit, "%", "×", "x"):
        plain = plain.removesuffix(ending).rstrip() if ending else plain
    plain = re.sub(r"(?<=\d) +(?=\d{3}(?!\d))", "", plain)  # 1 024
    if comma := re.search(r"[\d,.]*,[\d,.]*", plain):
        plain = plain.replace(comma[0], _with_a_comma(comma[0]))
    try:
        value = _value(ast.parse(plain.replace("^", "**").replace("×", "*"), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError):
        raise ValueError("a number, please, such as 0.135, 1/7, 2^20 or exp(-2)") from None
    return value / 100 if percent else value


def _with_a_comma(text: str) -> str:
    """Parse a comma: 1,024 is 1024, while 0,135 and 3,5 have a decimal comma.

    Raises:
        ValueError: it may be either, or neither.
    """
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        return text.replace(",", "")
    if re.fullmatch(r"0,\d+|\d+,\d{1,2}", text):
        return text.replace(",", ".")
    raise ValueError("a comma must be followed by three digits, as in 1,024; write a decimal with a point, as in 3.5")


_NAMES = {"e": math.e, "pi": math.pi, "π": math.pi}
_CALLS: dict[str, Callable[[float], float]] = {"exp": math.exp, "sqrt": math.sqrt, "log2": math.log2}
_CALLS |= {"log": math.log, "ln": math.log}
_DOES: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,  # for floats, so that too large a power is an error and never takes long
}


def _value(node: ast.expr) -> float:
    """Evaluate arithmetic on numbers; only the names above are known.

    Raises:
        ValueError: it is something else. ArithmeticError: it has no finite value.
    """
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _DOES:
            return _DOES[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _CALLS:
            return _CALLS[name](_value(argument))
    raise ValueError("not a number")


first_cell.watch()  # every notebook imports this module in its first cell
