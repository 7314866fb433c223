"""The preview picture for links to the site: the scores of a real head, tile after tile."""

from __future__ import annotations

import io
import textwrap

import numpy as np
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib

from helpers.attention import check
from helpers.draw.picture import WRITE, styled

SIZE = (1200, 630)
HEAD, TILE, AT = 3, 16, 11  # head of the model; keys in a tile; the current tile
USED, GONE = (0.0, 0.27, 0.55), (0.62, 0.62, 0.62)


@styled
def png(title: str, sentence: str) -> bytes:
    """Draw the card, as a PNG file."""
    q, k, _ = check.real_inputs(HEAD)
    scores = q.astype(np.float64) @ k.T.astype(np.float64) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True)) ** 0.35  # the root makes small weights visible
    shown = np.ones((*scores.shape, 3))
    first, end = AT * TILE, (AT + 1) * TILE
    shown[:, :first] -= weights[:, :first, None] * (1 - np.array(GONE))
    shown[:, first:end] -= weights[:, first:end, None] * (1 - np.array(USED))
    fig = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100))
    fig.text(0.05, 0.78, title.replace(", ", ",\n"), fontsize=29, weight="bold", va="top")
    fig.text(0.05, 0.5, textwrap.fill(sentence, 44), fontsize=17, va="top", linespacing=1.5)
    ax = fig.add_axes((0.58, 0.1, 0.38, 0.8))
    ax.imshow(shown, interpolation="nearest")
    ax.axvspan(first - 0.5, end - 0.5, fill=False, edgecolor=WRITE, linewidth=3)
    ax.set(xticks=[], yticks=[])
    file = io.BytesIO()
    fig.savefig(file, format="png", dpi=100)
    small = io.BytesIO()
    Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()
