"""The record of a GPU run, read and drawn: the ladder, the roofline, time and memory against N.

Where nothing is recorded, each picture is a sentence that says so. helpers.bench.plan says what is recorded.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.attention.ladder import LADDER
from helpers.bench import counters, steps
from helpers.bench.cases import Case
from helpers.bench.results import NO_RECORD, RECORD, roof_name
from helpers.draw.picture import GPU, LINES, PEER, ROOF, WRITE, Picture, Text, bytes_text, figure, styled


def recorded(path: Path | str = RECORD) -> dict[str, Any] | None:
    """The recorded GPU run: {"device": {...}, "how": {...}, "results": [...]}, or None where there is none."""
    path = Path(path)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def measurements(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    dtype: str = "float32",
    causal: bool = False,
    record: Any = None,
    backward: bool = False,
) -> list[dict[str, Any]]:
    """The recorded results at one shape (batch, heads, n, head_dim), in the order of `names` or of the record.

    Stages with other tile sizes (kind "variant") or another text ("experiment"), steps and the host's times are left
    out: see `climb` and `recorded()`. backward: of the gradients, in place of the output.
    """
    record = recorded() if record is None else record
    wanted = (tuple(shape), dtype, causal)
    fitting = [
        r
        for r in (record or {}).get("results", ())
        if (tuple(r["shape"]), r.get("dtype"), r.get("causal", False)) == wanted
        and r["kind"] in (("backward", "backward peer") if backward else ("stage", "peer", "roof"))
    ]
    if names is None:
        return fitting
    by_name = {r["name"]: r for r in fitting}
    return [by_name[name] for name in names if name in by_name]


def climb(
    stage: str, shape: Sequence[int], *, dtype: str = "float32", causal: bool = False, record: Any = None
) -> list[dict[str, Any]]:
    """The recorded results of the steps to a stage at one shape, one for each step of the climb; the stage is the last.

    Each has "name", "tflops", "ms", "ms_min", "ms_max" and more; steps have "step", from 1, and "idea". Of a step that
    is not measured, the figures are NaN. Empty where no step is recorded.
    """
    record = recorded() if record is None else record
    rows = [
        r
        for r in (record or {}).get("results", ())
        if (tuple(r["shape"]), r["dtype"], r.get("causal", False)) == (tuple(shape), dtype, causal)
        and r["kind"] in ("step", "backward step")
    ]
    backward = LADDER[stage].direction == "backward" if stage in LADDER else False
    how = {"dtype": dtype, "causal": causal, "record": record, "backward": backward}
    of_stage = next(iter(measurements(shape, [stage], **how)), None)
    not_measured = dict.fromkeys(("tflops", "ms", "ms_min", "ms_max"), math.nan)
    return [not_measured | row for row in steps.in_order(stage, rows, of_stage)]


def _roofs(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {r["name"]: r for r in record["results"] if r["kind"] == "roof"}


def _gpu(record: Mapping[str, Any]) -> str:
    return record["device"].get("name", "GPU")


def _heading(shape: Sequence[int], dtype: str = "", causal: bool = False) -> str:
    batch, heads, n, head_dim = shape
    many = f", {batch}\u00a0×\u00a0{heads}\u00a0heads" if batch * heads > 1 else ""  # not to be broken
    return f"N = {n}, d = {head_dim}{', ' * bool(dtype)}{dtype}{many}{', causal' * causal}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@styled
def measured_bars(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    quantity: str = "ms",
    dtype: str = "float32",
    causal: bool = False,
    log: bool = False,
    record: Any = None,
) -> Picture | Text:
    """Recorded times (quantity="ms") or speeds ("tflops") of stages and their peers at one shape.

    Args:
        shape: (batch, heads, n, head_dim).
        names: which, from top to bottom; all at that shape where it is None.
        log: a logarithmic axis.
        record: another record than the committed one.

    Returns:
        A picture; where nothing is recorded, a sentence that says so.
    """
    record = recorded() if record is None else record
    if record is None:
        return Text(f"*({NO_RECORD})*")
    found = measurements(shape, names, dtype=dtype, causal=causal, record=record)
    results = [r for r in found if r.get(quantity) is not None]
    if not results:
        return Text(f"*(the record has no {quantity} at shape {tuple(shape)}, {dtype}{', causal' * causal})*")
    values = [r[quantity] for r in results]
    fig, ax = figure(7, 0.9 + 0.36 * len(results))
    colours = [{"stage": GPU, "peer": PEER}.get(r["kind"], ROOF) for r in results]
    bars = ax.barh([r["name"] for r in results], values, color=colours, height=0.7)
    ax.bar_label(bars, [f"{value:.3g}" for value in values], padding=4)
    ax.invert_yaxis()
    if log:
        ax.set_xscale("log")
    ax.margins(x=0.12)
    unit = {"ms": "milliseconds (less is better)", "tflops": "TFLOP/s (more is better)"}.get(quantity, quantity)
    ax.set_xlabel(f"{unit}; recorded on {_gpu(record)}")
    batch, heads, n, head_dim = shape
    ax.set_title(f"batch {batch}, heads {heads}, N = {n}, d = {head_dim}, {dtype}{', causal' * causal}")
    kinds = {"stage": ("this course", GPU), "peer": ("peers", PEER), "roof": ("roof", ROOF)}
    present = [kinds[kind] for kind in kinds if any(r["kind"] == kind for r in results)]
    if len(present) > 1:
        handles = [Patch(color=colour, label=label) for label, colour in present]
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, "; ".join(f"{r['name']}: {r[quantity]:.3g} {quantity}" for r in results))


@styled
def measured_ladder(
    shapes: Sequence[Sequence[int]],
    names: Sequence[str] | None = None,
    *,
    roof: str | None = None,
    dtype: str = "float32",
    causal: bool = False,
    record: Any = None,
) -> Picture | Text:
    """Recorded TFLOP/s at several shapes side by side, on one scale, each bar with its share of a roof of the same run.

    Args:
        shapes: (batch, heads, n, head_dim) each.
        names: stages and peers, from top to bottom; all that are recorded at one of the shapes where it is None.
        roof: the name of a recorded roof, drawn as a dashed line; the matrix product of the type where it is None.
        record: another record than the committed one.

    Returns:
        A picture of those shapes that the record has; where it has none, a sentence that says so.
    """
    record = recorded() if record is None else record
    if record is None:
        return Text(f"*({NO_RECORD})*")
    roof = roof or roof_name(dtype)
    top = _roofs(record).get(roof, {}).get("tflops")
    at = {
        tuple(shape): {r["name"]: r for r in measurements(shape, names, dtype=dtype, causal=causal, record=record)}
        for shape in shapes
    }
    at = {shape: results for shape, results in at.items() if results}  # a panel without a bar says nothing
    names = list(dict.fromkeys(name for results in at.values() for name in results)) if names is None else names
    if top is None or not at:
        return Text(f"*(the record has no {dtype} at {', '.join(map(str, shapes))})*")
    fig, axes = figure(8.6, 1.2 + 0.36 * len(names), columns=len(at))
    told = []
    for ax, (shape, results) in zip(np.atleast_1d(axes), at.items(), strict=True):
        texts = _ladder_panel(ax, results, names, top)
        if ax is not np.atleast_1d(axes)[0]:
            ax.set_yticklabels([])
        ax.set_title(textwrap.fill(_heading(shape, dtype, causal), 84 // len(at)), fontsize=10)
        told += [f"N = {shape[2]}, {name}: {text}" for name, text in zip(names, texts, strict=True)]
    fig.supxlabel(f"TFLOP/s (more is better); dashed: {roof}, {top:.3g}; recorded on {_gpu(record)}", fontsize=10)
    return Picture(fig, f"TFLOP/s and share of {roof}: {'; '.join(told)}")


def _ladder_panel(ax: Any, results: Mapping[str, Any], names: Sequence[str], top: float) -> list[str]:
    """Bars of TFLOP/s with their share of the roof `top`, a dashed line; the texts at the bars."""
    values = [results[name]["tflops"] if name in results else 0.0 for name in names]
    colours = [GPU if name in results and results[name]["kind"] == "stage" else PEER for name in names]
    bars = ax.barh(range(len(names)), values, color=colours, height=0.7)
    texts = [f"{value:.3g}  ({value / top:.1%})" if value else "not recorded" for value in values]
    inside = [value > 0.6 * top for value in values]  # beside a long bar there is no room
    ax.bar_label(bars, [text * (not i) for text, i in zip(texts, inside, strict=True)], padding=4, fontsize=9)
    for y, (text, value) in enumerate(zip(texts, values, strict=True)):
        if inside[y]:
            ax.text(value, y, f"{text} ", ha="right", va="center", fontsize=9, color="white")
    ax.axvline(top, color=ROOF, linewidth=1, linestyle="--")
    ax.set_xlim(0, 1.08 * top)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), names)
    return texts


@styled
def measured_climb(
    stage: str, shape: Sequence[int], *, dtype: str = "float32", title: str = "", record: Any = None
) -> Picture | Text:
    """Recorded TFLOP/s of the steps to a stage, one bar each, and what each gains over the one before.

    Args:
        shape: (batch, heads, n, head_dim).
        record: another record than the committed one.

    Returns:
        A picture; a bar below the one before has another colour. Where no step is recorded, a sentence that says so.
    """
    record = recorded() if record is None else record
    rows = climb(stage, shape, dtype=dtype, record=record)
    if not rows:
        return Text(f"*({NO_RECORD if record is None else 'not yet recorded'}: the steps to {stage})*")
    labels = [f"{r['step']}  {r['idea']}" if r.get("step") else f"{len(rows)}  {stage}" for r in rows]
    values, texts, colours = [], [], []
    last = None  # the speed of the last step that was measured
    for row in rows:
        measured, speed = steps.is_measured(row), row["tflops"]
        gain = speed / last - 1 if measured and last else 0.0
        values.append(speed if measured else 0.0)
        texts.append(f"{speed:.1f}" + (f"  {gain:+.0%}" if last else "") if measured else steps.NOT_MEASURED)
        colours.append(WRITE if gain < -0.01 else GPU)  # less is noise
        last = speed if measured else last
    fig, ax = figure(7.6, 1.1 + 0.36 * len(values))
    ax.bar_label(ax.barh(labels, values, color=colours, height=0.7), texts, padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.16)
    ax.set_title(title or _heading(shape, dtype))
    ax.set_xlabel(f"TFLOP/s (more is better); recorded on {_gpu(record)}")
    units = (" TFLOP/s" if steps.is_measured(row) else "" for row in rows)
    return Picture(fig, "; ".join(f"{a}: {text}{unit}" for a, text, unit in zip(labels, texts, units, strict=True)))


@styled
def measured_overview(shapes: Mapping[str, Sequence[Sequence[int]]], *, record: Mapping[str, Any]) -> Picture:
    """The ladder as README shows it: a panel for each type and shape, a row for each type.

    Args:
        shapes: type -> shapes; those of one type share their scale, up to its matrix product.
    """
    roofs = _roofs(record)
    columns = max(map(len, shapes.values()))
    rows = {
        dtype: list(dict.fromkeys(r["name"] for shape in of for r in measurements(shape, dtype=dtype, record=record)))
        for dtype, of in shapes.items()
    }
    fig = Figure(figsize=(1.8 + 2.8 * max(columns, 1.5), 0.5 + sum(0.75 + 0.3 * len(names) for names in rows.values())))
    fig.set_layout_engine("constrained")
    grid = fig.add_gridspec(len(rows), columns, height_ratios=[1.5 + len(names) for names in rows.values()])
    told = []
    for i, (dtype, names) in enumerate(rows.items()):
        roof = roof_name(dtype)
        top = roofs[roof]["tflops"]
        for j, shape in enumerate(shapes[dtype]):
            ax = fig.add_subplot(grid[i, j])
            results = {r["name"]: r for r in measurements(shape, names, dtype=dtype, record=record)}
            texts = _ladder_panel(ax, results, names, top)
            if j:
                ax.set_yticklabels([])
            batch, heads, n, head_dim = shape
            many = f"{batch} × {heads} heads" if batch * heads > 1 else "one head"
            ax.set_title(f"{dtype}, {many}, N = {n}, d = {head_dim}", fontsize=9)
            told += [f"{dtype} {tuple(shape)} {name}: {text}" for name, text in zip(names, texts, strict=True)]
    text = "TFLOP/s, and the share of PyTorch's matrix product in the same type (dashed)"
    between = "; " if columns > 1 else "\n"
    fig.supxlabel(f"{text}{between}blue: this course, grey: others; {_gpu(record)}", fontsize=9)
    return Picture(fig, "; ".join(told))


@styled
def measured_roofline(
    shape: Sequence[int] = (1, 16, 4096, 64),
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    gradients: bool = False,
    record: Any = None,
    counted: Any = None,
) -> Picture | Text:
    """Every stage on the roofline: recorded TFLOP/s against FLOP per byte at DRAM.

    The bytes are those that Nsight Compute counted (a filled dot) where they are recorded, else Q, K, V and O moved
    once (a ring): the least there can be.

    Args:
        shape: (batch, heads, n, head_dim), at which the speed was recorded.
        gradients: also the stages that compute gradients, where their bytes were counted.
        counted: another record of helpers.bench.counters than the committed one.
    """
    record = recorded() if record is None else record
    if record is None:
        return Text(f"*({NO_RECORD})*")
    counted = counters.recorded() if counted is None else counted
    backward = [name for name, stage in LADDER.items() if stage.direction == "backward"] if gradients else []
    bytes_per_flop = {
        (row["stage"], row["dtype"]): (row["figures"]["dram bytes read"] + row["figures"]["dram bytes written"])
        / row["flop"]
        for names in (None, backward)
        for row in counters.select(counted or {"rows": []}, names, head_dim=shape[3], dtype="all")
        if "dram bytes read" in row.get("figures", {})
    }
    roofs = _roofs(record)
    marks = []  # label, FLOP per byte, TFLOP/s, whether counted
    for dtype in dtypes:
        least = Case(tuple(shape), dtype)
        for r in measurements(shape, dtype=dtype, record=record):
            if r["kind"] == "stage":
                share = bytes_per_flop.get((r["name"], dtype))
                label = r["name"] if dtype == "float32" else f"{r['name']}, {dtype}"
                x = 1 / share if share else least.flops / least.bytes
                marks.append((label, x, r["tflops"], share is not None))
        for r in measurements(shape, backward, dtype=dtype, record=record, backward=True):
            if share := bytes_per_flop.get((r["name"], dtype)):
                label = r["name"] if dtype == "float32" else f"{r['name']}, {dtype}"
                marks.append((label, 1 / share, r["tflops"], True))
    if not marks or "copy" not in roofs:
        return Text(f"*(the record has no stage at {tuple(shape)})*")
    gbps = roofs["copy"]["gbps"]
    flats = {dtype: roofs[roof_name(dtype)]["tflops"] for dtype in dtypes if roof_name(dtype) in roofs}
    low = 0.3 * min([x for _, x, *_ in marks] + [1e3 * tflops / gbps for tflops in flats.values()])
    high = 12 * max(x for _, x, *_ in marks)
    fig, ax = figure(8.4, 4.2)
    peak = max(flats.values())
    x = np.array([low, min(high, 1e3 * peak / gbps)])
    ax.plot(x, x * gbps / 1e3, color=ROOF)
    ridges = [1e3 * tflops / gbps for tflops in flats.values()]
    middle = math.sqrt(max(ridges) * (min(ridges) if len(ridges) > 1 else low))
    text = f"memory: {gbps:,.0f} GB/s"
    ax.annotate(text, (middle, middle * gbps / 1e3), xytext=(8, -9), textcoords="offset points", fontsize=9)
    for dtype, tflops in flats.items():
        ax.plot([1e3 * tflops / gbps, high], [tflops, tflops], color=ROOF)
        text = f"{dtype} matrix product: {tflops:,.3g} TFLOP/s"
        at_ridge = (1e3 * tflops / gbps, tflops)
        ax.annotate(text, at_ridge, xytext=(14, 4 if tflops == peak else -12), textcoords="offset points", fontsize=9)
    numbers: list[Any] = []
    for i, (label, intensity, tflops, seen) in enumerate(marks):
        colour = LINES[i % len(LINES)]
        style = {"color": colour} if seen else {"color": colour, "markerfacecolor": "white"}
        text = f"{label}: {_short(intensity)} FLOP per byte, {tflops:.3g} TFLOP/s"
        name, _, half = label.partition(",")
        ax.plot(intensity, tflops, "s" if half else "o", markersize=8, label=text, **style)
        number = f"{LADDER[name].number:02}" if name in LADDER else ""
        if name in backward or not _shared_number(numbers, number, intensity, tflops):
            beside = [x / intensity for _, x, speed, _ in marks if abs(math.log(speed / tflops)) < 0.2]
            right, left = any(1 < x < 1.6 for x in beside), any(1 < 1 / x < 1.6 for x in beside)
            place = (7, -3) if not right else (-6, -14) if left else (-19, -3)  # where no other mark is near
            place = (-19, -3) if name in backward else place
            spot = ax.annotate(number, (intensity, tflops), xytext=place, textcoords="offset points", fontsize=8)
            numbers += [spot] if name not in backward else []
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.3 * min(t for *_, t, _ in marks), 3 * peak))
    by = "filled: bytes counted by Nsight Compute" if any(m[3] for m in marks) else ""
    by += "; " * bool(by) + "ring: least bytes" if not all(m[3] for m in marks) else ""
    ax.set(
        xlabel=f"FLOP per byte at DRAM ({by})", ylabel="TFLOP/s", title=f"{_heading(shape)}; recorded on {_gpu(record)}"
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    fig.legend(loc="outside lower center", ncols=2, fontsize=8.5)
    alt = "; ".join(
        f"{label}: {_short(x)} FLOP per byte ({'counted' if seen else 'least'}), {t:.3g} TFLOP/s"
        for label, x, t, seen in marks
    )
    return Picture(fig, f"roofline: {alt}")


def _shared_number(numbers: Sequence[Any], number: str, x: float, y: float) -> bool:
    """Add a stage's number to one that is so near that it would be hidden; whether there is one."""
    for there in numbers:
        if max(abs(math.log(x / there.xy[0])), abs(math.log(y / there.xy[1]))) < 0.1:
            there.set_text(f"{there.get_text()}, {number}")
            return True
    return False


def _sweep(
    names: Sequence[str] | None, dtype: str, head_dim: int, causal: bool, tokens: int | None, record: Mapping[str, Any]
) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """name -> (N, result) in the order of N: one head, or as many sequences as make `tokens` rows together."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for r in record["results"]:
        if r["kind"] not in ("stage", "peer") or (names is not None and r["name"] not in names):
            continue
        batch, heads, n, d = r["shape"]
        here = batch * heads == 1 if tokens is None else (batch * n, heads * d) == (tokens, 2048)
        if here and (r["dtype"], d, r.get("causal", False)) == (dtype, head_dim, causal):
            found.setdefault(r["name"], []).append((n, r))
    order = found if names is None else [name for name in names if name in found]
    return {name: sorted(found[name], key=lambda pair: pair[0]) for name in order if len(found[name]) > 1}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The power of x that y grows with, between the two largest x."""
    return math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])


@styled
def measured_times(
    names: Sequence[str] | None = None,
    *,
    dtype: str = "float32",
    head_dim: int = 64,
    causal: bool = False,
    tokens: int | None = None,
    record: Any = None,
) -> Picture | Text:
    """Recorded time against N, both logarithmic, with the slope at the end of each line: the power of N.

    Args:
        tokens: None for one head, whose time grows with N squared once the GPU is full; or 16384 for as many sequences
            as make that many rows, with 2048 columns of all heads together: then it grows with N.
    """
    record = recorded() if record is None else record
    if record is None:
        return Text(f"*({NO_RECORD})*")
    lines = _sweep(names, dtype, head_dim, causal, tokens, record)
    if not lines:
        return Text(f"*(the record has no {dtype} at several N, d = {head_dim})*")
    fig, ax = figure(7, 3.8)
    told = []
    colours, dashes = iter(2 * LINES), iter(2 * ("--", ":", "-.", (0, (6, 1))))
    for name, points in lines.items():
        x, y = [n for n, _ in points], [r["ms"] for _, r in points]
        label = f"{name}: $N^{{{slope(x, y):.2f}}}$"
        if points[0][1]["kind"] == "peer":
            ax.plot(x, y, label=label, color=PEER, linestyle=next(dashes), linewidth=1.5)
        else:
            ax.plot(x, y, label=label, color=next(colours), marker="o", markersize=4)
        told.append(f"{name}: N^{slope(x, y):.2f}, {y[-1]:.3g} ms at N = {x[-1]}")
    ticks = sorted({n for points in lines.values() for n, _ in points})
    ax.set(xscale="log", yscale="log", xlabel="N", ylabel="milliseconds")
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    work = "one head" if tokens is None else f"{tokens} rows in all, {2048 // head_dim} heads"
    ax.set_title(f"d = {head_dim}, {dtype}, {work}{', causal' * causal}; recorded on {_gpu(record)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, f"time against N, {dtype}, d = {head_dim}, {work}: {'; '.join(told)}")


@styled
def measured_memory(
    names: Sequence[str] | None = None, *, head_dim: int = 64, dtype: str = "float32", record: Any = None
) -> Picture | Text:
    """Recorded device memory against N, one head: Q, K, V, O and whatever else an implementation had allocated."""
    record = recorded() if record is None else record
    if record is None:
        return Text(f"*({NO_RECORD})*")
    lines = {
        name: [(n, Case(tuple(r["shape"]), dtype).bytes + r["extra_bytes"]) for n, r in points]
        for name, points in _sweep(names, dtype, head_dim, False, None, record).items()
        if all(r.get("extra_bytes") is not None for _, r in points)
    }
    if not lines:
        return Text(f"*(the record has no memory at several N, {dtype}, d = {head_dim})*")
    together: dict[tuple[tuple[int, int], ...], list[str]] = {}  # names whose lines would hide one another
    for name, points in lines.items():
        together.setdefault(tuple(points), []).append(name)
    fig, ax = figure(7, 3.4)
    told = []
    for points, those in together.items():
        x, y = zip(*points, strict=True)
        ax.plot(x, y, marker="o", markersize=4, label="\n".join(those))
        told.append(f"{', '.join(those)}: {bytes_text(y[-1])} at N = {x[-1]}, N^{slope(x, y):.2f}")
    ticks = sorted({n for points in lines.values() for n, _ in points})
    ax.set(xscale="log", yscale="log", xlabel="N", ylabel="device memory")
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    low, high = (round(math.log2(limit)) for limit in ax.get_ylim())
    sizes = [2**p for p in range(low, high + 1, 2)]
    ax.set_yticks(sizes, [bytes_text(size) for size in sizes])
    ax.set_title(f"One head, d = {head_dim}, {dtype}; recorded on {_gpu(record)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, f"memory against N: {'; '.join(told)}")


@styled
def measured_steps(
    shape: Sequence[int], labels: Mapping[str, Mapping[str, str]], *, title: str = "", record: Any = None
) -> Picture | Text:
    """Recorded TFLOP/s of variants and experiments at one shape, one bar each; one below the best so far is marked.

    Args:
        shape: (batch, heads, n, head_dim).
        labels: {label: what the record's result has, such as {"kind": "experiment", "name": "register_tiles: ..."}}.
        record: another record than the committed one.

    Returns:
        A picture; where one of them is not recorded, a sentence that says so.
    """
    record = recorded() if record is None else record
    results = [r for r in (record or {}).get("results", ()) if tuple(r["shape"]) == tuple(shape)]
    found = {label: next((r for r in results if (r | wanted) == r), None) for label, wanted in labels.items()}
    missing = [label for label, result in found.items() if result is None]
    if missing:
        return Text(f"*(not yet recorded: {', '.join(missing)})*")
    values = [result["tflops"] for result in found.values()]
    slower = [value < 0.99 * max(values[:i], default=0.0) for i, value in enumerate(values)]  # less is noise
    fig, ax = figure(7.6, 1.1 + 0.36 * len(values))
    bars = ax.barh(list(found), values, color=[WRITE if less else GPU for less in slower], height=0.7)
    texts = [f"{value:.1f}{'  slower' * less}" for value, less in zip(values, slower, strict=True)]
    ax.bar_label(bars, texts, padding=4)
    ax.invert_yaxis()
    ax.margins(x=0.14)
    batch, heads, n, head_dim = shape
    ax.set_title(title or f"batch {batch}, heads {heads}, N = {n}, d = {head_dim}")
    ax.set_xlabel(f"TFLOP/s (more is better); recorded on {record['device'].get('name', 'a GPU')}")
    return Picture(fig, "; ".join(f"{label}: {text} TFLOP/s" for label, text in zip(found, texts, strict=True)))


def result(*, record: Any = None, **wanted: Any) -> dict[str, Any] | None:
    """The first recorded result with all of these values, such as name=, kind=, dtype=, shape=, note=; or None."""
    record = recorded() if record is None else record
    wanted = {key: list(value) if isinstance(value, tuple) else value for key, value in wanted.items()}
    return next((r for r in (record or {}).get("results", ()) if {**r, **wanted} == r), None)


def times_as_fast(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> str:
    """How many times as fast one recorded result is as another: 1.23×, and from .. to if one's spread is above 5 %.

    Where one of them is a step that is not measured, the text says so.
    """
    if math.isnan(slower["ms"] / faster["ms"]):
        return steps.NOT_MEASURED
    text = f"{slower['ms'] / faster['ms']:.2f}×"
    if all(r["ms_max"] - r["ms_min"] <= 0.05 * r["ms"] for r in (slower, faster)):
        return text
    return f"{text} ({slower['ms_min'] / faster['ms_max']:.2f} to {slower['ms_max'] / faster['ms_min']:.2f})"


def variant_times(stage: str, shape: Sequence[int], size: str, *, record: Any = None) -> dict[int, float]:
    """Recorded milliseconds of a stage with other tile sizes: {value of `size`: ms}, in the record's order.

    Args:
        shape: (batch, heads, n, head_dim). size: the size that is varied, such as "BLOCK_M".
        record: another record than the committed one.
    """
    record = recorded() if record is None else record
    found = {}
    for r in (record or {}).get("results", ()):
        if (r["kind"], r["name"], tuple(r["shape"])) == ("variant", stage, tuple(shape)):
            sizes = dict(part.split("=") for part in r["note"].split())
            found[int(sizes[size])] = r["ms"]
    return found


def experiment_times(
    stage: str, shape: Sequence[int], *, dtype: str = "float32", causal: bool = False, record: Any = None
) -> dict[str, float]:
    """Recorded milliseconds of a stage and of its experiments, each under its own name; {} without a record.

    Args:
        shape: (batch, heads, n, head_dim). record: another record than the committed one.
    """
    record = recorded() if record is None else record
    wanted, found = (tuple(shape), dtype, causal), {}
    for r in (record or {}).get("results", ()):
        name, _, experiment = r["name"].partition(": ")
        at = tuple(r["shape"]), r.get("dtype"), r.get("causal", False)
        if name == stage and at == wanted and r["kind"] in ("stage", "experiment"):
            found[experiment or name] = r["ms"]
    return found


@styled
def measured_tiles(
    shape: Sequence[int], *, threads: int = 128, threads_x: int = 8, record: Any = None
) -> Picture | Text:
    """Recorded TFLOP/s of 04 with other register tiles, as a heat map: rows of a thread's tile against its keys.

    Args:
        shape: (batch, heads, n, head_dim). threads, threads_x: of a block, and of a row; the same for all tiles.
        record: another record than the committed one.
    """
    record = recorded() if record is None else record
    found: dict[tuple[int, int], float] = {}
    for r in (record or {}).get("results", ()):
        if r["name"] == "register_tiles" and r["kind"] == "variant" and tuple(r["shape"]) == tuple(shape):
            sizes = {name: int(size) for name, _, size in (word.partition("=") for word in r["note"].split())}
            if (sizes.get("THREADS"), sizes.get("THREADS_X")) == (threads, threads_x):
                found[sizes["BLOCK_M"] * threads_x // threads, sizes["BLOCK_N"] // threads_x] = r["tflops"]
    if not found:
        return Text(f"*({NO_RECORD})*")
    rows, keys = (sorted({tile[axis] for tile in found}) for axis in (0, 1))
    speeds = np.array([[found.get((m, n), np.nan) for n in keys] for m in rows])
    fig, ax = figure(1.9 + 0.9 * len(keys), 1.3 + 0.55 * len(rows))
    image = ax.imshow(speeds, cmap="viridis", vmin=0, aspect="auto")
    for (i, j), speed in np.ndenumerate(speeds):
        dark = not np.isnan(speed) and speed < 0.6 * np.nanmax(speeds)
        text = "–" if np.isnan(speed) else f"{speed:.1f}"
        ax.text(j, i, text, ha="center", va="center", color="white" if dark else "black")
    ax.set_xticks(range(len(keys)), keys)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlabel="keys a thread", ylabel="rows a thread")
    ax.set_title(f"{threads} threads, {_heading(shape)}; recorded on {_gpu(record)}", fontsize=9)
    fig.colorbar(image, label="TFLOP/s")
    return Picture(fig, "; ".join(f"{m} x {n} scores: {found[m, n]:.1f} TFLOP/s" for m, n in sorted(found)))


@styled
def measured_gradients(
    shapes: Sequence[Sequence[int]],
    names: Sequence[str],
    *,
    dtype: str = "float32",
    causal: bool = False,
    record: Any = None,
) -> Picture | Text:
    """Recorded TFLOP/s of gradients at several shapes side by side, as `measured_ladder` draws outputs.

    Five products are counted, whatever a kernel computes. Where nothing is recorded, a sentence that says so.
    """
    record = recorded() if record is None else record
    found = {
        tuple(shape): measurements(shape, names, dtype=dtype, causal=causal, record=record, backward=True)
        for shape in shapes
    }
    found = {shape: results for shape, results in found.items() if results}
    roof = roof_name(dtype)
    if record is None or not found or roof not in _roofs(record):
        return Text(f"*({NO_RECORD if record is None else 'not yet recorded'}: the gradients in {dtype})*")
    top = _roofs(record)[roof]["tflops"]
    fig, axes = figure(8.6, 1.2 + 0.36 * len(names), columns=len(found))
    told = []
    for i, (shape, results) in enumerate(found.items()):
        ax = np.atleast_1d(axes)[i]
        by_name = {r["name"]: {**r, "kind": {"backward": "stage"}.get(r["kind"], "peer")} for r in results}
        texts = _ladder_panel(ax, by_name, names, top)
        if i:
            ax.set_yticklabels([])
        ax.set_title(textwrap.fill(_heading(shape, dtype, causal), 84 // len(found)), fontsize=10)
        told += [f"d = {shape[3]}, {name}: {text}" for name, text in zip(names, texts, strict=True)]
    fig.supxlabel(f"TFLOP/s (more is better); dashed: {roof}, {top:.3g}; recorded on {_gpu(record)}", fontsize=10)
    return Picture(fig, f"gradients, TFLOP/s and share of {roof}: {'; '.join(told)}")


def gradient_ablations(
    stage: str, shape: Sequence[int], *, dtype: str, causal: bool = False, record: Any = None
) -> list[tuple[str, dict[str, Any]]]:
    """Recorded experiments with the gradients of a stage, (what was changed, result), and first the stage as it is."""
    record = recorded() if record is None else record
    wanted = (tuple(shape), dtype, causal)
    return [
        (r["name"].partition(": ")[2] or "as it is", r)
        for r in sorted((record or {}).get("results", ()), key=lambda r: ": " in r["name"])
        if r["name"].partition(": ")[0] == stage
        and (tuple(r["shape"]), r.get("dtype"), r.get("causal", False)) == wanted
        and r["kind"] in ("backward", "backward experiment")
    ]
