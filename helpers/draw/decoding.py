"""Pictures of decoding: pages of a cache over time, speeds compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap

from helpers.draw.picture import GPU, IDLE, LINES, MOVED, PEER, ROOF, WRITE, Picture, figure, styled


@styled
def pages(owners: np.ndarray, lines: Mapping[str, Sequence[float]]) -> Picture:
    """Draw which request owns each page after each step, and curves over the same steps below.

    Args:
        owners: (steps, pages) of int, -1 for a free page.
    """
    fig, (above, below) = figure(8.2, 5.2, rows=2)
    colours = [IDLE, *LINES[:5], MOVED, "#F0E442", "#7F5FA8", "#8B5A2B"]
    shown = np.where(owners < 0, 0, 1 + owners % (len(colours) - 1))
    above.imshow(shown.T, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1, aspect="auto", origin="lower")
    above.set(ylabel="page", title="a colour for each request; grey: free")
    for (name, values), colour in zip(lines.items(), (PEER, GPU, WRITE, LINES[2]), strict=False):
        below.plot(values, color=colour, label=name)
    below.set(xlabel="step", ylabel="keys", xlim=(-0.5, len(owners) - 0.5), ylim=(0, None))
    below.legend(fontsize=8, loc="upper right", frameon=True, edgecolor="white")
    taken = (owners >= 0).sum(axis=1).mean() / owners.shape[1]
    return Picture(fig, f"{owners.shape[1]} pages over {len(owners)} steps, {taken:.0%} of them taken on average")


@styled
def speeds(rows: Mapping[str, Mapping[str, float]], *, ours: str, roof: str, xlabel: str) -> Picture:
    """Draw a line for each row, with a dot for each contestant: ours, the upper limit and the peers.

    Args:
        rows: {name: {contestant: speed}}.
    """
    fig, ax = figure(8.2, 1.1 + 0.42 * len(rows))
    peers = [name for name in dict.fromkeys(name for row in rows.values() for name in row) if name not in (ours, roof)]
    looks = {ours: ("o", GPU, 9), roof: ("|", ROOF, 14)}
    looks |= {name: ("D", colour, 5) for name, colour in zip(peers, (PEER, *LINES[1:], MOVED), strict=False)}
    for y, row in enumerate(rows.values()):
        ax.plot([min(row.values()), max(row.values())], [y, y], color=IDLE, linewidth=4, zorder=0)
        for name, speed in row.items():
            marker, colour, size = looks[name]
            ax.plot(speed, y, marker, color=colour, markersize=size, label=name, zorder=2 if name == ours else 1)
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.set_yticks(range(len(rows)), list(rows), fontsize=8)
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel=xlabel)
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    speeds_of = {name: ", ".join(f"{peer} {speed:,.0f}" for peer, speed in row.items()) for name, row in rows.items()}
    return Picture(fig, "; ".join(f"{name}: {text}" for name, text in speeds_of.items()))
