"""The site's guess boxes: a notebook's `predict` questions, answered on a page without a kernel."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from typing import Any

# What `predict` prints where it cannot show an input line.
_ASKED = re.compile(
    r"^(.+): write (?:a number(?: of (.+))?|one of (.+)) for the dots after guess=, and run this cell\.$"
)


def with_boxes(output: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replace the questions in a cell's output by boxes, among what else it printed."""
    if output["output_type"] != "stream":
        yield output
        return
    printed: list[str] = []
    for line in "".join(output["text"]).splitlines(keepends=True):
        asked = _ASKED.match(line.strip())
        if not asked:
            printed.append(line)
            continue
        if printed:
            yield {**output, "text": "".join(printed)}
        printed = []
        yield {"output_type": "display_data", "metadata": {}, "data": {"text/html": box(*asked.groups(default=""))}}
    if printed:
        yield {**output, "text": "".join(printed)}


def box(name: str, unit: str = "", choices: str = "") -> str:
    """Write the HTML of an input for a number, or of a button for each choice; static/book.js records the answer.

    Args:
        choices: Python literals, separated by commas; empty for a number.
    """
    said = html.escape(name, quote=True)
    if choices:
        of_all = (html.escape(choice) for choice in ast.literal_eval(f"({choices},)"))
        inside = f"<span>{said}:</span> " + " ".join(f'<button type="button">{choice}</button>' for choice in of_all)
    else:
        line = '<input name="guess" inputmode="decimal" autocomplete="off" size="8" placeholder="your guess">'
        inside = f'<label>{said}: {line} {html.escape(unit)}</label> <button type="submit">note it</button>'
    return f'<form class="guess" data-name="{said}">{inside} <output></output></form>'
