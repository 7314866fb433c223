"""Text, HTML and pictures for Jupyter in the course's style, and the palette."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from PIL import Image  # comes with matplotlib

# One palette for the whole course (Okabe and Ito's, which colour-blind readers can tell apart).
CPU, GPU, PEER, ROOF = "#E69F00", "#0072B2", "#8C8C8C", "#222222"
READ, WRITE, MOVED, IDLE = "#0072B2", "#D55E00", "#A6D3EE", "#E8E8E8"
LINES = (GPU, WRITE, "#009E73", CPU, "#CC79A7", "#222222")

STYLE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=LINES),
    "font.family": "DejaVu Sans",  # comes with matplotlib: the figures look the same everywhere
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 2,
}


def first_line(text: str) -> str:
    """Make a comment to begin HTML with: JupyterLab shows only the first line of a collapsed output."""
    words = " ".join(text.replace("--", "–").split())
    return f"<!-- {words if len(words) <= 78 else words[:74] + ' ...'} -->\n"


class Text:
    """Markdown for Jupyter."""

    def __init__(self, markdown: str) -> None:
        self.markdown = markdown

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.markdown


class Html:
    """HTML for Jupyter, with plain text for other front ends."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return first_line(self.text) + self.markup

    def __repr__(self) -> str:
        return self.text


class Picture:
    """A matplotlib figure for Jupyter, as PNG.

    figure: the Figure, open to changes until it is displayed. alt: one sentence that says what it shows.
    """

    DPI = 130

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def png(self) -> bytes:
        """Return the picture as a PNG of at most 256 colours: a third of the size, with no visible difference."""
        drawn, file = io.BytesIO(), io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(drawn, format="png", dpi=self.DPI)
        Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        return file.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        width, height = self.figure.get_size_inches()
        return self.png(), {"width": round(width * 96), "height": round(height * 96)}

    def __repr__(self) -> str:
        return f"<picture: {self.alt}>"


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function draw in the course's style (a decorator)."""

    @functools.wraps(draw)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return inside


@styled
def figure(width: float = 7.0, height: float = 3.2, *, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """Make an empty figure in the course's style and its axes (one Axes, or an array of them). Sizes in inches."""
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, fig.subplots(rows, columns)


def bytes_text(size: float) -> str:
    """Format a number of bytes: 1536 -> '1.5 KiB'."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
