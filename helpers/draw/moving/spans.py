"""Who does what when, along a time line that moves under a cursor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from helpers.draw.moving.figure import Moving, element, picture
from helpers.draw.spans import COLOURS, Span

WIDTH, LEFT, ROW, LEGEND = 390, 98, 17, 3  # LEGEND: entries in a line below


def moving_spans(
    rows: Mapping[str, Sequence[Span]], *, unit: str = "clock", window: int = 6000, first: int = 0
) -> Moving:
    """Rows of spans, as `draw.spans` makes them: a window that slides along, and what each row does under the cursor.

    Args:
        unit: of the spans' numbers. window: how much is seen at a time. first: where the cursor begins.
    """
    kinds = [kind for kind in COLOURS if any(kind == what for row in rows.values() for _, _, what in row)]
    last = max(end for row in rows.values() for _, end, _ in row)
    data = {
        "rows": {
            name: [[round(begin), round(end), kinds.index(what)] for begin, end, what in row]
            for name, row in rows.items()
        },
        "kinds": [[kind, COLOURS[kind]] for kind in kinds],
        "unit": unit,
        "window": window,
        "last": round(last),
        "step": window // 60,
        "first": first,
        "place": [LEFT, WIDTH, ROW],
    }
    spans = sum(map(len, rows.values()))
    text = f"{spans} spans of {', '.join(rows)}, along {round(last):,} {unit}s: {', '.join(kinds)}"
    alt = f"what {', '.join(rows)} do around {unit} {first:,}"
    height = ROW * len(rows) + 6 + 16 * -(-len(kinds) // LEGEND)
    frame = picture(WIDTH, height, _parts(data), alt) + f'\n<p class="part">{_sentence(data)}</p>'
    return Moving("spans", frame, data, text)


def _sentence(data: dict[str, Any]) -> str:
    """What each row does under the cursor; the script says the same."""
    doing = []
    for name, row in data["rows"].items():
        now = [data["kinds"][kind][0] for begin, end, kind in row if begin <= data["first"] < end]
        doing += [f"{name}: {now[-1]}"] if now else []
    return f"at {data['unit']} {data['first']:,}: {'; '.join(doing)}"


def _parts(data: dict[str, Any]) -> Iterator[str]:
    """The window around the first place of the cursor, a third of which is past."""
    begin = data["first"] - data["window"] // 3
    scale = (WIDTH - LEFT) / data["window"]
    bottom = ROW * len(data["rows"])
    for y, name in enumerate(data["rows"]):
        yield element("text", name, x=LEFT - 6, y=ROW * y + 12, text_anchor="end", font_size=10)
    yield "<g class='spans'>"
    for y, row in enumerate(data["rows"].values()):
        for start, end, kind in row:
            left, right = (min(max((at - begin) * scale, 0), WIDTH - LEFT) for at in (start, end))
            if right > left:
                yield element(
                    "rect",
                    x=f"{LEFT + left:.1f}",
                    y=ROW * y + 2,
                    width=f"{right - left:.1f}",
                    height=ROW - 4,
                    fill=data["kinds"][kind][1],
                    stroke="currentColor",
                    stroke_width=0.3,
                )
    yield "</g>"
    yield element("path", d=f"M{LEFT + (WIDTH - LEFT) / 3:.1f} 0V{bottom}", stroke="currentColor", stroke_width=2)
    for i, (kind, colour) in enumerate(data["kinds"]):
        x, y = 4 + i % LEGEND * 128, bottom + 8 + 16 * (i // LEGEND)
        yield element("rect", x=x, y=y, width=10, height=10, fill=colour, stroke="currentColor", stroke_width=0.5)
        yield element("text", kind, x=x + 15, y=y + 9, font_size=10)
