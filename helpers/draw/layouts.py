"""Pictures of layouts: where each element of a tile is, which thread holds it, and where a product reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from helpers.draw.picture import CPU, LINES, MOVED, Picture, figure, styled
from helpers.engine.banks import BANKS


@styled
def offsets(
    layouts: Mapping[str, np.ndarray], *, cell_bytes: int = 0, inches: float = 0.36, cell: str = "column"
) -> Picture:
    """Draw tiles side by side, with the offset that a layout gives each coordinate in its cell.

    Cells of one colour are in the same banks of shared memory; without banks, darker cells have larger offsets.

    Args:
        layouts: {title: offsets}, each (rows, columns), counted in cells.
        cell_bytes: bytes per cell, at most 128: 2 for a float16, 16 for a chunk of 8. 0: no banks.
        inches: size of a cell. cell: label of the columns.
    """
    fig, panels = _panels(layouts, inches, 0.5, 1.2)
    for ax, (title, offset) in zip(panels, layouts.items(), strict=True):
        if cell_bytes:
            group = offset * cell_bytes % (4 * BANKS) // max(cell_bytes, 4)
            ax.pcolormesh(group, cmap="turbo", alpha=0.45, vmin=0, vmax=4 * BANKS // max(cell_bytes, 4), lw=0)
        else:
            ax.pcolormesh(offset, cmap="Blues", vmin=0, vmax=2 * max(offset.max(), 1), edgecolors="white")
        for (row, column), number in np.ndenumerate(offset):
            ax.text(column + 0.5, row + 0.5, number, ha="center", va="center", fontsize=8 if number < 1000 else 6)
        _cells(ax, title, offset.shape, cell)
    first = "; ".join(f"{title}: {', '.join(map(str, offset[:, 0]))}" for title, offset in layouts.items())
    return Picture(fig, f"offsets{', colours are banks' * bool(cell_bytes)}; in the first column of {first}")


@styled
def owners(threads: Mapping[str, np.ndarray], *, cell: str = "column") -> Picture:
    """Draw tiles side by side, with the owning thread in each cell. A warp has a colour, from dark to light by thread.

    Args:
        threads: {title: thread}, each (rows, columns), -1 where no thread owns the element.
        cell: label of the columns.
    """
    fig, panels = _panels(threads, 0.26, 0.6, 1.3)
    warps = sorted({int(t) // 32 for thread in threads.values() for t in np.unique(thread) if t >= 0})
    palette = np.array([[0.0, 0.45, 0.70], [0.90, 0.62, 0.0], [0.0, 0.62, 0.45], [0.80, 0.47, 0.65]])
    for ax, (title, thread) in zip(panels, threads.items(), strict=True):
        base = palette[thread // 32 % len(palette)]
        light = (0.35 + 0.5 * (thread % 32) / 31)[..., None]
        colours = np.where(thread[..., None] < 0, 1.0, base + (1 - base) * light)
        ax.imshow(colours, extent=(0, thread.shape[1], thread.shape[0], 0), interpolation="nearest")
        for (row, column), number in np.ndenumerate(thread):
            before = thread[row, column - 1] if column else -1
            if number >= 0 and number != before:
                ax.text(column + 0.12, row + 0.5, number, ha="left", va="center", fontsize=6)
        _cells(ax, title, thread.shape, cell, every=8 if max(thread.shape) > 16 else 1)
    darkest = palette + (1 - palette) * 0.35  # thread 0 of a warp
    handles = [Patch(color=darkest[warp % len(palette)], label=f"warp {warp}") for warp in warps]
    fig.legend(handles=handles, loc="outside lower center", ncols=max(len(handles), 1))
    first = "; ".join(f"{title}: {', '.join(map(str, thread[0]))}" for title, thread in threads.items())
    return Picture(fig, f"which thread has which cell; in the first row of {first}")


@styled
def operands(products: Mapping[str, Sequence[tuple[str, Mapping[str, float]]]]) -> Picture:
    """Draw tables side by side: each product's operands, coloured by the memory that they are read from.

    Args:
        products: {title: (product, {operand: what it reads from shared memory, 0 if it is in registers}), ...}.
    """
    most = max(len(rows) for rows in products.values())
    fig, panels = figure(3.7 * len(products), 0.32 * most + 1.0, columns=len(products))
    for ax, (title, rows) in zip(np.atleast_1d(panels), products.items(), strict=True):
        for y, (product, reads) in enumerate(rows):
            ax.text(-0.05, y + 0.5, product, ha="right", va="center")
            for x, (operand, amount) in enumerate(reads.items()):
                ax.barh(y + 0.5, 0.96, left=x, height=0.86, color=MOVED if amount == 0 else CPU, alpha=0.6)
                ax.text(x + 0.48, y + 0.5, f"{operand}  {amount:g}" if amount else operand, ha="center", va="center")
        total = sum(sum(reads.values()) for _, reads in rows)
        ax.set(xlim=(-1.15, 2), ylim=(most, 0), xticks=[], yticks=[])
        ax.set_title(f"{title}: {total:g} KiB", fontsize=10)
        ax.spines[:].set_visible(False)
    handles = [
        Patch(color=MOVED, alpha=0.6, label="in registers"),
        Patch(color=CPU, alpha=0.6, label="through shared memory, KiB"),
    ]
    fig.legend(handles=handles, loc="outside lower left", ncols=2)
    counts = (f"{name}: {sum(sum(reads.values()) for _, reads in rows):g} KiB" for name, rows in products.items())
    return Picture(fig, f"operands of products and what they take of shared memory; {'; '.join(counts)}")


@styled
def warp_tiles(
    tiles: Mapping[str, np.ndarray],
    *,
    outlines: Mapping[str, tuple[str, np.ndarray]] | None = None,
    axes: Mapping[str, tuple[str, str]] | None = None,
    cell: int = 16,
) -> Picture:
    """Draw tiles side by side, cut into cells with the colour and the number of the warp that computes them.

    Args:
        tiles: {title: warp of each cell}, each (rows, columns).
        outlines: {label: (title, mask)}: cells of a tile inside one outline, such as those that a warp reads.
        axes: {title: (label of rows, label of columns)}. cell: rows and columns of a cell, for the labels.
    """
    across, down = sum(tile.shape[1] for tile in tiles.values()), max(len(tile) for tile in tiles.values())
    fig, panels = figure(0.3 * across + 0.75 * len(tiles), 0.3 * down + 1.25, columns=len(tiles))
    palette = (*LINES[:5], "#56B4E9", "#B0A000", "#8C8C8C")
    colours = {CPU: "-", "#222222": "--"}
    handles = []
    for ax, (title, tile) in zip(np.atleast_1d(panels), tiles.items(), strict=True):
        for (row, column), warp in np.ndenumerate(tile):
            place = (column, row)
            ax.add_patch(Rectangle(place, 1, 1, color=palette[warp % len(palette)], alpha=0.35, linewidth=0))
            ax.text(column + 0.5, row + 0.5, str(warp), ha="center", va="center", fontsize=8)
        ax.set(title=title, aspect="equal", xlim=(-0.1, tile.shape[1] + 0.1), ylim=(len(tile) + 0.1, -0.1))
        down_name, across_name = (axes or {}).get(title, ("rows", "columns"))
        ax.set_xlabel(f"{tile.shape[1] * cell} {across_name}", fontsize=9)
        ax.set_ylabel(f"{len(tile) * cell} {down_name}", fontsize=9)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
    for (label, (title, mask)), (colour, style) in zip((outlines or {}).items(), colours.items(), strict=False):
        ax = np.atleast_1d(panels)[list(tiles).index(title)]
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        size = columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1
        box = Rectangle((columns[0], rows[0]), *size, fill=False, color=colour, linestyle=style, linewidth=2.5)
        ax.add_patch(box)
        handles.append(Patch(fill=False, edgecolor=colour, linestyle=style, linewidth=2, label=label))
    if handles:
        fig.legend(handles=handles, loc="outside lower left", ncols=len(handles))
    counts = "; ".join(f"{title}: {len(np.unique(tile))} warps" for title, tile in tiles.items())
    return Picture(fig, f"which warp has which part; {counts}; {'; '.join(outlines or {})}".rstrip("; "))


def _panels(tiles: Mapping[str, np.ndarray], inches: float, margin: float, above: float) -> tuple[Figure, np.ndarray]:
    """Make a figure with a panel for each tile. inches: size of a cell; `margin` between panels, `above` the cells."""
    across, down = sum(tile.shape[1] for tile in tiles.values()), max(len(tile) for tile in tiles.values())
    fig, panels = figure(inches * across + margin * len(tiles) + 0.3, inches * down + above, columns=len(tiles))
    panels = np.atleast_1d(panels)
    panels[0].set_ylabel("row")
    return fig, panels


def _cells(ax: Any, title: str, shape: tuple[int, ...], cell: str, every: int = 1) -> None:
    """Set row 0 on top, square cells, and numbers at regular distances of rows and columns."""
    ax.set(title=title, xlabel=cell, aspect="equal", xlim=(0, shape[1]), ylim=(shape[0], 0))
    ax.set_xticks(np.arange(0, shape[1], every) + 0.5, range(0, shape[1], every), fontsize=7)
    ax.set_yticks(np.arange(0, shape[0], every) + 0.5, range(0, shape[0], every), fontsize=7)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
