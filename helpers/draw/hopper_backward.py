"""Pictures of hopper_backward: how the operands of five products are stored, a block's memory, what waits for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.patches import Patch, Rectangle

from helpers.draw.picture import CPU, GPU, IDLE, LINES, MOVED, PEER, ROOF, WRITE, Picture, figure, styled

TILES = {"K": GPU, "Q": CPU, "V": LINES[2], "dO": LINES[4], "P": PEER, "S": PEER, "dS": WRITE, "dP": WRITE}


class Operand(NamedTuple):
    """A matrix as an operand of a product.

    along: which of its lines are contiguous in shared memory, "rows" or "columns"; "" for one in registers. A
    transposed tile has the name of the tile and an ᵀ.
    """

    name: str
    shape: tuple[int, int]
    along: str = ""


def major(operand: Operand, *, left: bool) -> str:
    """Return PTX's word for an operand's layout: K-major if the dimension that is summed over is contiguous."""
    if not operand.along:
        return "registers"
    return "K-major" if (operand.along == "rows") == left else "MN-major"


@styled
def products(rows: Sequence[tuple[Operand, Operand, Operand]]) -> Picture:
    """Draw products of a warpgroup to scale, (result, left operand, right operand) each, with a colour for each tile.

    Lines show the direction in which an operand in shared memory is contiguous; operands in registers have dashed
    edges.
    """
    across = 2
    fig, panels = figure(9.4, 1.75 * -(-len(rows) // across), rows=-(-len(rows) // across), columns=across)
    unit = 1 / 64
    words = []
    for ax, (result, a, b) in zip(panels.flat, rows, strict=False):
        x, high = 0.0, max(shape[0] for _, shape, _ in (result, a, b)) * unit
        for part, (operand, sign) in enumerate(((result, ""), (a, "="), (b, "·"))):
            height, width = (size * unit for size in operand.shape)
            x += 0.34 if sign else 0.0
            ax.text(x - 0.17, high / 2, sign, ha="center", va="center", fontsize=12)
            label = major(operand, left=part == 1) if part else ""
            _tile(ax, (x, (high - height) / 2), (width, height), operand)
            ax.text(x + width / 2, (high + height) / 2 + 0.05, label, ha="center", va="top", fontsize=8)
            x += width
        ax.set(xlim=(-0.05, 5.75), ylim=(2.32, -0.05), aspect="equal", xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        words.append(f"{result.name} = {a.name} ({major(a, left=True)}) times {b.name} ({major(b, left=False)})")
    for ax in list(panels.flat)[len(rows) :]:
        ax.set_axis_off()
        handles = [
            Rectangle((0, 0), 1, 1, facecolor=IDLE, edgecolor=ROOF, label="in shared memory; lines: contiguous"),
            Rectangle((0, 0), 1, 1, facecolor="white", edgecolor=ROOF, linestyle="--", label="in registers"),
        ]
        ax.legend(handles=handles, loc="center", fontsize=9)
    return Picture(fig, f"products: {'; '.join(words)}")


def _tile(ax: Any, at: tuple[float, float], size: tuple[float, float], operand: Operand) -> None:
    (x, y), (width, height) = at, size
    colour = TILES.get(operand.name.rstrip("ᵀ"))
    style = {"edgecolor": colour or ROOF, "linewidth": 1.4, "linestyle": "-" if operand.along else "--"}
    ax.add_patch(Rectangle(at, width, height, facecolor=colour or "white", alpha=0.25 if colour else 1, lw=0))
    ax.add_patch(Rectangle(at, width, height, fill=False, **style))
    for i in range(1, 8):
        line = {"color": colour, "lw": 0.9, "alpha": 0.75}
        if operand.along == "rows":
            ax.plot((x, x + width), (y + height * i / 8,) * 2, **line)
        elif operand.along == "columns":
            ax.plot((x + width * i / 8,) * 2, (y, y + height), **line)
    rows, columns = operand.shape
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
    text = f"{operand.name}\n{rows} × {columns}"
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, bbox=box)


@styled
def two_readings(first: Mapping[str, int], *, columns: int = 64, rows: int = 64) -> Picture:
    """Draw a tile of Q read in steps of 16 columns (K-major) and of 16 rows (MN-major), with the second step marked.

    first: {"K-major": bytes from one step to the next, "MN-major": the same}.
    """
    fig, panels = figure(8.6, 3.1, columns=2)
    for ax, (how, step), title in zip(
        panels, first.items(), ("Sᵀ = K Qᵀ sums over columns", "dK = dSᵀ Q sums over rows"), strict=True
    ):
        ax.add_patch(Rectangle((0, 0), columns, rows, facecolor=CPU, alpha=0.2))
        for i in range(4):
            at, size = ((16 * i, 0), (16, rows)) if how == "K-major" else ((0, 16 * i), (columns, 16))
            ax.add_patch(Rectangle(at, *size, facecolor=CPU if i == 1 else "none", edgecolor=ROOF, alpha=0.8))
            place = (16 * i + 8, rows / 2) if how == "K-major" else (columns / 2, 16 * i + 8)
            ax.text(*place, f"step {i}:\n+ {step * i:,}", ha="center", va="center", fontsize=8)
        ax.set(xlim=(-1, columns + 1), ylim=(rows + 1, -1), aspect="equal", xlabel="column of Q", ylabel="row of Q")
        ax.set_xticks([0, 16, 32, 48, 64])
        ax.set_yticks([0, 16, 32, 48, 64])
        ax.set_title(f"{how}: {title}", fontsize=10)
    steps = "; ".join(f"{how}: {step:,} bytes a step" for how, step in first.items())
    return Picture(fig, f"one tile of Q, 16 columns or 16 rows at a time; {steps}")


@styled
def budget(bars: Mapping[str, Mapping[str, float]], limit: float, *, unit: str) -> Picture:
    """Draw what fills a memory, as a bar for each configuration, and its limit."""
    fig, ax = figure(9.0, 1.3 + 0.45 * len(bars))
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    of = {"K": GPU, "V": LINES[2], "Q": CPU, "dO": LINES[4], "dS": WRITE, "dQ": PEER}
    colours = {name: of.get(name.split(" ")[0], MOVED) for name in names}
    for y, parts in enumerate(bars.values()):
        left = 0.0
        for name, size in parts.items():
            ax.barh(y, size, left=left, height=0.7, color=colours[name], alpha=0.55, edgecolor="white")
            if size > limit / 30:
                ax.text(left + size / 2, y, f"{size:g}", ha="center", va="center", fontsize=8)
            left += size
        ax.text(max(left, limit) + limit / 100, y, f"{left:.4g}", va="center", fontsize=9)
    ax.axvline(limit, color=ROOF, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(bars)), list(bars))
    most = max(limit, *(sum(parts.values()) for parts in bars.values()))
    ax.set(ylim=(len(bars) - 0.5, -0.5), xlim=(0, 1.08 * most), xlabel=f"{unit}; dashed: the limit, {limit:g}")
    fig.legend(
        handles=[Patch(color=colours[name], alpha=0.55, label=name) for name in names],
        loc="outside upper center",
        ncols=len(names),
        fontsize=8,
    )
    totals = "; ".join(f"{name}: {sum(parts.values()):.4g} {unit}" for name, parts in bars.items())
    return Picture(fig, f"{totals}; the limit is {limit:g}")


# ---- dependencies within a block

PRODUCTS = ("Sᵀ", "dPᵀ", "dV", "dQᵀ", "dK")  # in the order in which a step starts them
OF_PRODUCT = dict(zip(PRODUCTS, (PEER, WRITE, LINES[2], CPU, GPU), strict=True))
LOADS, ADDS, CONSUMERS = 0, (32, 64), (128, 256)  # the threads that act for their warps
# The mbarriers of the two stages, in the order in which they are initialised, after that of K and that of V.
Q_FULL, EMPTY, DO_FULL = [2, 3], [4, 5], [6, 7]
DS_READY, DQ_EMPTY, DQ_FULL = [1], [2, 3], [4, 5]  # named barriers

Span = tuple[int, int, str]


def _of_first_block(events: Sequence[Any]) -> list[Any]:
    leaders = {LOADS, *ADDS, *CONSUMERS}
    return [event for event in events if event.block == 0 and event.thread in leaders]


def steps_of(events: Sequence[Any]) -> dict[str, list[Span]]:
    """Extract what hopper_backward's first block does from an X-ray: rows of (begin, end, what), in order of events.

    Rows: the copies of each stage, each consumer's products and its waits, the additions to dQ.
    """
    rows: dict[str, list[Span]] = {"stage 0": [], "stage 1": []}
    rows |= {f"consumer {i + 1}": [] for i in range(len(CONSUMERS))} | {"dQ": []}
    asked: dict[int, int] = {}
    waits: dict[int, int] = {}
    adding: dict[int, int] = {}
    groups: dict[int, list[list[int]]] = {thread: [] for thread in CONSUMERS}  # [last product, when, which product]
    count, last_line = dict.fromkeys(CONSUMERS, 0), dict.fromkeys(CONSUMERS)
    for now, event in enumerate(_of_first_block(events)):
        thread, row = event.thread, f"consumer {event.thread // 128}"
        if event.kind == "load" and event.number >= 2:
            asked.setdefault(event.number, now)
        elif event.kind == "landed" and event.number in asked:
            full = DO_FULL if event.number in DO_FULL else Q_FULL
            span = (asked.pop(event.number), now, "dO" if full is DO_FULL else "Q")
            rows[f"stage {full.index(event.number)}"].append(span)
        elif event.kind == "product":
            if last_line[thread] != (event.place, event.value):
                groups[thread].append([0, now, count[thread] % len(PRODUCTS)])
                count[thread] += 1
            groups[thread][-1][0], last_line[thread] = event.number, (event.place, event.value)
        elif event.kind == "products done":
            done = [group for group in groups[thread] if group[0] < event.number]
            rows[row] += [(begin, now, PRODUCTS[which]) for _, begin, which in done]
            groups[thread] = groups[thread][len(done) :]
            last_line[thread] = None
        elif event.kind in ("wait", "bar.sync") and thread in CONSUMERS:
            waits[thread], last_line[thread] = now, None
        elif event.kind in ("waited", "bar.synced") and thread in waits:
            rows[row].append((waits.pop(thread), now, "waits"))
        elif event.kind == "store":
            adding[thread] = now
        elif event.kind == "stored" and thread in adding:
            rows["dQ"].append((adding.pop(thread), now, "addition"))
    return rows


@styled
def roles_of_backward(events: Sequence[Any], first: int = 1, last: int = 2) -> Picture:
    """Draw two or more steps of a block: copies, products in flight, additions to dQ, and the barriers between them.

    Args:
        events: of an X-ray of hopper_backward. first, last: steps of a block, from 0.
    """
    rows, order = steps_of(events), _of_first_block(events)
    begins, ends = (
        [span[side] for span in rows["consumer 1"] if span[2] == what] for side, what in ((0, "Sᵀ"), (1, "dK"))
    )
    there = Q_FULL[first % 2]
    zero = max(i for i, e in enumerate(order) if e.kind == "landed" and e.number == there and i < begins[first]) - 6
    stop = max(ends[last], rows["dQ"][last][1]) + 8
    fig, ax = figure(9.4, 4.1)
    y_of = {"stage 0": 0.0, "stage 1": 0.6, "consumer 1": 2.0, "consumer 2": 4.0, "dQ": 5.5}
    for name, spans in rows.items():
        for begin, end, what in spans:
            left, right = max(begin, zero) - zero, min(end, stop) - zero
            if right <= left:
                continue
            lane = y_of[name] + (0.3 * (PRODUCTS.index(what) - 2) if what in PRODUCTS else 0.0)
            lane += {"Q": -0.12, "dO": 0.12}.get(what, 0.0)
            height = {"waits": 1.5, "addition": 0.5, "Q": 0.22, "dO": 0.22}.get(what, 0.28)
            style = {"alpha": 0.75, "zorder": 1 if what == "waits" else 2, "edgecolor": "white"}
            ax.barh(lane, right - left, left=left, height=height, color=_COLOURS[what], **style)
            if what in PRODUCTS:
                ax.text((left + right) / 2, lane, what, ha="center", va="center", fontsize=7, zorder=3)
    _arrows(ax, order, zero, stop, first % 2, y_of)
    names = ["copies, stage 0", "copies, stage 1", "consumer 1", "consumer 2", "dQ is added"]
    ax.set_yticks(list(y_of.values()), names, fontsize=8)
    ax.set(ylim=(6.0, -0.4), xlim=(0, stop - zero), xticks=[], xlabel="order of events on the engine, not time")
    said = {"Q": "copy of Q in flight", "dO": "copy of dO", **{what: f"{what} in flight" for what in PRODUCTS}}
    handles = [Patch(color=colour, alpha=0.75, label=said.get(what, what)) for what, colour in _COLOURS.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    counts = "; ".join(f"{name}: {len(spans)} spans" for name, spans in rows.items())
    return Picture(fig, f"steps {first} to {last} of a block of 13, in the order of events: {counts}")


_COLOURS = {"Q": MOVED, "dO": TILES["dO"], "waits": IDLE, **OF_PRODUCT, "addition": ROOF}


def _arrows(ax: Any, order: Sequence[Any], zero: int, stop: int, stage: int, y_of: Mapping[str, float]) -> None:
    """Yield an arrow for each barrier of a step, from the thread that arrives to the one that has waited."""
    place = {LOADS: y_of[f"stage {stage}"], **dict.fromkeys(ADDS, y_of["dQ"])}
    place |= {thread: y_of[f"consumer {i + 1}"] for i, thread in enumerate(CONSUMERS)}

    def when(kind: str, numbers: Sequence[int], threads: Sequence[int], after: int) -> tuple[int, int] | None:
        """Find the first such event at one of these barriers: its time and its thread."""
        for now, event in enumerate(order[after:stop], start=after):
            if event.kind == kind and event.number in numbers and event.thread in threads:
                return now, event.thread
        return None

    one, other = CONSUMERS
    full, empty = [Q_FULL[stage]], [EMPTY[stage]]
    for name, leaves, comes, colour in (
        ("full", ("landed", full, [LOADS]), ("waited", full, CONSUMERS), GPU),
        ("dS ready", ("bar.sync", DS_READY, [other]), ("bar.synced", DS_READY, [one]), WRITE),
        ("dQ full", ("bar.arrive", DQ_FULL, [other]), ("bar.synced", DQ_FULL, ADDS), ROOF),
        ("dQ empty", ("bar.arrive", DQ_EMPTY[1:], ADDS), ("bar.synced", DQ_EMPTY[1:], [other]), LINES[4]),
        ("empty", ("arrive", empty, [other]), ("waited", empty, [LOADS]), LINES[2]),
    ):
        begin = when(*leaves, after=zero)
        end = when(*comes, after=begin[0]) if begin else None
        if not begin or not end:
            continue
        style = {"arrowstyle": "-|>", "color": colour, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
        (x0, y0), (x1, y1) = ((now - zero, place[thread]) for now, thread in (begin, end))
        ax.annotate("", (x1, y1), (x0, y0), arrowprops=style, zorder=4)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6}
        label = {"color": colour, "fontsize": 8, "ha": "center", "va": "center", "bbox": box, "zorder": 5}
        ax.text((x0 + x1) / 2, (y0 + y1) / 2, name, **label)


# The marks of `helpers.bench.studies.backward_timeline` that are drawn. "opened" is derived from two marks, the
# consumers' "ds_stored": a clock read right after `bar.sync` does not wait for the barrier.
_MARKS = {"q_there": 1, "do_there": 2, "s_there": 3, "weights": 4, "dp_there": 5, "ds_stored": 6, "dq_there": 8}
_MARKS |= {"dq_stored": 10, "ends": 11}
# Issued, and known to be done.
_IN_FLIGHT = {"Sᵀ": ("q_there", "s_there"), "dPᵀ": ("do_there", "dp_there"), "dV": ("ds_stored", "dq_there")}
_IN_FLIGHT |= {"dQᵀ": ("opened", "dq_there"), "dK": ("opened", "ends")}
_AT_WORK = {"P": ("s_there", "weights"), "dS": ("dp_there", "ds_stored"), "waits": ("ds_stored", "opened")}
_AT_WORK |= {"dQ": ("dq_there", "dq_stored")}


@styled
def timeline_of_backward(timeline: Mapping[str, Any], first: int, last: int) -> Picture:
    """Draw recorded steps of a block of hopper_backward, in cycles: products in flight, work of the warps, additions.

    Args:
        timeline: as `helpers.bench.studies.backward_timeline` records it. first, last: steps, from 0.
    """
    consumers, adders = timeline["consumers"], timeline["adders"]
    zero, stop = min(steps[first][0] for steps in consumers), max(steps[last][-1] for steps in consumers)
    names = [f"consumer {i + 1}: {part}" for i in range(len(consumers)) for part in ("products", "warps")]
    fig, ax = figure(9.4, 3.9)

    def bar(y: float, span: tuple[float, float], height: float, colour: str, label: str) -> None:
        begin, end = max(span[0], zero) - zero, min(span[1], stop) - zero
        if end > begin:
            ax.barh(y, end - begin, left=begin, height=height, color=colour, edgecolor="white", linewidth=0.6)
        if end - begin > 0.009 * len(label) * (stop - zero):  # the label fits
            ax.text((begin + end) / 2, y, label, ha="center", va="center", fontsize=7)

    for number in range(max(first - 1, 0), min(last + 2, len(adders))):
        steps = [steps[number] for steps in consumers]
        opened, full = (max(step[_MARKS[mark]] for step in steps) for mark in ("ds_stored", "dq_stored"))
        for y, step in zip((0, 2), steps, strict=True):
            at = {"opened": opened, **{mark: step[i] for mark, i in _MARKS.items()}}
            for i, (what, (begin, end)) in enumerate(_IN_FLIGHT.items()):
                bar(y + 0.17 * (i - 2), (at[begin], at[end]), 0.17, OF_PRODUCT[what], what)
            for what, (begin, end) in _AT_WORK.items():
                bar(y + 1, (at[begin], at[end]), 0.5, IDLE if what == "waits" else MOVED, what)
        bar(len(names), (full, adders[number][-1]), 0.5, MOVED, "addition")
    ax.set_yticks(range(len(names) + 1), [*names, "dQ is added"], fontsize=8)
    title = f"d = {timeline['shape'][3]}"
    ax.set(ylim=(len(names) + 0.5, -0.6), xlim=(0, stop - zero), title=title)
    ax.set_xlabel("cycles; grey: waits for the other's dS")
    return Picture(fig, f"steps {first} to {last} of a block of 13 on a GPU: {stop - zero:,} cycles")
