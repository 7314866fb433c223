"""The HTML of a figure that moves, for Jupyter and the site."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

FOLDER = Path(__file__).resolve().parent
# Text and lines in a frame take the colour of the surrounding text, in any theme.
INK = "font-family:sans-serif;font-size:11px;fill:currentColor"


class Moving:
    """A figure that moves where scripts run; elsewhere, in an untrusted notebook, it shows its first frame.

    name: the script is NAME.js. frame: HTML of the first frame, made of plain tags and `picture`; the script finds the
    elements of class "part" in it. data: what the script shows, for JSON. text: a sentence that says what it shows.
    """

    def __init__(self, name: str, frame: str, data: Mapping[str, Any], text: str) -> None:
        self.name, self.frame, self.data, self.text = name, frame, data, text

    def _repr_html_(self) -> str:
        style, shared, own = (_read(name) for name in ("figure.css", "figure.js", f"{self.name}.js"))
        own = own.partition("\n")[2]  # the first line is a comment for readers of the file
        numbers = json.dumps(self.data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
        return (
            f'<style>\n{style}</style>\n<div class="moving" data-moving="{self.name}">\n{self.frame}\n'
            f'<script type="application/json">{numbers}</script>\n</div>\n'
            f"<script>\n(() => {{\n{shared}\n{own}}})();\n</script>\n"
        )

    def __repr__(self) -> str:
        return f"<moving figure: {self.text}>"


def picture(width: int, height: int, parts: Iterable[str], alt: str) -> str:
    """Make an image of an SVG, which untrusted notebooks show too; the script replaces it with the SVG itself."""
    body = "".join(parts)
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' style='background:white;{INK}' "
        f"role='img' aria-label='{html.escape(alt, quote=True)}'>{body}</svg>"
    )
    address = quote(svg.replace('"', "'"), safe=" !$&'()*+,-./:;=?@[]^_`{|}~")
    return f'<img class="part" width="{width}" alt="{html.escape(alt, quote=True)}" src="data:image/svg+xml,{address}">'


def element(tag: str, text: str = "", /, **attributes: Any) -> str:
    """Write an SVG element; `kind` is its class, and `_` stands for `-` in names."""
    names = {name: "class" if name == "kind" else name.rstrip("_").replace("_", "-") for name in attributes}
    written = "".join(f" {names[name]}='{html.escape(str(value))}'" for name, value in attributes.items())
    return f"<{tag}{written}>{html.escape(text)}</{tag}>" if text else f"<{tag}{written}/>"


def rect(x: Any, y: Any, width: Any, height: Any, **attributes: Any) -> str:
    """Write an SVG rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, **attributes)


def table(numbers: Mapping[str, str]) -> str:
    """Write a table of names above their numbers; the script finds the second row."""
    heads = "".join(f"<th>{name}</th>" for name in numbers)
    cells = "".join(f"<td>{value}</td>" for value in numbers.values())
    return f'<table class="part numbers"><tr>{heads}</tr><tr>{cells}</tr></table>'


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
