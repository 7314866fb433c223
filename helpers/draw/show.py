"""What a learner looks at: pieces of a kernel, the diff of two stages, pictures, recorded measurements.

    show.code("01_naive.cu", "softmax")            a piece of a kernel, by the name of its section
    show.diff("02_tiled.cu", "03_online_softmax.cu")
    show.grid_picture(n=200, block=64)             a picture; the last value of a cell is displayed

Every function returns an object that Jupyter displays. Texts and diffs are the same at every run. A picture is a PNG
on white, which is readable in a dark theme; its repr is a sentence that says what it shows. What is drawn from the
record of a GPU run is in measured.py, and has its names here too.
"""

from __future__ import annotations

import difflib
import html
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helpers.draw.banks import BANKS, wavefronts
from helpers.draw.picture import (  # noqa: F401 - part of this face
    CPU,
    GPU,
    IDLE,
    LINES,
    MOVED,
    PEER,
    READ,
    ROOF,
    STYLE,
    WRITE,
    Html,
    Picture,
    Text,
    figure,
    styled,
)
from helpers.draw.record_plots import (  # noqa: F401 - part of this face
    NO_RECORD,
    RECORD,
    bytes_text,
    measured_bars,
    measured_ladder,
    measured_memory,
    measured_roofline,
    measured_times,
    measurements,
    recorded,
)
from helpers.kernel import KERNELS

# ------------------------------------------------------------------------------------------------- source text


def _lines(file: str) -> list[str]:
    path = KERNELS / file
    if not path.is_file():
        names = ", ".join(sorted(p.relative_to(KERNELS).as_posix() for p in KERNELS.rglob("*.cu*")))
        raise FileNotFoundError(f"no kernel file {file!r}; there are: {names}")
    return path.read_text(encoding="utf-8").splitlines()


def sections(file: str) -> dict[str, tuple[int, int]]:
    """The pieces of a kernel file by name, each with its first and last line, both counted from 1.

    "header" is the comment at the top, "sizes" the #defines and static_asserts, "signature" the entry's head. Then
    every `// ---- name` section of the entry, and every `__device__` function with the comment above it.
    """
    lines = _lines(file)

    def first_match(pattern: str, start: int) -> int:
        """Index of the first line from `start` on that the pattern is found in; the last line if there is none."""
        return next((i for i in range(start, len(lines)) if re.search(pattern, lines[i])), len(lines) - 1)

    found: dict[str, tuple[int, int]] = {}
    comment = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    if comment:
        found["header"] = (1, comment)
    sizes = [i for i, line in enumerate(lines) if re.match(r"#\s*(if|define|endif)|static_assert", line)]
    if sizes:
        found["sizes"] = (
            sizes[0] + 1,
            first_match(r";$" if "static_assert" in lines[sizes[-1]] else "", sizes[-1]) + 1,
        )
    for i, line in enumerate(lines):
        heading = re.match(r"\s*// ---- (.*)", line)
        if heading:
            stop = first_match(r"^\s*// ---- |^}", i + 1)
            while not lines[stop - 1].strip():
                stop -= 1
            found[heading[1].strip()] = (i + 1, stop)
        elif "__global__" in line and "signature" not in found:
            found["signature"] = (i + 1, first_match(r"\{$", i) + 1)
        elif function := re.match(r"__device__ .*?(\w+)\(", line):
            above = i
            while above and lines[above - 1].startswith(("//", "template")):
                above -= 1
            found[function[1]] = (above + 1, first_match(r"^}" if not line.endswith("}") else "", i) + 1)
    return found


def _find(file: str, piece: str) -> tuple[int, int]:
    """First and last line of the piece whose name is, or begins with, `piece`."""
    names = sections(file)
    fitting = [name for name in names if name == piece] or [name for name in names if name.startswith(piece)]
    if len(fitting) != 1:
        raise KeyError(f"{file} has {len(fitting)} pieces named {piece!r}...; there are: {' | '.join(names)}")
    return names[fitting[0]]


def code(file: str, piece: str | tuple[int, int], *, to: str = "") -> Text:
    """A piece of a kernel, with its file and lines as caption.

    Args:
        file: in kernels/, such as "01_naive.cu".
        piece: the beginning of a section's name (see `sections`: "header", "sizes", "signature", "prologue", ...), or
            (first, last) line numbers, counted from 1.
        to: the piece that is shown last, with all between; `piece` alone where it is empty.

    Raises:
        FileNotFoundError: no such file. KeyError: no such section, or several that begin so. IndexError: no such lines.
    """
    lines = _lines(file)
    if isinstance(piece, str):
        first, last = _find(file, piece)
        last = _find(file, to)[1] if to else last
    else:
        first, last = piece
    if not 1 <= first <= last <= len(lines):
        raise IndexError(f"{file} has lines 1 to {len(lines)}; asked for {first} to {last}")
    body = textwrap.dedent("\n".join(lines[first - 1 : last]))
    return Text(f"[{file}](../kernels/{file}), lines {first}–{last}:\n\n```c++\n{body}\n```")


def diff(file_a: str, file_b: str, *, context: int = 2) -> Html:
    """What changed from one kernel to the next, line by line, `context` unchanged lines around each change.

    Green with + is new, red with - is gone. Comments at the top of the files are left out.
    """
    a, b = ([*_lines(f)] for f in (file_a, file_b))
    a, b = a[sections(file_a).get("header", (0, 0))[1] :], b[sections(file_b).get("header", (0, 0))[1] :]
    colours = {"+": "rgba(46, 160, 67, 0.22)", "-": "rgba(248, 81, 73, 0.22)", "@": "rgba(128, 128, 128, 0.15)"}
    rows, added, removed = [], 0, 0
    for line in list(difflib.unified_diff(a, b, lineterm="", n=context))[2:]:
        kind = line[0]
        added, removed = added + (kind == "+"), removed + (kind == "-")
        background = f' style="background: {colours[kind]}"' if kind in colours else ""
        text = "⋯" if kind == "@" else line
        rows.append(f"<div{background}>{html.escape(text) or '&nbsp;'}</div>")
    summary = f"{file_a} → {file_b}: {added} lines new, {removed} gone"
    pre = "font-family: monospace; white-space: pre; line-height: 1.35; overflow-x: auto; font-size: 0.9em"
    return Html(f'<p><b>{html.escape(summary)}</b></p><div style="{pre}">{"".join(rows)}</div>', summary)


# ---------------------------------------------------------------------------------------------------- pictures


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
def warp_picture(accesses: Mapping[str, tuple[tuple[int, int], Sequence[int]]], *, verb: str = "asked for") -> Picture:
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
    for ax, (name, words) in zip(np.atleast_1d(axes), accesses.items(), strict=True):
        words = np.ravel(words).astype(int)
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
def measured_steps(
    shape: Sequence[int], steps: Mapping[str, Mapping[str, str]], *, title: str = "", record: Any = None
) -> Picture | Text:
    """Recorded TFLOP/s of variants and experiments at one shape, one bar each; one below the best so far is marked.

    Args:
        shape: (batch, heads, n, head_dim).
        steps: {label: what the record's result has, such as {"kind": "experiment", "name": "register_tiles: ..."}}.
        record: another record than the committed one.

    Returns:
        A picture; where one of them is not recorded, a sentence that says so.
    """
    record = recorded() if record is None else record
    results = [r for r in (record or {}).get("results", ()) if tuple(r["shape"]) == tuple(shape)]
    found = {label: next((r for r in results if (r | wanted) == r), None) for label, wanted in steps.items()}
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
