"""HTML tables from text tables: JupyterLab would break lines of more than about 100 characters."""

from __future__ import annotations

import html
import itertools
import re

from helpers.draw.picture import Html

_CELL = "padding:2px 10px;white-space:nowrap;text-align:"


def columns_of(lines: list[str]) -> list[tuple[int, int]]:
    """Find the columns of a text table: between two of them, all lines have at least two spaces."""
    width = max(map(len, lines), default=0)
    blank = [all(line[at : at + 1].strip() == "" for line in lines) for at in range(width)] + [True, True]
    places, begin = [], None
    for at in range(width + 1):
        if begin is None and not blank[at]:
            begin = at
        elif begin is not None and all(blank[at : at + 2]):
            places.append((begin, at))
            begin = None
    return places


def split(line: str, columns: list[tuple[int, int]], *, is_head: bool = False) -> list[str]:
    """Split a line into cells. A heading may be wider than its column, and begin or end with it."""
    if not is_head:
        return [line[begin:end].strip() for begin, end in columns]
    begins, ends = [begin for begin, _ in columns], [end for _, end in columns]
    pieces: list[tuple[int, int]] = []
    for group in re.finditer(r"\S+(?: \S+)*", line):
        begin, end = group.span()
        inside = [at for at in ends if begin < at < end and line[at] == " "]
        pieces += itertools.pairwise([begin, *(inside if end in ends and begin not in begins else ()), end])
    cells, free = [""] * len(columns), 0  # the first column without a heading yet
    for number, (begin, end) in enumerate(pieces, 1):
        near = [abs(end - e) if end in ends else abs(begin - b) for b, e in columns]
        allowed = range(free, max(len(columns) - len(pieces) + number, 1)) or [len(columns) - 1]
        column = min(allowed, key=near.__getitem__)
        cells[column] = f"{cells[column]}  {line[begin:end].strip()}".strip()
        free = column + 1
    return cells


def table(text: str) -> Html:
    """Make HTML of a text table with columns two spaces apart; it scrolls if it is too wide.

    A table ends at an empty line, or at a sentence: a line without two consecutive spaces. Its first line is the head.
    """
    parts = []
    lines = [re.sub(r"^( *\d+)  ", r"\1\0\0", line.rstrip()) for line in text.split("\n")]  # a row's number
    for is_row, group in itertools.groupby(lines, lambda line: "  " in line.lstrip()):
        some = list(group)
        parts += [_one(some)] if is_row else [f"<p>{html.escape(line)}</p>" for line in some if line]
    return Html(f"<div style='overflow-x:auto'>{''.join(parts)}</div>", text)


def _one(lines: list[str]) -> str:
    places = columns_of(lines[1:] or lines)
    if any("   " in cell for line in lines[1:] for cell in split(line, places)):  # columns that are merged in one line
        listing = html.escape("\n".join(lines).replace("\0", " "))
        return f"<pre style='white-space:pre;overflow-x:auto'>{listing}</pre>"
    rows = []
    for number, line in enumerate(lines):
        tag = "td" if number else "th"
        cells = [
            f"<{tag} style='{_CELL}{'right' if column else 'left'}'>{html.escape(cell.replace(chr(0), ' '))}</{tag}>"
            for column, cell in enumerate(split(line, places, is_head=not number))
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"
