"""Pieces of kernels, and diffs of two kernels, for Jupyter."""

from __future__ import annotations

import difflib
import html
import re
import textwrap
from collections.abc import Sequence

from helpers.attention.kernel import KERNELS
from helpers.draw.picture import Html, Text

_LISTING = "font-family: monospace; white-space: pre; line-height: 1.35; overflow-x: auto; font-size: 0.9em"


def _lines(file: str) -> list[str]:
    path = KERNELS / file
    if not path.is_file():
        names = ", ".join(sorted(p.relative_to(KERNELS).as_posix() for p in KERNELS.rglob("*.cu*")))
        raise FileNotFoundError(f"no kernel file {file!r}; there are: {names}")
    return path.read_text(encoding="utf-8").splitlines()


def sections(file: str) -> dict[str, tuple[int, int]]:
    """Find the pieces of a kernel file: the first and last line of each, counted from 1, by name.

    "header" is the comment at the top, "sizes" the #defines and static_asserts, or the constants where there are none,
    "signature" the entry's parameter list; that of a further kernel is "signature of NAME", with the comment above it.
    Then every `// ---- name` section of the kernels, and every struct and `__device__` function with the comment above
    it.
    """
    lines = _lines(file)

    def first_match(pattern: str, start: int) -> int:
        """Return the index of the first line from `start` on that matches the pattern; the last line if none does."""
        return next((i for i in range(start, len(lines)) if re.search(pattern, lines[i])), len(lines) - 1)

    def above(i: int) -> int:
        """Return the index of the first line of the comment above a line, or of the line itself without a comment."""
        while i and lines[i - 1].startswith(("//", "template")):
            i -= 1
        return i

    pieces: dict[str, tuple[int, int]] = {}
    comment = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    if comment:
        pieces["header"] = (1, comment)
    entry = next((i for i, line in enumerate(lines) if "__global__" in line), len(lines))
    sizes = [i for i, line in enumerate(lines[:entry]) if re.match(r"#\s*(if|define|endif)|static_assert", line)]
    sizes = sizes or [i for i, line in enumerate(lines[:entry]) if line.startswith("constexpr")]
    if sizes:
        pieces["sizes"] = (
            sizes[0] + 1,
            first_match(r";$" if "static_assert" in lines[sizes[-1]] else "", sizes[-1]) + 1,
        )
    for i, line in enumerate(lines):
        heading = re.match(r"\s*// ---- (.*)", line)
        if heading:
            stop = first_match(r"^\s*// ---- |^}", i + 1)
            while not lines[stop - 1].strip():
                stop -= 1
            pieces[heading[1].strip()] = (i + 1, stop)
        elif "__global__" in line and "signature" not in pieces:
            pieces["signature"] = (i + 1, first_match(r"\{$", i) + 1)
        elif "__global__" in line:
            name = re.search(r"(\w+)\($", line) or re.search(r"(\w+)\(\D", line)
            pieces[f"signature of {name[1] if name else i}"] = (above(i) + 1, first_match(r"\{$", i) + 1)
        elif struct := re.match(r"struct .*?(\w+) \{$", line):
            pieces[struct[1]] = (above(i) + 1, first_match(r"^};", i) + 1)
        elif function := re.match(r"__device__ .*?(\w+)\(", line):
            pieces[function[1]] = (above(i) + 1, first_match(r"^}" if not line.endswith("}") else "", i) + 1)
    return pieces


def _find(file: str, piece: str) -> tuple[int, int]:
    """Return the first and last line of the piece whose name is, or begins with, `piece`."""
    names = sections(file)
    fitting = [name for name in names if name == piece] or [name for name in names if name.startswith(piece)]
    if len(fitting) != 1:
        raise KeyError(f"{file} has {len(fitting)} pieces named {piece!r}...; there are: {' | '.join(names)}")
    return names[fitting[0]]


def code(
    file: str, piece: str | tuple[int, int] | tuple[str, str], *, to: str = "", without: Sequence[str] = ()
) -> Text:
    """Show a piece of a kernel, with its file and lines as caption.

    Args:
        file: in kernels/, such as "01_naive.cu".
        piece: the beginning of a section's name (see `sections`: "header", "sizes", "signature", "prologue", ...), or
            (first, last): line numbers, counted from 1, or words of the two lines. Words are searched from the top, the
            second ones from the first line on.
        to: the last piece, shown with everything in between; if empty, `piece` alone.
        without: words whose lines are left out, ignoring case; the caption says which.

    Raises:
        FileNotFoundError: no such file. KeyError: no such section or words, or several sections that begin so.
        IndexError: no such lines.
    """
    lines = _lines(file)
    if isinstance(piece, str):
        first, last = _find(file, piece)
        last = _find(file, to)[1] if to else last
    elif isinstance(piece[0], str):
        first = _line_with(file, lines, piece[0], 1)
        last = _line_with(file, lines, piece[1], first)
    else:
        first, last = piece
    if not 1 <= first <= last <= len(lines):
        raise IndexError(f"{file} has lines 1 to {len(lines)}; got {first} to {last}")
    kept = [line for line in lines[first - 1 : last] if not any(word.lower() in line.lower() for word in without)]
    body = textwrap.dedent("\n".join(kept))
    left_out = f", without {', '.join(f'`{word}`' for word in without)}" if without else ""
    return Text(f"[{file}](../kernels/{file}), lines {first}–{last}{left_out}:\n\n```c++\n{body}\n```")


def _line_with(file: str, lines: list[str], words: str, start: int) -> int:
    """Return the number of the first line with these words, from line `start` on."""
    for number, line in enumerate(lines[start - 1 :], start):
        if words in line:
            return number
    raise KeyError(f"{file} has no {words!r} from line {start} on")


def about(file: str) -> list[str]:
    """Quote a step's top comment: its name and idea, then "Since step k: ..." if it has that.

    Returns "" for a stage, whose comment is about more than the last step to it.
    """
    if not file.startswith("steps/"):
        return []
    header = "\n".join(line.removeprefix("//").strip() for line in _lines(file)[: sections(file)["header"][1]])
    name, *others = (" ".join(paragraph.split()) for paragraph in header.split("\n\n"))
    name = re.sub(r"^\d+, (.)", lambda match: match[1].upper(), name)  # not "04, step 8" but "Step 8"
    return [name, *(words for words in others if re.match("Since|Unlike", words))]


def diff(file_a: str, file_b: str, *, context: int = 2) -> Html:
    """Show what changed from one kernel to the next, line by line, with `context` unchanged lines around each change.

    Added lines are green with +, removed ones red with -. Comments at the top of the files are left out; a step's own
    description comes before its lines.
    """
    a, b = ([*_lines(f)] for f in (file_a, file_b))
    a, b = a[sections(file_a).get("header", (0, 0))[1] :], b[sections(file_b).get("header", (0, 0))[1] :]
    shown = diff_of("\n".join(a), "\n".join(b), f"{file_a} → {file_b}", context=context)
    return Html(_paragraphs(about(file_b)) + shown.markup, shown.text)


def whole(file: str) -> Html:
    """Show all of a kernel; of a step's top comment, only its name and idea."""
    lines = _lines(file)[sections(file).get("header", (0, 0))[1] :]
    title = f"{file}: {len(lines)} lines"
    listing = f'<div style="{_LISTING}">{html.escape(chr(10).join(lines))}</div>'
    return Html(f"{_paragraphs(about(file))}<p><b>{title}</b></p>{listing}", title)


def _paragraphs(texts: list[str]) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def diff_of(
    text_a: str, text_b: str, title: str, *, context: int = 2, sides: tuple[str, str] = ("gone", "new")
) -> Html:
    """Show the differences between two texts; the title comes before the counts.

    sides: labels for the lines of either text. If the first is not "gone", its lines are blue, not red.
    """
    a, b = text_a.splitlines(), text_b.splitlines()
    of_a = "rgba(248, 81, 73, 0.22)" if sides[0] == "gone" else "rgba(0, 114, 178, 0.18)"
    colours = {"+": "rgba(46, 160, 67, 0.22)", "-": of_a, "@": "rgba(128, 128, 128, 0.15)"}
    rows, added, removed = [], 0, 0
    for line in list(difflib.unified_diff(a, b, lineterm="", n=context))[2:]:
        kind = line[0]
        added, removed = added + (kind == "+"), removed + (kind == "-")
        background = f' style="background: {colours[kind]}"' if kind in colours else ""
        text = "⋯" if kind == "@" else line
        rows.append(f"<div{background}>{html.escape(text) or '&nbsp;'}</div>")
    summary = f"{title}: {added} line{'s' * (added != 1)} {sides[1]}, {removed} {sides[0]}"
    return Html(f'<p><b>{html.escape(summary)}</b></p><div style="{_LISTING}">{"".join(rows)}</div>', summary)


def folded(shown: Html, summary: str = "") -> Html:
    """Fold a text or HTML under a summary, or under its own text if the summary is empty; a click opens it."""
    inside = shown.markup.removeprefix(_paragraphs([summary]))  # do not repeat the summary inside
    return Html(f"<details><summary>{html.escape(summary or shown.text)}</summary>{inside}</details>", shown.text)
