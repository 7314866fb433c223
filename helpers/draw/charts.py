"""Charts of what attention computes and costs: heat maps, curves, rooflines, the running softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.patches import Patch

from helpers.draw.picture import GPU, LINES, PEER, ROOF, WRITE, Picture, bytes_text, figure, styled


@styled
def heatmap(
    matrices: Mapping[str, np.ndarray],
    *,
    xlabel: str = "key",
    ylabel: str = "query",
    colour: str = "weight",
    vmax: float | None = None,
    yes_or_no: bool = False,
) -> Picture:
    """Draw matrices (rows, columns) side by side, titled, on one colour scale from 0 to vmax (or the maximum).

    yes_or_no: they contain only 0 and 1, and `colour` says what 1 means: a patch replaces the colour scale.
    """
    fig, axes = figure(0.9 + 2.9 * len(matrices), 3.2, columns=len(matrices))
    top = vmax if vmax is not None else max(float(np.max(m)) for m in matrices.values())
    for ax, (title, matrix) in zip(np.atleast_1d(axes), matrices.items(), strict=True):
        image = ax.imshow(matrix, vmin=0, vmax=top, cmap="viridis", interpolation="nearest", aspect="auto")
        ax.set(title=title, xlabel=xlabel)
    np.atleast_1d(axes)[0].set_ylabel(ylabel)
    if yes_or_no:
        handles = [Patch(color=image.cmap(image.norm(1)), label=colour)]
        fig.legend(handles=handles, loc="outside lower center", fontsize=9)
    else:
        fig.colorbar(image, ax=axes, label=colour, shrink=0.85)
    return Picture(fig, f"heat maps, {ylabel} against {xlabel}: {'; '.join(matrices)}")


@styled
def token_heatmap(
    matrices: Mapping[str, np.ndarray], tokens: Sequence[str], rows: Sequence[int], columns: Sequence[int]
) -> Picture:
    """Draw attention weights between words: parts of matrices (N, N_kv), rows and columns labelled with their tokens.

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
    fig.colorbar(image, label="weight, on a square-root scale", **bar)
    return Picture(fig, f"attention weights, {len(rows)} tokens: {'; '.join(matrices)}")


@styled
def roofline(*, tflops: float, gbps: float, at: Mapping[str, float], title: str = "") -> Picture:
    """Draw a machine's roofline, TFLOP/s against FLOP per byte, and the kernels' limits on it.

    Args:
        tflops: the compute limit. gbps: the memory bandwidth.
        at: {label: FLOP per byte}; each is a dot on the roof, at the kernel's upper limit.
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
    """Draw curves {label: (x, y)} in one plot, and `levels` {label: y} as dashed horizontal lines."""
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
    """Plot the bytes of the N x N scores, and of Q, K, V and O together, against N: one head, float32.

    cards: {name: bytes}, drawn as dashed lines; a GPU of 80 GiB if None.
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
def rescaling(scores: Sequence[float], block_n: int) -> Picture:
    """Draw online softmax on one row of scores: each key's exp(score - m_i) after every tile of block_n keys.

    A dashed outline shows a key's bar before this tile raised the maximum.
    """
    s = np.asarray(scores, dtype=float)
    tiles = -(-len(s) // block_n)
    fig, axes = figure(1.2 + 2.4 * tiles, 2.9, columns=tiles)
    m_i, sentences = -np.inf, []
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
        sentences.append(f"after tile {tile} m_i = {m_i:g}, l_i = {weights.sum():.2f}")
    np.atleast_1d(axes)[0].set_ylabel("exp(score − m_i)")
    handles = [
        Patch(color=WRITE, label="this tile"),
        Patch(color=GPU, label="tiles before"),
        Patch(fill=False, edgecolor=PEER, linestyle="--", label="before the rescaling"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return Picture(fig, f"{len(s)} scores in tiles of {block_n}: {'; '.join(sentences)}")
