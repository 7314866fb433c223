"""Make README's moving picture: online_softmax reads a paragraph of Darwin, one tile of keys after the other.

    python3 -m helpers.bench.studies.moving      rewrites notebooks/measured/online-softmax.gif

Every frame is computed. The output after t tiles is what the kernel returns for the first t tiles of keys: dividing acc
by l_i at the end gives the output so far.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib

from helpers.attention import check, reference
from helpers.draw.moving.softmax import outputs_so_far
from helpers.draw.picture import GPU, WRITE, bytes_text, figure, styled

GIF = Path(__file__).resolve().parents[3] / "notebooks" / "measured" / "online-softmax.gif"
HEAD = 3  # one of the model's 12: most tokens attend to neighbours, and each tile matters to some rows
FRAME_MS, LAST_MS = 550, 3500
HELD, GONE = (0.0, 0.27, 0.55), (0.62, 0.62, 0.62)  # colours of a weight of 1: in this tile, and in earlier ones


@styled
def frames(head: int = HEAD) -> list[Image.Image]:
    """Draw a picture after each tile of keys."""
    q, k, v = check.real_inputs(head)
    n, d = q.shape
    outputs = outputs_so_far(head)
    block_n = -(-n // len(outputs))
    scores = q.astype(np.float64) @ k.T.astype(np.float64) * d**-0.5
    expected = reference.attention(q, k, v)
    errors = [float(np.abs(o - expected).mean()) for o in outputs]
    limit = float(np.quantile(np.abs(expected), 0.99))
    drawn = []
    for t, o in enumerate(outputs):
        first, end = t * block_n, min((t + 1) * block_n, n)
        weights = np.exp(scores[:, :end] - scores[:, :end].max(axis=1, keepdims=True)) ** 0.5  # small ones show too
        shown = np.ones((n, n, 3))
        shown[:, :first] -= weights[:, :first, None] * (1 - np.array(GONE))
        shown[:, first:end] -= weights[:, first:, None] * (1 - np.array(HELD))
        fig, (left, middle, right) = figure(9.6, 3.9, columns=3)
        left.imshow(shown, interpolation="nearest")
        left.axvspan(first - 0.5, end - 0.5, fill=False, edgecolor=WRITE, linewidth=1.5)
        in_tile, all_of_them = bytes_text(4 * n * (end - first)), bytes_text(4 * n * n)
        left.set(title=f"scores: tile {t + 1} of {len(outputs)}", ylabel="query")
        left.set_xlabel(f"key\nscores in use: {in_tile} of {all_of_them}")
        middle.imshow(o, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        middle.set(title="the output so far", xlabel="element of the head\n", yticks=[])
        right.plot(range(1, t + 2), errors[: t + 1], color=GPU, marker="o", markersize=4)
        right.set(xlim=(0.3, len(outputs) + 0.7), ylim=(0, max(errors) * 1.05), xlabel="tiles of keys read\n")
        right.set_title("mean distance from exact")
        if t + 1 == len(outputs):
            right.annotate(
                f"{errors[t]:.0e}", (t + 1, errors[t]), (-8, 4), textcoords="offset points", ha="right", va="bottom"
            )
        drawn.append(_image(fig))
    return drawn


def _image(fig: Figure) -> Image.Image:
    file = io.BytesIO()
    fig.savefig(file, format="png", dpi=100)
    return Image.open(file).convert("RGB")


def gif() -> bytes:
    """Make an animated GIF of the frames in one palette of 192 colours; the last one stays for some seconds."""
    pictures = frames()
    palette = pictures[len(pictures) // 2].quantize(192)
    first, *rest = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures)
    file = io.BytesIO()
    durations = [FRAME_MS] * len(rest) + [LAST_MS]
    first.save(file, "GIF", save_all=True, append_images=rest, duration=durations, loop=0, optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    GIF.write_bytes(gif())
    print(f"{GIF.name}: {GIF.stat().st_size:,} bytes")
