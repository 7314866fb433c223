"""The record of a GPU run against N: time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from helpers.bench.cases import Case
from helpers.bench.plots import drawn, gpu_of
from helpers.draw.picture import LINES, PEER, Picture, Text, bytes_text, figure, styled


def _sweep(
    names: Sequence[str] | None, dtype: str, head_dim: int, causal: bool, tokens: int | None, record: Mapping[str, Any]
) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return name -> (N, result) in the order of N: one head, or sequences that make `tokens` rows together."""
    points: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for r in record["results"]:
        if r["kind"] not in ("stage", "peer") or (names is not None and r["name"] not in names):
            continue
        batch, heads, n, d = r["shape"]
        here = batch * heads == 1 if tokens is None else (batch * n, heads * d) == (tokens, 2048)
        if here and (r["dtype"], d, r.get("causal", False)) == (dtype, head_dim, causal):
            points.setdefault(r["name"], []).append((n, r))
    order = points if names is None else [name for name in names if name in points]
    return {name: sorted(points[name], key=lambda pair: pair[0]) for name in order if len(points[name]) > 1}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent with which y grows with x, between the two largest x."""
    return math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])


@styled
@drawn
def measured_times(
    names: Sequence[str] | None = None,
    *,
    dtype: str = "float32",
    head_dim: int = 64,
    causal: bool = False,
    tokens: int | None = None,
    record: Any = None,
) -> Picture | Text:
    """Draw the recorded time against N, both logarithmic, with the slope at the end of each line: the power of N.

    Args:
        tokens: None for one head, whose time grows with N squared once the GPU is full; or 16384 for as many sequences
            as make that many rows, with 2048 columns of all heads together: then it grows with N.
    """
    lines = _sweep(names, dtype, head_dim, causal, tokens, record)
    if not lines:
        return Text(f"*(the record has no {dtype} at several N, d = {head_dim})*")
    fig, ax = figure(7, 3.8)
    described = []
    colours, dashes = iter(2 * LINES), iter(2 * ("--", ":", "-.", (0, (6, 1))))
    for name, points in lines.items():
        x, y = [n for n, _ in points], [r["ms"] for _, r in points]
        label = f"{name}: $N^{{{slope(x, y):.2f}}}$"
        if points[0][1]["kind"] == "peer":
            ax.plot(x, y, label=label, color=PEER, linestyle=next(dashes), linewidth=1.5)
        else:
            ax.plot(x, y, label=label, color=next(colours), marker="o", markersize=4)
        described.append(f"{name}: N^{slope(x, y):.2f}, {y[-1]:.3g} ms at N = {x[-1]}")
    ticks = sorted({n for points in lines.values() for n, _ in points})
    ax.set(xscale="log", yscale="log", xlabel="N", ylabel="milliseconds")
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    work = "one head" if tokens is None else f"{tokens} rows in all, {2048 // head_dim} heads"
    ax.set_title(f"d = {head_dim}, {dtype}, {work}{', causal' * causal}; recorded on {gpu_of(record)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, f"time against N, {dtype}, d = {head_dim}, {work}: {'; '.join(described)}")


@styled
@drawn
def measured_memory(
    names: Sequence[str] | None = None, *, head_dim: int = 64, dtype: str = "float32", record: Any = None
) -> Picture | Text:
    """Draw the recorded memory against N, one head: Q, K, V, O and what an implementation allocated."""
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
    described = []
    for points, those in together.items():
        x, y = zip(*points, strict=True)
        ax.plot(x, y, marker="o", markersize=4, label="\n".join(those))
        described.append(f"{', '.join(those)}: {bytes_text(y[-1])} at N = {x[-1]}, N^{slope(x, y):.2f}")
    ticks = sorted({n for points in lines.values() for n, _ in points})
    ax.set(xscale="log", yscale="log", xlabel="N", ylabel="device memory")
    ax.set_xticks(ticks, ticks)
    ax.minorticks_off()
    low, high = (round(math.log2(limit)) for limit in ax.get_ylim())
    sizes = [2**p for p in range(low, high + 1, 2)]
    ax.set_yticks(sizes, [bytes_text(size) for size in sizes])
    ax.set_title(f"One head, d = {head_dim}, {dtype}; recorded on {gpu_of(record)}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, f"memory against N: {'; '.join(described)}")
