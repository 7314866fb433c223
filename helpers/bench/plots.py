"""Bar charts of a recorded GPU run: stages, climbs, tile sizes. roofline.py draws the rest.

If nothing is recorded, a sentence that says so replaces the picture.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from helpers.attention.ladder.steps import by_number
from helpers.attention.ladder.tiles import Tiles
from helpers.bench import records, steps
from helpers.bench.reading import climb, in_turns, measurements, recorded, results_of, roofs
from helpers.bench.reading import gain as gain_of
from helpers.bench.results import NO_RECORD, roof_name
from helpers.draw.moving import Moving, tiles
from helpers.draw.picture import GPU, IDLE, PEER, ROOF, WRITE, Picture, Text, figure, styled

drawn = records.table_of(lambda: recorded(), lambda: Text(f"*({NO_RECORD})*"))


def gpu_of(record: Mapping[str, Any]) -> str:
    """Return the name of a record's GPU."""
    return record["device"].get("name", "GPU")


def signed_percent(share: float) -> str:
    """Return a gain or a loss in whole per cent, signed unless that is 0."""
    percent = round(100 * share)
    return f"{percent:+}%" if percent else "0%"


def heading(shape: Sequence[int], dtype: str = "", causal: bool = False) -> str:
    """Return a title: N, d, the type, heads, the mask."""
    batch, heads, n, head_dim = shape
    many = f", {batch}\u00a0×\u00a0{heads}\u00a0heads" if batch * heads > 1 else ""  # no line break here
    return f"N = {n}, d = {head_dim}{', ' * bool(dtype)}{dtype}{many}{', causal' * causal}"


@styled
@drawn
def measured_bars(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    quantity: str = "ms",
    dtype: str = "float32",
    causal: bool = False,
    record: Any = None,
) -> Picture | Text:
    """Draw the recorded times (quantity="ms") or speeds ("tflops") of stages and their peers at one shape.

    Args:
        shape: (batch, heads, n, head_dim).
        names: which, from top to bottom; None for all at that shape.
        record: replaces the committed record.

    Returns:
        A picture; a sentence if nothing is recorded.
    """
    at_shape = measurements(shape, names, dtype=dtype, causal=causal, record=record)
    results = [r for r in at_shape if r.get(quantity) is not None]
    if not results:
        return Text(f"*(the record has no {quantity} at shape {tuple(shape)}, {dtype}{', causal' * causal})*")
    values = [r[quantity] for r in results]
    fig, ax = figure(7, 0.9 + 0.36 * len(results))
    colours = [{"stage": GPU, "peer": PEER}.get(r["kind"], ROOF) for r in results]
    bars = ax.barh([r["name"] for r in results], values, color=colours, height=0.7)
    ax.bar_label(bars, [f"{value:.3g}" for value in values], padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    unit = {"ms": "milliseconds (less is better)", "tflops": "TFLOP/s (more is better)"}.get(quantity, quantity)
    ax.set_xlabel(f"{unit}; recorded on {gpu_of(record)}")
    batch, heads, n, head_dim = shape
    ax.set_title(f"batch {batch}, heads {heads}, N = {n}, d = {head_dim}, {dtype}{', causal' * causal}")
    kinds = {"stage": ("this course", GPU), "peer": ("peers", PEER), "roof": ("roof", ROOF)}
    present = [kinds[kind] for kind in kinds if any(r["kind"] == kind for r in results)]
    if len(present) > 1:
        handles = [Patch(color=colour, label=label) for label, colour in present]
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, "; ".join(f"{r['name']}: {r[quantity]:.3g} {quantity}" for r in results))


@styled
@drawn
def measured_ladder(
    shapes: Sequence[Sequence[int]],
    names: Sequence[str] | None = None,
    *,
    dtype: str = "float32",
    causal: bool = False,
    record: Any = None,
) -> Picture | Text:
    """Draw recorded TFLOP/s at several shapes on one scale, each bar with its share of the roof in the same run.

    Args:
        shapes: (batch, heads, n, head_dim) each.
        names: stages and peers, from top to bottom; None for all that are recorded at one of the shapes.
        record: replaces the committed record.

    Returns:
        A picture of the recorded shapes; a sentence if there are none.
    """
    at = {
        tuple(shape): {r["name"]: r for r in measurements(shape, names, dtype=dtype, causal=causal, record=record)}
        for shape in shapes
    }
    at = {shape: results for shape, results in at.items() if results}  # drop panels without bars
    if roof_name(dtype) not in roofs(record) or not at:
        return Text(f"*(the record has no {dtype} at {', '.join(map(str, shapes))})*")
    names = names or list(dict.fromkeys(name for results in at.values() for name in results))
    return _panels(at, names, dtype, causal, record)


def _panels(
    at: Mapping[tuple[int, ...], Mapping[str, Any]],
    names: Sequence[str],
    dtype: str,
    causal: bool,
    record: Mapping[str, Any],
    *,
    gradients: bool = False,
) -> Picture:
    """Draw a panel for each shape: TFLOP/s, and the share of the type's matrix product. Outputs share a scale.

    at: results by name, by shape (batch, heads, n, head_dim).
    """
    roof = roof_name(dtype)
    top = roofs(record)[roof]["tflops"]
    fig, axes = figure(8.6, 1.2 + 0.36 * len(names), columns=len(at))
    described = []
    for i, (shape, results) in enumerate(at.items()):
        ax = np.atleast_1d(axes)[i]
        texts = _ladder_panel(ax, results, names, top, [results] if gradients else at.values())
        if i:
            ax.set_yticklabels([])
        ax.set_title(textwrap.fill(heading(shape, dtype, causal), 84 // len(at)), fontsize=10)
        what = f"d = {shape[3]}" if gradients else f"N = {shape[2]}"
        described += [f"{what}, {name}: {text}" for name, text in zip(names, texts, strict=True)]
    fig.supxlabel(f"TFLOP/s (more is better); dashed: {roof}, {top:.3g}; recorded on {gpu_of(record)}", fontsize=10)
    return Picture(fig, f"{'gradients, ' * gradients}TFLOP/s and share of {roof}: {'; '.join(described)}")


def _ladder_panel(
    ax: Any, results: Mapping[str, Any], names: Sequence[str], top: float, panels: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Draw bars of TFLOP/s, labelled with their share of `top`, and a dashed line at `top`, the roof.

    Returns the labels. panels: the results in all panels that share an x-axis scale.
    """
    most = max(top, *(row["tflops"] for each in panels for name, row in each.items() if name in names))
    values = [results[name]["tflops"] if name in results else 0.0 for name in names]
    colours = [GPU if name in results and results[name]["kind"] == "stage" else PEER for name in names]
    bars = ax.barh(range(len(names)), values, color=colours, height=0.7)
    texts = [f"{value:.3g}  ({value / top:.1%})" if value else "not recorded" for value in values]
    inside = [value > 0.6 * most for value in values]  # no space to the right of a long bar
    outside = [text * (not i) for text, i in zip(texts, inside, strict=True)]
    ax.bar_label(bars, outside, padding=4, fontsize=9, zorder=3, path_effects=[withStroke(linewidth=3, foreground="w")])
    for y, (text, value) in enumerate(zip(texts, values, strict=True)):
        if inside[y]:
            ax.text(value, y, f"{text} ", ha="right", va="center", fontsize=9, color="white")
    ax.axvline(top, color=ROOF, linewidth=1, linestyle="--")
    ax.set_xlim(0, 1.08 * most)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), names)
    return texts


@styled
def measured_climb(
    stage: str, shape: Sequence[int], *, dtype: str = "float32", title: str = "", record: Any = None
) -> Picture | Text:
    """Draw the recorded TFLOP/s of the steps to a stage, a bar each, and each step's gain over the previous one.

    Args:
        shape: (batch, heads, n, head_dim).
        record: a record to draw instead of the committed one.

    Returns:
        A picture, in which steps that are more than 1 % slower than the one before have another colour; a sentence if
        no step is recorded.
    """
    record = in_turns(record)
    rows = climb(stage, shape, dtype=dtype, record=record)
    if not rows:
        return Text(f"*({NO_RECORD if record is None else 'not yet recorded'}: the steps to {stage})*")
    labels = [*(f"{r['step']}  {r['idea']}" for r in rows[:-1]), f"{max(by_number(stage))}  {stage}"]
    values, texts, colours = [], [], []
    last = None  # the last measured step
    for row in rows:
        measured, speed = steps.is_measured(row), row["tflops"]
        rounds = gain_of(last, row) if measured and last else []
        gain = (rounds[0] if rounds else speed / last["tflops"]) - 1 if measured and last else 0.0
        values.append(speed if measured else 0.0)
        texts.append(f"{speed:.1f}" + (f"  {signed_percent(gain)}" if last else "") if measured else steps.NOT_MEASURED)
        colours.append(WRITE if gain < -0.01 else GPU)  # smaller changes are noise
        last = row if measured else last
    fig, ax = figure(7.6, 1.1 + 0.36 * len(values))
    ax.bar_label(ax.barh(labels, values, color=colours, height=0.7), texts, padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.16)
    ax.set_title(title or heading(shape, dtype))
    ax.set_xlabel(f"TFLOP/s (more is better); recorded on {gpu_of(record)}")
    units = (" TFLOP/s" if steps.is_measured(row) else "" for row in rows)
    return Picture(fig, "; ".join(f"{a}: {text}{unit}" for a, text, unit in zip(labels, texts, units, strict=True)))


@styled
def measured_climb_times(
    stage: str,
    shape: Sequence[int],
    numbers: Sequence[int] | None = None,
    *,
    dtype: str = "float32",
    beside: Mapping[str, str] | None = None,
    record: Any = None,
) -> Picture | Text:
    """Draw the recorded milliseconds of the steps to a stage, on a logarithmic axis, with their speedups.

    Args:
        shape: (batch, heads, n, head_dim).
        numbers: the steps to show; None for all. Gains are over the previous step shown.
        beside: {peer: its label}, drawn as dashed lines if the record has their gradients or outputs.
        record: replaces the record of `reading.in_turns`.
    """
    record = in_turns(record)
    rows = climb(stage, shape, dtype=dtype, record=record)
    last_number = max(by_number(stage)) if rows else 0
    rows = [row for row in rows if steps.is_measured(row)]
    rows = [row for row in rows if numbers is None or row.get("step", last_number) in numbers]
    if not rows:
        return Text(f"*({NO_RECORD if record is None else 'not yet recorded'}: the steps to {stage})*")
    labels = [f"{row.get('step', last_number)}  {row['idea'] if 'step' in row else stage}" for row in rows]
    texts, colours = [], []
    for before, row in zip([None, *rows], rows, strict=False):
        gain = (gain_of(before, row) or [before["ms"] / row["ms"]])[0] if before else 1.0
        ms = f"{row['ms']:#.3g}".rstrip(".")
        texts.append((f"{ms} ms", f"{gain:.{1 if gain > 10 else 2}f}×" * bool(before)))
        colours.append(WRITE if gain < 0.99 else GPU)
    fig, ax = figure(7.6, 1.2 + 0.34 * len(rows))
    times = [row["ms"] for row in rows]
    ax.plot(times, range(len(rows)), color=IDLE, zorder=1)
    ax.scatter(times, range(len(rows)), color=colours, s=45, zorder=2)
    for y, columns in enumerate(texts):
        for x, text in zip((62, 108), columns, strict=True):  # points to the right of the axes
            place = {"xytext": (x, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
            ax.annotate(text, (1, y), xycoords=("axes fraction", "data"), annotation_clip=False, **place)
    ax.set_xscale("log")
    peers = {
        label: ms
        for name, label in (beside or {}).items()
        for ms in [r["ms"] for r in measurements(shape, [name], dtype=dtype, record=record, backward=True)]
    }
    for label, ms in peers.items():
        ax.axvline(ms, color=ROOF, linewidth=1, linestyle="--", zorder=0)
        ax.annotate(f"{label}\n{ms:.3g} ms", (ms, -0.9), ha="right", va="center", xytext=(-4, 0),
                    textcoords="offset points", fontsize=9)  # fmt: skip
    ax.set_xlim(0.35 * min(times + list(peers.values())), 1.3 * max(times))
    ax.set_ylim(len(rows) - 0.5, -1.4 if peers else -0.6)
    ax.set_yticks(range(len(rows)), labels)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    few_decades = max(times) < 10 * min(times)
    ax.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if few_decades and f"{value:g}" in "2345" else "")
    ax.set_title(heading(shape, dtype))
    ax.set_xlabel(f"milliseconds (less is better), logarithmic; recorded on {gpu_of(record)}")
    peers_text = "".join(f"; {label}: {ms:.3g} ms" for label, ms in peers.items())
    return Picture(
        fig,
        "; ".join(f"{a}: {text.strip()}" for a, text in zip(labels, map("   ".join, texts), strict=True)) + peers_text,
    )


@styled
def measured_overview(shapes: Mapping[str, Sequence[Sequence[int]]], *, record: Mapping[str, Any]) -> Picture:
    """Draw the ladder as in README: a panel for each type and shape, a row for each type.

    Args:
        shapes: type -> shapes; those of one type share their scale, up to its matrix product.
    """
    columns = max(map(len, shapes.values()))
    rows = {
        dtype: list(dict.fromkeys(r["name"] for shape in of for r in measurements(shape, dtype=dtype, record=record)))
        for dtype, of in shapes.items()
    }
    fig = Figure(figsize=(1.8 + 2.8 * max(columns, 1.5), 0.5 + sum(0.75 + 0.3 * len(names) for names in rows.values())))
    fig.set_layout_engine("constrained")
    grid = fig.add_gridspec(len(rows), columns, height_ratios=[1.5 + len(names) for names in rows.values()])
    described = []
    for i, (dtype, names) in enumerate(rows.items()):
        roof = roof_name(dtype)
        top = roofs(record)[roof]["tflops"]
        at = [{r["name"]: r for r in measurements(shape, names, dtype=dtype, record=record)} for shape in shapes[dtype]]
        for j, (shape, results) in enumerate(zip(shapes[dtype], at, strict=True)):
            ax = fig.add_subplot(grid[i, j])
            texts = _ladder_panel(ax, results, names, top, at)
            if j:
                ax.set_yticklabels([])
            batch, heads, n, head_dim = shape
            many = f"{batch} × {heads} heads" if batch * heads > 1 else "one head"
            ax.set_title(f"{dtype}, {many}, N = {n}, d = {head_dim}", fontsize=9)
            described += [f"{dtype} {tuple(shape)} {name}: {text}" for name, text in zip(names, texts, strict=True)]
    text = "TFLOP/s, and the share of PyTorch's matrix product in the same type (dashed)"
    between = "; " if columns > 1 else "\n"
    fig.supxlabel(f"{text}{between}blue: this course, grey: others; {gpu_of(record)}", fontsize=9)
    return Picture(fig, "; ".join(described))


@styled
def measured_steps(
    shape: Sequence[int],
    labels: Mapping[str, Mapping[str, str]],
    *,
    roofs: Mapping[str, float] | None = None,
    record: Any = None,
) -> Picture | Text:
    """Draw recorded TFLOP/s of variants and experiments at one shape; mark each bar below the best so far.

    Args:
        shape: (batch, heads, n, head_dim).
        labels: {label: fields of the result, such as {"kind": "experiment", "name": "register_tiles: ..."}}.
        roofs: {label: TFLOP/s}, drawn as dashed lines.
        record: replaces the committed record.

    Returns:
        A picture; a sentence if one of them is not recorded.
    """
    record = in_turns(record)
    results = [r for r in results_of(record) if tuple(r["shape"]) == tuple(shape)]
    by_label = {label: records.first(results, **wanted) for label, wanted in labels.items()}
    missing = [label for label, result in by_label.items() if result is None]
    if missing:
        return Text(f"*(not yet recorded: {', '.join(missing)})*")
    values = [result["tflops"] for result in by_label.values()]
    slower = [value < 0.99 * max(values[:i], default=0.0) for i, value in enumerate(values)]  # less is noise
    fig, ax = figure(7.6, 1.1 + 0.36 * len(values))
    bars = ax.barh(list(by_label), values, color=[WRITE if less else GPU for less in slower], height=0.7)
    texts = [f"{value:.1f}{'  slower' * less}" for value, less in zip(values, slower, strict=True)]
    ax.bar_label(bars, texts, padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.14)
    for name, tflops in (roofs or {}).items():
        ax.axvline(tflops, color=ROOF, linewidth=1, linestyle="--")
        lines = (*name.split("\n"), f"{tflops:.1f}")
        ax.text(tflops, -0.4, "\n".join(f"{line} " for line in lines), ha="right", va="top", fontsize=9)
        ax.set_xlim(0, 1.04 * max(tflops, *ax.get_xlim()))
    batch, heads, n, head_dim = shape
    ax.set_title(f"batch {batch}, heads {heads}, N = {n}, d = {head_dim}")
    ax.set_xlabel(f"TFLOP/s (more is better); recorded on {record['device'].get('name', 'a GPU')}")
    words = [f"{label}: {text} TFLOP/s" for label, text in zip(by_label, texts, strict=True)]
    words += [f"dashed, {' '.join(name.split())}: {value:.1f}" for name, value in (roofs or {}).items()]
    return Picture(fig, "; ".join(words))


def tile_speeds(shape: Sequence[int], *, record: Any = None) -> dict[Tiles, float]:
    """Return register_tiles' recorded TFLOP/s with other register tiles, for blocks of 128 threads, 8 in a row.

    Args:
        shape: (batch, heads, n, head_dim).
        record: replaces the committed record.
    """
    speeds: dict[Tiles, float] = {}
    for r in results_of(record):
        if r["name"] == "register_tiles" and r["kind"] == "variant" and tuple(r["shape"]) == tuple(shape):
            sizes = {name: int(size) for name, _, size in (word.partition("=") for word in r["note"].split())}
            if (sizes.get("THREADS"), sizes.get("THREADS_X")) == (128, 8):
                speeds[Tiles(sizes["BLOCK_M"], sizes["BLOCK_N"], 128, 8)] = r["tflops"]
    return speeds


def moving_tiles(shape: Sequence[int], *, record: Any = None) -> Moving | Text:
    """Draw the recorded tiles of register_tiles: the cost of the selected one, and the speed of all."""
    record = in_turns(record)
    speeds = tile_speeds(shape, record=record)
    return tiles.moving_tiles(speeds, shape, gpu_of(record)) if speeds else Text(f"*({NO_RECORD})*")


@styled
def measured_gradients(
    shapes: Sequence[Sequence[int]],
    names: Sequence[str],
    *,
    dtype: str = "float32",
    causal: bool = False,
    record: Any = None,
) -> Picture | Text:
    """Draw the recorded TFLOP/s of gradients at several shapes side by side, as `measured_ladder` draws outputs.

    FLOP count five products, even for kernels that compute more. Returns a sentence if nothing is recorded.
    """
    record = in_turns(record)
    how = {"dtype": dtype, "causal": causal, "record": record, "backward": True}
    at = {
        tuple(shape): {r["name"]: {**r, "kind": {"backward": "stage"}.get(r["kind"], "peer")} for r in results}
        for shape in shapes
        if (results := measurements(shape, names, **how))
    }
    if record is None or not at or roof_name(dtype) not in roofs(record):
        return Text(f"*({NO_RECORD if record is None else 'not yet recorded'}: the gradients in {dtype})*")
    return _panels(at, names, dtype, causal, record, gradients=True)
