"""The texts of an exercise: its solution, the skeleton in the notebook, and our answer without the markers.

`kernels/exercises/<name>.cu` is a complete, correct kernel with marked holes:

    // BEGIN hole: about 1 line - the index of the score of (row, j)
    // DEFAULT: return (size_t)row * N_kv + j;
    return (size_t)j * N + row;
    // END hole

DEFAULT lines (none, one or more) replace the solution in the skeleton, so that it compiles.
"""

from __future__ import annotations

import re

from helpers.attention import kernel

FOLDER = kernel.KERNELS / "exercises"

_BEGIN = re.compile(r"(\s*)// BEGIN hole: (about \d+ lines?) - (.+)")
_DEFAULT = re.compile(r"\s*// DEFAULT: (.*)")


def number_of(name: str) -> str:
    """Cut the number off the name of a notebook or an exercise: "04b" from "04b_last_fifth.ipynb"."""
    return name.partition("_")[0]


class Solution(str):
    """The text of a solution. Jupyter displays it as code: the whole kernel, without the markers of its holes."""

    name: str

    def __new__(cls, text: str, name: str) -> Solution:
        """Make the text of the exercise `name`."""
        made = super().__new__(cls, text)
        made.name = name
        return made

    def __repr__(self) -> str:
        return ours(self.name)

    def _repr_markdown_(self) -> str:
        return f"```c++\n{self!r}```"


def solution(name: str) -> Solution:
    """Read `kernels/exercises/<name>.cu`.

    Raises:
        FileNotFoundError: there is no such exercise; the message lists the existing ones.
    """
    path = FOLDER / f"{name}.cu"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in FOLDER.glob("*.cu")))
        raise FileNotFoundError(f"no exercise {name!r}; there are: {names}")
    return Solution(path.read_text(encoding="utf-8"), name)


def skeleton(name: str) -> str:
    """Replace each hole of the solution by a TODO comment and the hole's DEFAULT lines.

    Raises:
        ValueError: a hole is not closed, is closed twice, or does not give its length and content.
    """
    return _fill(name, with_answers=False)


def ours(name: str) -> str:
    """Return the solution without the markers of its holes, as a learner could have written it."""
    return _fill(name, with_answers=True)


def cell(name: str) -> str:
    """Write the notebook cell of an exercise: the magic and the skeleton."""
    return f"%%cuda {name}\n{skeleton(name)}".rstrip("\n")


def complete(code: str) -> str:
    """Paste the course's headers into a learner's text; compilers number its lines as in the cell."""
    return kernel.with_headers(code, "cell", first_line=2)  # line 1 of the cell is the magic


def _fill(name: str, *, with_answers: bool) -> str:
    """Replace each hole, with its markers, by its answer or by its TODO and DEFAULT lines."""
    lines: list[str] = []
    indent: str | None = None  # that of the open hole
    for number, line in enumerate(solution(name).splitlines(), start=1):
        begin, default = _BEGIN.fullmatch(line), _DEFAULT.fullmatch(line)
        if indent is None and begin:
            indent = begin[1]
            lines += [] if with_answers else [f"{indent}// TODO, {begin[2]}: {begin[3]}"]
        elif indent is not None and line.strip() == "// END hole":
            indent = None
        elif re.search(r"// (BEGIN|END) hole", line) or (default and indent is None):
            raise ValueError(
                f"{name}.cu, line {number}: {line.strip()!r} is out of place. A hole is "
                "'// BEGIN hole: about 2 lines - what to write', DEFAULT lines, the solution, '// END hole'"
            )
        elif indent is None or (with_answers and not default):
            lines.append(line)
        elif default and not with_answers:
            lines.append(indent + default[1])
    if indent is not None:
        raise ValueError(f"{name}.cu: the last hole has no '// END hole'")
    return "\n".join(lines) + "\n"
