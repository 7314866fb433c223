"""Draw every stage on the roofline: recorded TFLOP/s against FLOP per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from helpers.attention.ladder import LADDER
from helpers.bench import counters
from helpers.bench.cases import Case
from helpers.bench.plots import drawn, gpu_of, heading
from helpers.bench.reading import measurements, roofs
from helpers.bench.results import roof_name
from helpers.draw.picture import LINES, ROOF, Picture, Text, figure, styled


class Mark(NamedTuple):
    """A stage in one type: FLOP per byte at DRAM, counted by Nsight Compute or the theoretical maximum."""

    name: str
    dtype: str
    intensity: float
    tflops: float
    counted: bool
    gradients: bool

    @property
    def label(self) -> str:
        """The stage, and its type unless that is float32."""
        return self.name if self.dtype == "float32" else f"{self.name}, {self.dtype}"

    @property
    def number(self) -> str:
        """The stage's number, in two digits."""
        return f"{LADDER[self.name].number:02}" if self.name in LADDER else ""


@styled
@drawn
def measured_roofline(
    shape: Sequence[int] = (1, 16, 4096, 64),
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    gradients: bool = False,
    record: Any = None,
    counted: Any = None,
) -> Picture | Text:
    """Draw every stage on the roofline: recorded TFLOP/s against FLOP per byte at DRAM.

    The bytes are those that Nsight Compute counted (a filled dot) if they are recorded, else the minimum: Q, K, V and O
    moved once (a ring).

    Args:
        shape: (batch, heads, n, head_dim), at which the speed was recorded.
        gradients: also the stages that compute gradients, where their bytes were counted.
        counted: replaces the committed record of helpers.bench.counters.
    """
    counted = (counters.recorded() if counted is None else counted) or {"rows": []}
    marks = [mark for dtype in dtypes for mark in _marks(shape, dtype, gradients, record, counted)]
    best = roofs(record)
    if not marks or "copy" not in best:
        return Text(f"*(the record has no stage at {tuple(shape)})*")
    gbps = best["copy"]["gbps"]
    flats = {dtype: best[roof_name(dtype)]["tflops"] for dtype in dtypes if roof_name(dtype) in best}
    peak = max(flats.values())
    low = 0.3 * min([mark.intensity for mark in marks] + [1e3 * tflops / gbps for tflops in flats.values()])
    high = 12 * max(mark.intensity for mark in marks)
    fig, ax = figure(8.4, 4.2)
    _draw_roofs(ax, gbps, flats, low, high)
    _draw_marks(ax, marks)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.3 * min(m.tflops for m in marks), 3 * peak))
    by = "filled: bytes counted by Nsight Compute" if any(m.counted for m in marks) else ""
    by += "; " * bool(by) + "ring: least bytes" if not all(m.counted for m in marks) else ""
    title = f"{heading(shape)}; recorded on {gpu_of(record)}"
    ax.set(xlabel=f"FLOP per byte at DRAM ({by})", ylabel="TFLOP/s", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    fig.legend(loc="outside lower center", ncols=2, fontsize=8.5)
    bytes_are = {True: "counted", False: "least"}
    texts = (
        f"{m.label}: {_short(m.intensity)} FLOP per byte ({bytes_are[m.counted]}), {m.tflops:.3g} TFLOP/s"
        for m in marks
    )
    return Picture(fig, f"roofline: {'; '.join(texts)}")


def _marks(
    shape: Sequence[int], dtype: str, gradients: bool, record: Mapping[str, Any], counted: Mapping[str, Any]
) -> Iterator[Mark]:
    """Yield the stages recorded in a type; those that compute gradients only if their bytes were counted."""
    backward = [name for name, stage in LADDER.items() if stage.direction == "backward"] if gradients else []
    intensity = {
        row["stage"]: row["flop"] / (row["figures"]["dram bytes read"] + row["figures"]["dram bytes written"])
        for names in (None, backward)
        for row in counters.select(counted, names, head_dim=shape[3], dtype="all")
        if row["dtype"] == dtype and "dram bytes read" in row.get("figures", {})
    }
    least = Case(tuple(shape), dtype)
    for r in measurements(shape, dtype=dtype, record=record):
        if r["kind"] == "stage":
            x = intensity.get(r["name"], least.flops / least.bytes)
            yield Mark(r["name"], dtype, x, r["tflops"], r["name"] in intensity, gradients=False)
    for r in measurements(shape, backward, dtype=dtype, record=record, backward=True):
        if r["name"] in intensity:
            yield Mark(r["name"], dtype, intensity[r["name"]], r["tflops"], True, gradients=True)


def _draw_roofs(ax: Any, gbps: float, flats: Mapping[str, float], low: float, high: float) -> None:
    """Draw the memory roof up to the highest ridge, and the matrix product of each type."""
    peak = max(flats.values())
    x = np.array([low, min(high, 1e3 * peak / gbps)])
    ax.plot(x, x * gbps / 1e3, color=ROOF)
    ridges = [1e3 * tflops / gbps for tflops in flats.values()]
    middle = math.sqrt(max(ridges) * (min(ridges) if len(ridges) > 1 else low))
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
    ax.annotate(f"memory: {gbps:,.0f} GB/s", (middle, middle * gbps / 1e3), xytext=(8, -9), **style)
    for dtype, tflops in flats.items():
        ax.plot([1e3 * tflops / gbps, high], [tflops, tflops], color=ROOF)
        text = f"{dtype} matrix product: {tflops:,.3g} TFLOP/s"
        ax.annotate(text, (1e3 * tflops / gbps, tflops), xytext=(14, 4 if tflops == peak else -12), **style)


def _draw_marks(ax: Any, marks: Sequence[Mark]) -> None:
    """Draw each stage with its number; marks that nearly hide each other share a number."""
    numbers: list[Any] = []
    for i, mark in enumerate(marks):
        colour = LINES[i % len(LINES)]
        style = {"color": colour} if mark.counted else {"color": colour, "markerfacecolor": "white"}
        text = f"{mark.label}: {_short(mark.intensity)} FLOP per byte, {mark.tflops:.3g} TFLOP/s"
        marker = "o" if mark.dtype == "float32" else "s"
        ax.plot(mark.intensity, mark.tflops, marker, markersize=8, label=text, **style)
        if mark.gradients or not _shared_number(numbers, mark):
            place = (-19, -3) if mark.gradients else _free_side(mark, marks)
            at = mark.intensity, mark.tflops
            number = ax.annotate(mark.number, at, xytext=place, textcoords="offset points", fontsize=8)
            numbers += [] if mark.gradients else [number]


def _free_side(mark: Mark, marks: Sequence[Mark]) -> tuple[int, int]:
    """Return the offset of a mark's number, in points, towards a side without other marks."""
    ratios = [m.intensity / mark.intensity for m in marks if abs(math.log(m.tflops / mark.tflops)) < 0.2]
    right, left = any(1 < x < 1.6 for x in ratios), any(1 < 1 / x < 1.6 for x in ratios)
    return (7, -3) if not right else (-6, -14) if left else (-19, -3)


def _shared_number(numbers: Sequence[Any], mark: Mark) -> bool:
    """Add a stage's number to a mark so near that it would be hidden; return whether there is one."""
    for number in numbers:
        x, y = number.xy
        if max(abs(math.log(mark.intensity / x)), abs(math.log(mark.tflops / y))) < 0.1:
            number.set_text(f"{number.get_text()}, {mark.number}")
            return True
    return False


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
