"""Tables and listings, as text and as HTML for Jupyter, and pictures of fetches."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import hooks
from .figures import Figures

Row = tuple[str, float, str, str]  # mark, share of all bytes, figures, code
COLUMNS = (("bytes", 13), ("share", 5), ("requests", 10), ("sect/req", 8), ("wave/req", 8))


def first_line(text: str) -> str:
    """Return a comment to begin HTML with: JupyterLab shows only the first line of a collapsed output."""
    words = " ".join(text.replace("--", "–").split())
    return f"<!-- {words if len(words) <= 78 else words[:74] + ' ...'} -->\n"


class Listing(str):
    """A listing of source with figures: text, and HTML in Jupyter."""

    rows: list[Row]

    def __new__(cls, rows: list[Row]) -> Listing:
        listing = super().__new__(cls, "\n".join(f"{figures} {code}".rstrip() for _, _, figures, code in rows))
        listing.rows = rows
        return listing

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        lines = []
        for mark, share, figures, code in self.rows:
            colour = "rgba(213,94,0,0.30)" if mark == "!" else f"rgba(0,114,178,{0.5 * share:.2f})"
            style = f" style='background:{colour}'" if mark == "!" or share >= 0.01 else ""
            lines.append(f"<span{style}>{html.escape(f'{figures} {code}'.rstrip())}</span>")
        style = "white-space:pre;overflow-x:auto;line-height:1.35"
        return f"{first_line('source and what its lines request')}<pre style='{style}'>" + "\n".join(lines) + "</pre>"


def columns(f: Figures, total: int) -> str:
    """Format the requests of a line, or of one of its arrays, under COLUMNS."""
    size = f.read + f.written
    per = [f"{value:.1f}" if value else "" for value in (f.sectors_per_request, f.wavefronts_per_request)]
    values = (f"{size:,}", f"{size / total:.0%}", f"{f.requests:,}", *per)
    return " ".join(f"{value:>{width}}" for value, (_, width) in zip(values, COLUMNS, strict=True))


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as text: the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))] for r in rows]
    return ["  ".join(row).rstrip() for row in aligned]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows for Jupyter, in its theme's colours."""
    body = ""
    for row, tag in zip(rows, ["th"] + ["td"] * len(rows), strict=False):
        body += "<tr>"
        for column, value in enumerate(row):
            align = "right" if column else "left"
            body += f"<{tag} style='padding:2px 10px;text-align:{align}'>{html.escape(value)}</{tag}>"
        body += "</tr>"
    return f"<table>{body}</table>"


def fetch_maps(fetches: Mapping[str, np.ndarray]) -> Any:
    """Draw how often each element was fetched, as images on one scale: {title: `Report.fetches[array]`}."""
    images = {}
    for name, counts in fetches.items():
        low, high = int(counts.min()), int(counts.max())
        times = f"{low:,} times each" if low == high else f"{low:,} to {high:,} times"
        images[f"{name}: {times}"] = np.atleast_2d(counts)
    return hooks.drawings("charts").heatmap(images, xlabel="column", ylabel="row", colour="fetches")


class Table:
    """A table that prints as text and displays as HTML in Jupyter."""

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        self.rows = [tuple(row) for row in rows]

    def __repr__(self) -> str:
        return "\n".join(text_table(self.rows))

    def _repr_html_(self) -> str:
        return first_line(", ".join(self.rows[0]).strip(", ")) + html_table(self.rows)
