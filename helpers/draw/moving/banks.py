"""A warp's request for shared memory: an address pattern, the banks that it goes to, and its wavefronts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from helpers.draw.moving.figure import Moving, element, picture, rect
from helpers.draw.picture import GPU, MOVED, WRITE
from helpers.engine.banks import BANKS, phases, wavefronts, wavefronts_of_request

LANES = range(32)
PITCH = 64  # words from a row to the next, without padding
# Which row of the tile each lane reads, and which word of it: {name: (row, its formula, column, its formula)}.
READS = {
    "a row each": (lambda lane: lane, "lane", lambda lane: 0, ""),
    "8 rows in turn": (lambda lane: lane % 8, "lane % 8", lambda lane: 0, ""),
    "8 rows in squares": (lambda lane: lane // 4 % 4 * 2 + lane % 2, "lane / 4 % 4 * 2 + lane % 2", lambda lane: 0, ""),
    "4 lanes a row": (lambda lane: lane // 4, "lane / 4", lambda lane: lane % 4, "lane % 4"),
}
WIDTHS = {"float": 1, "float4": 4}
LAYOUTS = {
    "64 words": PITCH,
    "padded: 65": PITCH + 1,
    "padded: 66": PITCH + 2,
    "padded: 68": PITCH + 4,
    "swizzled": 0,
}
CELL, ROW, LEFT, TOP = 11, 8, 34, 20  # pixels
BOTTOM = TOP + ROW * len(LANES)


def moving_banks(
    reads: Sequence[str] = tuple(READS),
    widths: Sequence[str] = tuple(WIDTHS),
    layouts: Sequence[str] = ("64 words", "padded: 65", "padded: 68", "swizzled"),
) -> Moving:
    """Show a shared-memory request with selectable lanes, width and layout, and step through its wavefronts.

    Args:
        reads, widths, layouts: the choices, by the names of READS, WIDTHS and LAYOUTS.
    """
    patterns = [_pattern(*names) for names in product(reads, widths, layouts)]
    choices = (("lanes read", reads), ("each a", widths), ("rows are", layouts))
    data = {
        "choices": [[label, list(names)] for label, names in choices if len(names) > 1],
        "patterns": patterns,
        "place": [LEFT, TOP, CELL, ROW],
        "colours": [WRITE, MOVED, GPU],
    }
    counts = [pattern["wavefronts"] for pattern in patterns if pattern["wavefronts"]]
    text = (
        f"the banks and wavefronts of a warp's request, for {len(patterns)} address patterns: {min(counts)} to "
        f"{max(counts)} wavefronts; the first, {patterns[0]['code']}, takes {patterns[0]['wavefronts']}"
    )
    return Moving("banks", _frame(patterns[0]), data, text)


def _pattern(read: str, width: str, layout: str) -> dict[str, Any]:
    """Describe a pattern: its address, the first word of each lane, and the wavefront that delivers each word.

    The rule gives the number of wavefronts. The order of a bank's words is our choice: the lanes' order.
    """
    row_of, row_text, column_of, column_text = READS[read]
    size = WIDTHS[width]
    if LAYOUTS[layout] >= PITCH and LAYOUTS[layout] % size:
        return {"code": f"a {width} begins at a multiple of {4 * size} bytes: not so here", "wavefronts": 0}
    if LAYOUTS[layout]:
        words = [LAYOUTS[layout] * row_of(lane) + size * column_of(lane) for lane in LANES]
        code = f"{LAYOUTS[layout]} * " + (row_text if row_text == "lane" else f"({row_text})")
        code += f" + {'4 * ' * (size > 1)}({column_text})" if column_text else ""
    else:  # a chunk of the row, XORed with the row's number
        chunks = 8 if size > 1 else BANKS
        words = [PITCH * row_of(lane) + size * (column_of(lane) ^ row_of(lane) % chunks) for lane in LANES]
        code = f"{PITCH} * row + {'4 * ' * (size > 1)}({column_text or 'c'} ^ row % {chunks}), row = {row_text}"
    offsets = {lane: 4 * word for lane, word in enumerate(words)}
    turns: list[int] = []
    done = 0
    for requested in phases(4 * size, offsets).values():
        turns += [done + turn for turn in _turns(requested)]
        done += wavefronts(requested)
    assert done == wavefronts_of_request(4 * size, offsets)
    return {"code": code, "words": words, "turns": turns, "wavefronts": done}


def _turns(words: Sequence[int]) -> list[int]:
    """Count, for each word requested, the words that its bank delivers before it in the same request."""
    of_bank: dict[int, list[int]] = {}
    for word in words:
        mine = of_bank.setdefault(word % BANKS, [])
        if word not in mine:
            mine.append(word)
    return [of_bank[word % BANKS].index(word) for word in words]


def _frame(pattern: dict[str, Any]) -> str:
    """Draw the first wavefront of a pattern."""
    parts = [rect(LEFT, TOP, CELL * BANKS, ROW * len(LANES), fill="currentColor", opacity=0.06)]
    marked = (*range(0, 32, 4), 31)
    for bank in marked:
        parts.append(element("text", str(bank), x=LEFT + CELL * bank + 5, y=TOP - 5, text_anchor="middle", font_size=9))
    for lane in marked:
        parts.append(element("text", str(lane), x=LEFT - 5, y=TOP + ROW * lane + 8, text_anchor="end", font_size=9))
    parts.append(element("text", "bank", x=0, y=TOP - 5, font_size=9))
    parts.append(element("text", "lane", x=0, y=TOP + ROW * 3, font_size=9))
    parts.append("<g class='cells'>")
    each = len(pattern["turns"]) // len(LANES)
    for lane, i in product(LANES, range(each)):
        x = LEFT + CELL * ((pattern["words"][lane] + i) % BANKS)
        colour = MOVED if pattern["turns"][each * lane + i] else WRITE
        parts.append(rect(x, TOP + ROW * lane, CELL - 1, ROW - 1, fill=colour))
    parts.append("</g>")
    alt = f"the banks that 32 lanes request; orange: served in the first of {pattern['wavefronts']} wavefronts"
    caption = f'<p class="part">word <code>{pattern["code"]}</code>: <b>{pattern["wavefronts"]} wavefronts</b></p>'
    key = ((WRITE, "in this wavefront"), (GPU, "delivered before"), (MOVED, "still to come"))
    for i, (colour, words) in enumerate(key):
        parts.append(rect(LEFT + 118 * i, BOTTOM + 8, 10, 8, fill=colour))
        parts.append(element("text", words, x=LEFT + 118 * i + 14, y=BOTTOM + 16, font_size=10))
    return caption + "\n" + picture(LEFT + CELL * BANKS + 2, BOTTOM + 20, parts, alt)
