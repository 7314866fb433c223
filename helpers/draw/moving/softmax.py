"""The moving figure of online_softmax: it reads a paragraph, one tile of keys after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers.attention import check, reference
from helpers.attention.ladder import LADDER
from helpers.device import cp
from helpers.draw.moving.figure import Moving, element, picture, table
from helpers.draw.picture import GPU, WRITE

# The chart below the text: its two bands, and the decades of the lower one, whose top is an error of 1.
LEFT, STEP, HIGH, TOPS, DECADES = 62, 20, 40, (6, 58), 8


def outputs_so_far(head: int) -> list[np.ndarray]:
    """Compute what online_softmax returns after one tile of keys, after two, and so on: (272, 32) float32 each.

    Dividing acc by l_i, as the kernel does at the end, gives the output so far.
    """
    stage = LADDER["online_softmax"]
    q, k, v = check.real_inputs(head)
    block_n = stage.defines(q.shape[-1])["BLOCK_N"]
    ends = [min(end, len(k)) for end in range(block_n, len(k) + block_n, block_n)]
    return [cp.asnumpy(stage(q, k[:end], v[:end], softmax_scale=q.shape[-1] ** -0.5)) for end in ends]


def moving_softmax(head: int = 8, row: int = 209) -> Moving:
    """Show one query's softmax over the words of a paragraph: `m_i`, `l_i`, the rescale factor and the error of acc.

    The error is that of the kernel's own output; NumPy computes the rest.

    Args:
        head: one of the model's 12. row: the query shown first; 16 more can be selected.
    """
    q, k, v = check.real_inputs(head)
    outputs, words = outputs_so_far(head), check.real_tokens()
    block_n = -(-len(k) // len(outputs))
    trace = reference.online_softmax_trace(q, k, v, block_n)
    rows = _rows(words, trace.rescale, row)
    scores = q[rows].astype(np.float64) @ k.T.astype(np.float64) * q.shape[-1] ** -0.5
    exact = reference.attention(q, k, v)[rows]
    error = np.stack([np.abs(output[rows] - exact).mean(axis=1) for output in outputs], axis=1)
    data = {
        "words": words,
        "rows": rows,
        "first": rows.index(row),
        "block_n": block_n,
        "scores": np.rint(100 * scores).astype(int).tolist(),
        "m_i": np.round(trace.m_i[:, rows].T, 2).tolist(),
        "l_i": np.round(trace.l_i[:, rows].T, 2).tolist(),
        "rescale": np.round(trace.rescale[:, rows].T, 3).tolist(),
        "error": [[float(f"{value:.1e}") for value in line] for line in error],
        "x": [LEFT + STEP * tile for tile in range(len(outputs))],
        "top": TOPS,
        "high": HIGH,
        "decades": DECADES,
    }
    text = (
        f"online softmax of row {row}, {words[row]!r}, over {len(words)} words of Darwin in {len(outputs)} tiles of "
        f"{block_n} keys: its maximum rises {np.count_nonzero(np.diff(trace.m_i[:, row]) > 0)} times after the first"
    )
    return Moving("softmax", _frame(data), data, text)


def _rows(words: Sequence[str], rescale: np.ndarray, row: int) -> list[int]:
    """Choose rows: `row`, and in every other tile the word whose factor is most often visibly below 1."""
    tiles = len(rescale)
    block_n = -(-len(words) // tiles)
    rows = []
    for first in range(0, len(words), block_n):
        whole = [
            i
            for i in range(first, min(first + block_n, len(words)))
            if words[i].isalpha() and not words[i + 1].startswith("##")
        ]
        rows.append(
            row if first <= row < first + block_n else max(whole, key=lambda i: int((rescale[1:, i] < 0.97).sum()))
        )
    return rows


def _frame(data: dict[str, Any]) -> str:
    """Draw the first tile of the first row."""
    row, block_n, words = data["first"], data["block_n"], data["words"]
    m_i, l_i, rescale, error = (data[name][row] for name in ("m_i", "l_i", "rescale", "error"))
    numbers = {"m_i": f"{m_i[0]:.2f}", "l_i": f"{l_i[0]:.2f}", "rescale": f"{rescale[0]:g}"}
    numbers["acc / l_i is off by"] = f"{error[0]:g}"
    weights = [math.exp(score / 100 - m_i[0]) for score in data["scores"][row][:block_n]]
    text = ""
    for key, word in enumerate(words):
        whole = word.removeprefix("##")
        if key < block_n:
            blue = 0.7 * math.sqrt(min(weights[key], 1))
            whole = f'<span style="background-color:rgba(0,114,178,{blue:.3f})">{whole}</span>'
        text += ("" if word.startswith("##") else " ") + whole
    text = f'<p class="part words">{text.strip()}</p>'
    tiles = len(data["x"])
    width, height = LEFT + STEP * tiles, TOPS[1] + HIGH
    box = {"x": data["x"][0], "y": 0, "width": STEP - 2, "height": height + 6}
    parts = [element("rect", kind="now", **box, fill=WRITE, opacity=0.2)]
    for top, name in zip(TOPS, ("rescale", "off by"), strict=True):
        parts.append(element("text", name, x=0, y=top + HIGH / 2 + 4))
        axes = f"M{LEFT - 4} {top}V{top + HIGH}H{width}"
        parts.append(element("path", d=axes, stroke="currentColor", fill="none", opacity=0.5))
    lowest = f"10⁻{'⁰¹²³⁴⁵⁶⁷⁸⁹'[DECADES]}"
    for label, y in (("1", TOPS[0] + 6), ("0", TOPS[0] + HIGH), ("1", TOPS[1] + 6), (lowest, height)):
        parts.append(element("text", label, x=LEFT - 8, y=y, text_anchor="end", font_size=9))
    for tile, x in enumerate(data["x"]):
        faint, high = 0.4 if tile else 1, HIGH * rescale[tile]
        box = {"x": x, "y": f"{TOPS[0] + HIGH - high:.1f}", "width": STEP - 2, "height": f"{high:.1f}"}
        parts.append(element("rect", kind="rescale", **box, fill=WRITE, opacity=faint))
        down = min(1, -math.log10(error[tile]) / DECADES)
        dot = {"cx": x + STEP / 2 - 1, "cy": f"{TOPS[1] + HIGH * down:.1f}", "r": 4}
        parts.append(element("circle", kind="error", **dot, fill=GPU, opacity=faint))
    parts.append(element("text", f"tile of {block_n} keys, 1 to {tiles}", x=LEFT, y=height + 18))
    alt = "the rescale factor and the distance from exact, tile after tile"
    return f"{table(numbers)}\n{picture(width + 2, height + 22, parts, alt)}\n{text}"
