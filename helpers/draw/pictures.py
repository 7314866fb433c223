"""Pictures of what attention does and of how a kernel does it: maps, lines, grids, warps, banks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.draw.banks import BANKS, wavefronts
from helpers.draw.picture import (
    GPU,
    IDLE,
    LINES,
    MOVED,
    PEER,
    READ,
    ROOF,
    WRITE,
    Picture,
    bytes_text,
    figure,
    styled,
)


@styled
def heatmap(
    matrices: Mapping[str, np.ndarray],
    *,
    xlabel: str = "key",
    ylabel: str = "query",
    colour: str = "weight",
    vmax: float | None = None,
) -> Picture:
    """Matrices (rows, columns) side by side, each under its title, on one colour scale from 0 to vmax (or the max)."""
    fig, axes = figure(0.9 + 2.9 * len(matrices), 3.2, columns=len(matrices))
    top = vmax if vmax is not None else max(float(np.max(m)) for m in matrices.values())
    for ax, (title, matrix) in zip(np.atleast_1d(axes), matrices.items(), strict=True):
        image = ax.imshow(matrix, vmin=0, vmax=top, cmap="viridis", interpolation="nearest", aspect="auto")
        ax.set(title=title, xlabel=xlabel)
    np.atleast_1d(axes)[0].set_ylabel(ylabel)
    fig.colorbar(image, ax=axes, label=colour, shrink=0.85)
    return Picture(fig, f"heat maps, {ylabel} against {xlabel}: {'; '.join(matrices)}")


@styled
def token_heatmap(
    matrices: Mapping[str, np.ndarray], tokens: Sequence[str], rows: Sequence[int], columns: Sequence[int]
) -> Picture:
    """Attention weights between words: some rows and columns of each matrix (N, N_kv), labelled with their tokens.

    The colours follow the square root of the weight, so that small weights show as well.
    """
    across = min(3, len(matrices))
    down = -(-len(matrices) // across)
    panel = 0.6 + 0.105 * max(len(rows), len(columns))
    fig, axes = figure(panel * across + 0.5, (panel + 0.2) * down, rows=down, columns=across)
    top = max(float(m[np.ix_(rows, columns)].max()) for m in matrices.values())
    norm = PowerNorm(0.5, vmin=0, vmax=top)
    axes = np.atleast_1d(axes).ravel()
    for ax, (title, matrix) in zip(axes, matrices.items(), strict=False):
        image = ax.imshow(matrix[np.ix_(rows, columns)], norm=norm, cmap="viridis", interpolation="nearest")
        ax.set_xticks(range(len(columns)), [tokens[i] for i in columns], rotation=90, fontsize=6.5)
        ax.set_yticks(range(len(rows)), [tokens[i] for i in rows], fontsize=6.5)
        ax.tick_params(length=0, pad=2)
        ax.set_title(title)
    free = axes[len(matrices) :]
    for ax in free:
        ax.set_axis_off()
    bar = {"cax": free[0].inset_axes((0, 0.1, 0.06, 0.8))} if len(free) else {"ax": axes, "shrink": 0.6, "aspect": 30}
    fig.colorbar(image, label="weight", **bar)
    return Picture(fig, f"attention weights, {len(rows)} tokens: {'; '.join(matrices)}")


@styled
def roofline(*, tflops: float, gbps: float, at: Mapping[str, float], title: str = "") -> Picture:
    """The two roofs of a machine, TFLOP/s against FLOP per byte, and how high they are for some kernels.

    Args:
        tflops: the flat roof. gbps: the slope of the other one.
        at: {label: FLOP per byte}; each is a dot on the roof, that is the most it can reach.
    """
    ridge = 1e3 * tflops / gbps
    low, high = min(0.25, *at.values()) / 2, 4 * max(2 * ridge, *at.values())
    fig, ax = figure(7, 3.6)
    x = np.array([low, ridge, high])
    ax.plot(x, np.minimum(tflops, x * gbps / 1e3), color=ROOF)
    slope, level = f"memory: {gbps:,.0f} GB/s", f"arithmetic: {tflops:.3g} TFLOP/s"
    middle = math.sqrt(low * ridge)
    ax.annotate(slope, (middle, middle * gbps / 1e3), xytext=(8, -8), textcoords="offset points")
    ax.annotate(level, (high, tflops), xytext=(0, 6), textcoords="offset points", ha="right")
    for (label, intensity), colour in zip(at.items(), LINES, strict=False):
        height = min(tflops, intensity * gbps / 1e3)
        ax.plot([intensity, intensity], [0, height], color=colour, linewidth=1, linestyle=":")
        ax.plot(intensity, height, "o", markersize=8, color=colour, label=f"{label}: {intensity:,.1f}")
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low * gbps / 1e3, 3 * tflops))
    ax.set(xlabel="FLOP per byte moved", ylabel="TFLOP/s, at most", title=title)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.legend(loc="lower right", title="FLOP per byte", alignment="left", frameon=True, edgecolor="white", framealpha=1)
    marks = "; ".join(f"{label}: {intensity:,.1f}" for label, intensity in at.items())
    return Picture(fig, f"roofs meet at {ridge:.1f} FLOP per byte; {marks}")


@styled
def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    logx: bool = False,
    logy: bool = False,
    levels: Mapping[str, float] | None = None,
    markers: bool = True,
) -> Picture:
    """Curves {label: (x, y)} in one plot; `levels` {label: y} are drawn as dashed horizontal lines."""
    fig, ax = figure(7, 3.4)
    for label, (x, y) in curves.items():
        ax.plot(x, y, marker="o" if markers else None, markersize=4, label=label)
    for label, y in (levels or {}).items():
        ax.axhline(y, color=PEER, linewidth=1, linestyle="--")
        ax.annotate(label, (0.01, y), xycoords=("axes fraction", "data"), va="bottom", fontsize=9, color="#555555")
    if logx:
        ax.set_xscale("log", base=2)
    if logy:
        ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if len(curves) > 1:
        ax.legend()
    return Picture(fig, f"{title or ylabel} against {xlabel}: {'; '.join(curves)}")


@styled
def memory_against_n(
    *,
    d: int = 64,
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    cards: Mapping[str, float] | None = None,
) -> Picture:
    """Bytes of the N x N scores beside those of Q, K, V and O together: one head, float32, against N.

    cards: {name: bytes}, drawn as dashed lines; a GPU of 80 GiB where it is None.
    """
    fig, ax = figure(7, 3.4)
    n = np.array(lengths, dtype=float)
    for label, size, colour in (("scores S, N × N", 4 * n * n, WRITE), ("Q, K, V and O, N × d each", 16 * n * d, GPU)):
        ax.plot(n, size, marker="o", markersize=4, color=colour, label=label)
    for label, size in ({"a GPU of 80 GiB": 80 * 2**30} if cards is None else cards).items():
        ax.axhline(size, color=PEER, linewidth=1, linestyle="--")
        ax.annotate(label, (n[0], size), va="bottom", fontsize=9, color="#555555")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(n, [f"{int(x)}" for x in n], fontsize=9)
    ticks = [2**p for p in range(18, 38, 4)]
    ax.set_yticks(ticks, [bytes_text(t) for t in ticks])
    ax.set(xlabel="N", ylabel="memory", title=f"One head, d = {d}, float32")
    ax.margins(y=0.09)  # room for the topmost card's name
    ax.legend(loc="lower right")
    alt = f"memory against N: at N = {lengths[-1]} the scores take {bytes_text(4 * lengths[-1] ** 2)}, "
    return Picture(fig, alt + f"Q, K, V and O together {bytes_text(16 * lengths[-1] * d)}")


@styled
def grid_picture(n: int, block: int) -> Picture:
    """Which thread owns which row: a line of cells per block, coloured where row = blockIdx * block + threadIdx < n."""
    grid = -(-n // block)
    row = np.arange(grid)[:, None] * block + np.arange(block)
    fig, ax = figure(7.5, 0.95 + 0.36 * grid)
    ax.pcolormesh(row < n, cmap=ListedColormap([IDLE, MOVED]), vmin=0, vmax=1, edgecolors="white", linewidth=0.6)
    for b in range(grid):
        live = min(block, n - b * block)
        if live > block // 2:
            ax.text(0.3, b + 0.5, f"row {row[b, 0]}", va="center", fontsize=9)
            ax.text(live - 0.3, b + 0.5, f"row {row[b, live - 1]}", ha="right", va="center", fontsize=9)
        else:  # too few cells to write in
            text = f"rows {row[b, 0]} to {row[b, live - 1]}" if live > 1 else f"row {row[b, 0]}"
            ax.text(live + 0.5, b + 0.5, text, va="center", fontsize=9)
        if live < block:
            ax.text(block - 0.3, b + 0.5, f"{block - live} idle", ha="right", va="center", fontsize=9, color="#666666")
    ax.set(xlim=(0, block), ylim=(grid, 0), xlabel="threadIdx.x", ylabel="blockIdx.x")
    ax.set_xticks([0.5, *np.arange(16, block + 1, 16) - 0.5], [0, *np.arange(16, block + 1, 16) - 1])
    ax.set_yticks(np.arange(grid) + 0.5, range(grid))
    ax.spines[:].set_visible(False)
    ax.set_title(f"{n} rows, blocks of {block}: a grid of {grid}")
    return Picture(fig, f"{n} rows over {grid} blocks of {block} threads; {grid * block - n} threads are idle")


@styled
def matrices(masks: Mapping[str, np.ndarray], *, title: str = "", legend: Mapping[int, str] | None = None) -> Picture:
    """Matrices drawn cell by cell, to one scale: who reads and writes what.

    Args:
        masks: {name: integer array (rows, columns)}; 0 untouched, 1 read, 2 written, 3 moved along with what was asked.
        legend: what 1, 2 and 3 are called.
    """
    # Inches. Every cell has the same size in all matrices, and a matrix's slot has room for its title.
    rows, columns = (max(m.shape[0] for m in masks.values()), sum(m.shape[1] for m in masks.values()))
    cell = min(6.8 / columns, 2.3 / rows, 0.2)
    slots = [max(m.shape[1] * cell, 0.085 * max(map(len, name.split("\n")))) + 0.3 for name, m in masks.items()]
    above = 0.1 + 0.22 * (1 + max(name.count("\n") for name in masks)) + (0.25 if title else 0)
    width, height = 0.2 + sum(slots), above + rows * cell + 0.45
    fig = Figure(figsize=(width, height))
    colours = ListedColormap([IDLE, READ, WRITE, MOVED])
    left = 0.2
    for slot, (name, mask) in zip(slots, masks.items(), strict=True):
        size = (mask.shape[1] * cell, mask.shape[0] * cell)
        bottom = height - above - size[1]
        ax = fig.add_axes((left / width, bottom / height, size[0] / width, size[1] / height))
        left += slot
        lines = 0.5 if cell > 0.05 else 0  # around cells so small they would hide the colour
        ax.pcolormesh(mask, cmap=colours, vmin=0, vmax=3, edgecolors="white", linewidth=lines)
        ax.invert_yaxis()
        ax.set_title(name, fontsize=10)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
    words = legend or {1: "read", 2: "written", 3: "moved along"}
    used = sorted(set().union(*(np.unique(mask).tolist() for mask in masks.values())) - {0})
    handles = [Patch(color=colours(i), label=words.get(i, "")) for i in used]
    fig.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.1 / width, 0), ncols=len(handles))
    if title:
        fig.text(0.2 / width, 1 - 0.08 / height, title, va="top", fontsize=11)
    touched = "; ".join(f"{name}: {int(np.count_nonzero(mask))} of {mask.size} cells" for name, mask in masks.items())
    return Picture(fig, f"{title} {touched}".strip())


SECTOR = 8  # words of 4 bytes that memory moves at least: 32 bytes


def sectors(words: Sequence[int]) -> int:
    """How many 32-byte sectors hold these words (indices into an array of 4-byte elements, itself aligned)."""
    return len({int(word) // SECTOR for word in np.ravel(words)})


@styled
def warp_picture(accesses: Mapping[str, tuple[tuple[int, int], Sequence[int]]], *, verb: str = "requested") -> Picture:
    """What the 32 lanes of a warp touch in one instruction, and what memory moves for it.

    Args:
        accesses: {name: (shape of the row-major array, word index of each lane)}; the first rows and columns are drawn.
    """
    panels, counts = {}, []
    for name, (shape, words) in accesses.items():
        flat = np.zeros(shape[0] * shape[1], dtype=int)
        for sector in {int(word) // SECTOR for word in words}:
            flat[sector * SECTOR : (sector + 1) * SECTOR] = 3
        flat[np.asarray(words)] = 1
        asked, moved = len({int(word) for word in words}), sectors(words)
        count = f"{asked} word{'s' * (asked > 1)}, {moved} sector{'s' * (moved > 1)}"
        panels[f"{name}\n{count}"] = flat.reshape(shape)
        counts.append(f"{name}: {count}")
    picture = matrices(panels, legend={1: verb, 3: "moved along, 32 bytes at a time"})
    picture.alt = f"one instruction of a warp: {'; '.join(counts)}"
    return picture


@styled
def bank_picture(accesses: Mapping[str, Sequence[int]]) -> Picture:
    """Which bank of shared memory each lane of a warp requests, in one instruction.

    Args:
        accesses: {name: word index of each lane}, words of 4 bytes.
    """
    colours = ListedColormap([IDLE, READ, WRITE])
    fig, axes = figure(0.5 + 2.5 * len(accesses), 3.7 if len(accesses) > 1 else 4.0, columns=len(accesses))
    counts = []
    for ax, (name, of_lanes) in zip(np.atleast_1d(axes), accesses.items(), strict=True):
        words = np.ravel(of_lanes).astype(int)
        first = {bank: words[words % BANKS == bank][0] for bank in set((words % BANKS).tolist())}
        cells = np.zeros((len(words), BANKS), dtype=int)
        for lane, word in enumerate(words):
            cells[lane, word % BANKS] = 1 if word == first[word % BANKS] else 2
        ax.pcolormesh(cells, cmap=colours, vmin=0, vmax=2, edgecolors="white", linewidth=0.3)
        ax.invert_yaxis()
        ax.set_aspect("equal")
        count = f"{wavefronts(words)} wavefront{'s' * (wavefronts(words) > 1)}"
        ax.set_title(f"{textwrap.fill(name, 26)}\n{count}", fontsize=10)
        ax.set_xticks([0.5, 8.5, 16.5, 24.5, 31.5], [0, 8, 16, 24, 31])
        ax.set_yticks([0.5, 8.5, 16.5, 24.5, 31.5], [0, 8, 16, 24, 31])
        ax.set_xlabel("bank")
        ax.spines[:].set_visible(False)
        counts.append(f"{name}: {count}")
    np.atleast_1d(axes)[0].set_ylabel("lane")
    handles = [Patch(color=READ, label="served in the first wavefront"), Patch(color=WRITE, label="has to wait")]
    fig.legend(handles=handles, loc="outside lower left", ncols=min(2, len(accesses)))
    return Picture(fig, f"banks requested by the lanes of a warp: {'; '.join(counts)}")


@styled
def rescaling(scores: Sequence[float], block_n: int) -> Picture:
    """Online softmax on one row of scores: each key's exp(score - m_i) after every tile of block_n keys.

    A dashed outline is what a key's bar was before this tile brought a larger maximum.
    """
    s = np.asarray(scores, dtype=float)
    tiles = -(-len(s) // block_n)
    fig, axes = figure(1.2 + 2.4 * tiles, 2.9, columns=tiles)
    m_i, told = -np.inf, []
    for tile, ax in enumerate(np.atleast_1d(axes)):
        seen, first = min((tile + 1) * block_n, len(s)), tile * block_n
        m_new = max(m_i, float(s[first:seen].max()))
        if m_new > m_i:
            ax.bar(range(first), np.exp(s[:first] - m_i), fill=False, edgecolor=PEER, linestyle="--", linewidth=1)
        m_i = m_new
        weights = np.exp(s[:seen] - m_i)
        bars = ax.bar(range(seen), weights, color=[GPU] * first + [WRITE] * (seen - first))
        ax.bar_label(bars, [f"{weight:.2f}" for weight in weights], padding=1, fontsize=8)
        ax.set(xlim=(-0.6, len(s) - 0.4), ylim=(0, 1.15), xlabel="key")
        ax.set_title(f"after tile {tile}\nm_i = {m_i:g}, l_i = {weights.sum():.2f}", fontsize=10)
        ax.set_xticks(range(len(s)))
        ax.set_yticks([0, 0.5, 1] if tile == 0 else [])
        told.append(f"after tile {tile} m_i = {m_i:g}, l_i = {weights.sum():.2f}")
    np.atleast_1d(axes)[0].set_ylabel("exp(score − m_i)")
    handles = [
        Patch(color=WRITE, label="this tile"),
        Patch(color=GPU, label="tiles before"),
        Patch(fill=False, edgecolor=PEER, linestyle="--", label="before the rescaling"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return Picture(fig, f"{len(s)} scores in tiles of {block_n}: {'; '.join(told)}")


@styled
def running_softmax(traces: Mapping[str, Any], rows: Sequence[int]) -> Picture:
    """m_i and l_i of some rows, tile after tile, and the share of all rows that each tile makes rescale.

    Args:
        traces: {title: reference.OnlineSoftmaxTrace}, a column each.
        rows: the rows that are drawn; the shares at the bottom are of all rows.
    """
    fig, axes = figure(3.6 * len(traces) + 0.8, 5.6, rows=3, columns=len(traces))
    axes = np.reshape(axes, (3, len(traces)))
    told = []
    for column, (title, trace) in enumerate(traces.items()):
        tiles = np.arange(len(trace.m_i))
        for row in rows:
            axes[0, column].step(tiles, trace.m_i[:, row], where="mid", linewidth=1.5, label=f"row {row}")
            axes[1, column].step(tiles, trace.l_i[:, row], where="mid", linewidth=1.5)
        share = (np.diff(trace.m_i, axis=0) > 0).mean(axis=1)
        axes[2, column].bar(tiles[1:], share, color=GPU)
        axes[0, column].set_title(title)
        axes[1, column].set_yscale("log")
        axes[2, column].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes[2, column].set_xlabel("tile")
        for ax in axes[:, column]:
            ax.set_xlim(-0.7, len(tiles) - 0.3)
            ax.xaxis.get_major_locator().set_params(integer=True)
        told.append(f"{title}: the maximum of a row rises {share.sum():.2f} times after its first tile")
    for kind, ylabel in enumerate(("m_i", "l_i", "rows that rescale")):
        axes[kind, 0].set_ylabel(ylabel)
        limits = [ax.get_ylim() for ax in axes[kind]]
        for ax in axes[kind]:
            ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(rows), fontsize=9)
    return Picture(fig, f"m_i, l_i and the rows that rescale, tile after tile; {'; '.join(told)}")


@styled
def fragments(held: Mapping[str, np.ndarray]) -> Picture:
    """16 x 16 matrices, in each cell the lane that holds the element; neighbours that one lane holds share a number.

    Args:
        held: {name: places}; places[lane, i] is 16 * row + column of element i of the lane's fragment. Where several
            lanes hold an element, the picture has the lowest.
    """
    fig, panels = figure(2.8 * len(held), 3.1, columns=len(held))
    for ax, (name, places) in zip(np.atleast_1d(panels), held.items(), strict=True):
        lane_of = np.full(256, -1)
        for lane in reversed(range(len(places))):
            lane_of[places[lane]] = lane
        cells = lane_of.reshape(16, 16)
        ax.pcolormesh(cells // 4 % 8, cmap="Set3", vmin=0, vmax=11)  # lanes 0 to 3 have one colour, 4 to 7 the next
        same = np.pad(cells, 1, constant_values=-1)
        for row, column in np.ndindex(16, 16):
            lane, up, down = cells[row, column], same[row, column + 1], same[row + 2, column + 1]
            left, right = same[row + 1, column], same[row + 1, column + 2]
            if lane not in (up, left):
                x, y = column + (1.0 if right == lane else 0.5), row + (1.0 if down == lane else 0.5)
                ax.text(x, y, lane, ha="center", va="center", fontsize=7)
        ax.invert_yaxis()
        ax.set(title=f"{name}: which lane", xlabel="column", xticks=[], yticks=[], aspect="equal")
    np.atleast_1d(panels)[0].set_ylabel("row")
    return Picture(fig, f"matrices of 16 x 16, in each cell the lane that holds the element: {', '.join(held)}")


@styled
def chunk_places(places: Mapping[str, np.ndarray], *, marked: int = 3) -> Picture:
    """Rows of a tile in shared memory: each cell is a place of 16 bytes, its number the chunk of the row stored there.

    Args:
        places: {title: place}; place[row, chunk], from 0. marked: the chunk in colour, in every row.
    """
    fig, panels = figure(3.5 * len(places), 2.7, columns=len(places))
    for ax, (title, place) in zip(np.atleast_1d(panels), places.items(), strict=True):
        chunk_at = np.zeros(place.shape, int)
        np.put_along_axis(chunk_at, place, np.arange(place.shape[1])[None].repeat(len(place), 0), axis=1)
        ax.pcolormesh(chunk_at == marked, cmap="Oranges", vmin=0, vmax=2, edgecolors="white")
        for (row, at), chunk in np.ndenumerate(chunk_at):
            ax.text(at + 0.5, row + 0.5, chunk, ha="center", va="center")
        ax.invert_yaxis()
        ax.set(title=title, xlabel="place in the row: 4 banks each", ylabel="row")
        ax.set_xticks(np.arange(place.shape[1]) + 0.5, range(place.shape[1]))
        ax.set_yticks(np.arange(len(place)) + 0.5, range(len(place)))
    return Picture(
        fig, f"which 16-byte chunk of each row is stored where: {', '.join(places)}; chunk {marked} is marked"
    )


@styled
def lane_pictures(numberings: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Picture:
    """Where the lanes of a warp are in a tile of threads, side by side: {title: (x of each lane, y of each lane)}.

    Four neighbouring lanes have one colour.
    """
    fig, panels = figure(4.3 * len(numberings), 2.4, columns=len(numberings))
    for ax, (title, (x, y)) in zip(np.atleast_1d(panels), numberings.items(), strict=True):
        cells = np.zeros((int(max(y)) + 1, int(max(x)) + 1))
        cells[y, x] = np.arange(len(x)) // 4
        ax.pcolormesh(cells, cmap="tab10", vmin=0, vmax=9, alpha=0.45, edgecolors="white")
        for lane in range(len(x)):
            ax.text(x[lane] + 0.5, y[lane] + 0.5, lane, ha="center", va="center")
        ax.set(title=title, xlabel="x (keys)", ylabel="y (rows)", xticks=[], yticks=[])
        ax.invert_yaxis()
    return Picture(fig, f"lanes of a warp as a tile of threads: {'; '.join(numberings)}")
