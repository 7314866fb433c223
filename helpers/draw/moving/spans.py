"""Draw when each part of a block does what, on a timeline with a moving cursor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from helpers.draw.moving.figure import Moving, element, picture, rect
from helpers.draw.spans import COLOURS, Span

WIDTH, LEFT, ROW, LEGEND = 390, 98, 17, 3  # LEGEND: entries per line below the figure
ABSENT = 0.35  # opacity of a row's name where only other timelines have that row

Rows = Mapping[str, Sequence[Span]]


def moving_spans(rows: Rows | Mapping[str, Rows], *, unit: str = "clock", window: int = 6000, first: int = 0) -> Moving:
    """Show rows of spans of `draw.spans` in a sliding window, and what each row does under the cursor.

    Args:
        rows: or several sets of rows by name; a slider chooses one. unit: of the spans' numbers. window: how much is
            seen at a time. first: where the cursor begins.
    """
    are_several = all(isinstance(each, Mapping) for each in rows.values())
    several = cast(Mapping[str, Rows], rows if are_several else {"": rows})
    spans = [span for each in several.values() for row in each.values() for span in row]
    kinds = [kind for kind in COLOURS if any(kind == what for _, _, what in spans)]
    names = list(dict.fromkeys(chain(*sorted(several.values(), key=len, reverse=True))))
    data: dict[str, Any] = {
        "rows": names,
        "choices": [
            {
                "name": name,
                "rows": [
                    [[round(begin), round(end), kinds.index(what)] for begin, end, what in each.get(row, ())]
                    for row in names
                ],
                "last": round(max(end for row in each.values() for _, end, _ in row)),
            }
            for name, each in several.items()
        ],
        "kinds": [[kind, COLOURS[kind]] for kind in kinds],
        "unit": unit,
        "window": window,
        "step": window // 60,
        "first": first,
        "place": [LEFT, WIDTH, ROW],
        "absent": ABSENT,
    }
    last = max(choice["last"] for choice in data["choices"])
    which = f" with {', '.join(several)}" if len(several) > 1 else ""
    text = f"{len(spans)} spans of {', '.join(names)}{which}, along {last:,} {unit}s: {', '.join(kinds)}"
    alt = f"what {', '.join(names)} do around {unit} {first:,}"
    height = ROW * len(names) + 6 + 16 * -(-len(kinds) // LEGEND)
    frame = picture(WIDTH, height, _parts(data), alt) + f'\n<p class="part">{_sentence(data)}</p>'
    return Moving("spans", frame, data, text)


def _sentence(data: dict[str, Any]) -> str:
    """Describe what each row of the first choice does under the cursor, as the script does."""
    doing = []
    choice = data["choices"][0]
    for name, row in zip(data["rows"], choice["rows"], strict=True):
        now = [data["kinds"][kind][0] for begin, end, kind in row if begin <= data["first"] < end]
        doing += [f"{name}: {now[-1]}"] if now else []
    which = f"{choice['name']}, " if len(data["choices"]) > 1 else ""
    return f"{which}at {data['unit']} {data['first']:,}: {'; '.join(doing)}"


def _parts(data: dict[str, Any]) -> Iterator[str]:
    """Cut out the first choice's window around the cursor's first position, which is a third of the way in."""
    begin = data["first"] - data["window"] // 3
    scale = (WIDTH - LEFT) / data["window"]
    bottom = ROW * len(data["rows"])
    rows = data["choices"][0]["rows"]
    for y, (name, row) in enumerate(zip(data["rows"], rows, strict=True)):
        place = {"x": LEFT - 6, "y": ROW * y + 12, "text_anchor": "end", "font_size": 10}
        yield element("text", name, kind="name", opacity=1 if row else ABSENT, **place)
    yield "<g class='spans'>"
    for y, row in enumerate(rows):
        for start, end, kind in row:
            left, right = (min(max((at - begin) * scale, 0), WIDTH - LEFT) for at in (start, end))
            if right > left:
                style = {"fill": data["kinds"][kind][1], "stroke": "currentColor", "stroke_width": 0.3}
                yield rect(f"{LEFT + left:.1f}", ROW * y + 2, f"{right - left:.1f}", ROW - 4, **style)
    yield "</g>"
    yield element("path", d=f"M{LEFT + (WIDTH - LEFT) / 3:.1f} 0V{bottom}", stroke="currentColor", stroke_width=2)
    for i, (kind, colour) in enumerate(data["kinds"]):
        x, y = 4 + i % LEGEND * 128, bottom + 8 + 16 * (i // LEGEND)
        yield rect(x, y, 10, 10, fill=colour, stroke="currentColor", stroke_width=0.5)
        yield element("text", kind, x=x + 15, y=y + 9, font_size=10)
