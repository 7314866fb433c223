"""Pictures of what threads do: their rows, the words, sectors and banks that a warp accesses, what each lane holds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from helpers.draw.picture import IDLE, MOVED, READ, WRITE, Picture, figure, styled
from helpers.engine.banks import BANKS, wavefronts


@styled
def grid_picture(n: int, block: int) -> Picture:
    """Draw which thread owns which element: a line of cells per block, coloured if blockIdx * block + threadIdx < n."""
    grid = -(-n // block)
    element = np.arange(grid)[:, None] * block + np.arange(block)
    fig, ax = figure(7.5, 0.95 + 0.36 * grid)
    ax.pcolormesh(element < n, cmap=ListedColormap([IDLE, MOVED]), vmin=0, vmax=1, edgecolors="white", linewidth=0.6)
    for b in range(grid):
        live = min(block, n - b * block)
        if live > block // 2:
            ax.text(0.3, b + 0.5, f"element {element[b, 0]}", va="center", fontsize=9)
            ax.text(live - 0.3, b + 0.5, f"element {element[b, live - 1]}", ha="right", va="center", fontsize=9)
        else:  # the cells are too small for numbers
            first, last = element[b, 0], element[b, live - 1]
            text = f"elements {first} to {last}" if live > 1 else f"element {first}"
            ax.text(live + 0.5, b + 0.5, text, va="center", fontsize=9)
        if live < block:
            ax.text(block - 0.3, b + 0.5, f"{block - live} idle", ha="right", va="center", fontsize=9, color="#666666")
    ax.set(xlim=(0, block), ylim=(grid, 0), xlabel="threadIdx.x", ylabel="blockIdx.x")
    ax.set_xticks([0.5, *np.arange(16, block + 1, 16) - 0.5], [0, *np.arange(16, block + 1, 16) - 1])
    ax.set_yticks(np.arange(grid) + 0.5, range(grid))
    ax.spines[:].set_visible(False)
    ax.set_title(f"{n} elements, blocks of {block}: a grid of {grid}")
    return Picture(fig, f"{n} elements over {grid} blocks of {block} threads; {grid * block - n} threads are idle")


@styled
def matrices(masks: Mapping[str, np.ndarray], *, title: str = "", legend: Mapping[int, str] | None = None) -> Picture:
    """Draw matrices cell by cell, to one scale: which thread reads and writes what.

    Args:
        masks: {name: integer array (rows, columns)}; 0 untouched, 1 read, 2 written, 3 in the same sector as a
            requested word.
        legend: what 1, 2 and 3 are called.
    """
    # Inches. Cells have the same size in all matrices, and each matrix leaves space for its title.
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
        lines = 0.5 if cell > 0.05 else 0  # a border would hide the colour of small cells
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


SECTOR = 8  # a sector: the smallest unit that memory moves, 32 bytes in 4-byte words


def sectors(words: Sequence[int]) -> int:
    """Count the 32-byte sectors that hold these words (indices into an aligned array of 4-byte elements)."""
    return len({int(word) // SECTOR for word in np.ravel(words)})


@styled
def warp_picture(accesses: Mapping[str, tuple[tuple[int, int], Sequence[int]]]) -> Picture:
    """Draw what the 32 lanes of a warp touch in one instruction, and the sectors that memory moves for it.

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
    picture = matrices(panels, legend={1: "requested", 3: "moved along, 32 bytes at a time"})
    picture.alt = f"one instruction of a warp: {'; '.join(counts)}"
    return picture


@styled
def bank_picture(accesses: Mapping[str, Sequence[int]]) -> Picture:
    """Draw which bank of shared memory each lane of a warp requests in one instruction.

    Args:
        accesses: {name: word index of each lane}, words of 4 bytes.
    """
    colours = ListedColormap([IDLE, READ, WRITE])
    fig, axes = figure(0.5 + 2.5 * len(accesses), 3.7 if len(accesses) > 1 else 4.0, columns=len(accesses))
    counts = []
    for ax, (name, of_lanes) in zip(np.atleast_1d(axes), accesses.items(), strict=True):
        words: Any = np.ravel(of_lanes).astype(int)
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
def fragments(places_of: Mapping[str, np.ndarray]) -> Picture:
    """Draw 16 x 16 matrices with the lane that holds each element; neighbours with one number share a lane.

    Args:
        places_of: {name: places}; places[lane, i] is 16 * row + column of element i of the lane's fragment. If several
            lanes hold an element, the lowest is drawn.
    """
    fig, panels = figure(2.8 * len(places_of), 3.1, columns=len(places_of))
    for ax, (name, places) in zip(np.atleast_1d(panels), places_of.items(), strict=True):
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
    return Picture(fig, f"matrices of 16 x 16, in each cell the lane that holds the element: {', '.join(places_of)}")


@styled
def factor_fragment(places: np.ndarray, *, lane: int) -> Picture:
    """Draw the factors of 16 rows in memory, as a fragment with 16 equal columns, and the accumulator that it scales.

    Args:
        places: of an accumulator: places[lane, i] is 16 * row + column of element i. lane: its elements are marked.
    """
    fig = Figure(figsize=(7.4, 3.2), layout="constrained")
    stored, loaded, acc = fig.subplots(1, 3, width_ratios=(1.6, 16, 16))
    factors = np.arange(16)[:, None]
    mine = [divmod(int(place), 16) for place in places[lane]]
    for ax, title, numbers in (
        (stored, "stored", factors),
        (loaded, "factor: 16 equal columns", factors.repeat(16, axis=1)),
        (acc, "acc", None),
    ):
        shape = (16, 16) if numbers is None else numbers.shape
        rows = np.broadcast_to(factors, shape)
        ax.pcolormesh(rows, cmap="Blues", vmin=0, vmax=32, edgecolors="white", linewidth=0.5)
        for (row, column), number in np.ndenumerate(rows if numbers is not None else np.empty((0, 0))):
            ax.text(column + 0.5, row + 0.5, number, ha="center", va="center", fontsize=6.5)
        for row, column in mine if ax is not stored else ():
            ax.add_patch(Rectangle((column, row), 1, 1, fill=ax is acc, color=WRITE, linewidth=1.5))
        ax.set(title=title, xticks=[], yticks=[], aspect="equal", xlim=(0, shape[1]), ylim=(16, 0))
        ax.spines[:].set_visible(False)
    fig.legend(handles=[Patch(color=WRITE, label=f"elements of lane {lane}")], loc="outside lower right")
    held = " and ".join(map(str, sorted({row for row, _ in mine})))
    return Picture(fig, f"16 factors, each in a row of a fragment; lane {lane} has those of rows {held}, as of acc")


@styled
def ldmatrix_rows(received: np.ndarray) -> Picture:
    """Draw the four 8 x 8 matrices of an ldmatrix in operand A: which lane addresses each row, and which receive it.

    Args:
        received: received[lane, 2 * i + e] is 8 * (the lane whose address it came from) + column, for element e of
            register i.
    """
    fig, panels = figure(7.0, 4.2, rows=2, columns=2)
    sentences = []
    for i in range(4):
        ax, places = panels[i % 2, i // 2], received[:, 2 * i : 2 * i + 2]
        givers = np.unique(places // 8)
        lane_of = np.full((8, 8), -1)
        lane_of[np.searchsorted(givers, places // 8), places % 8] = np.arange(len(received))[:, None]
        ax.pcolormesh(lane_of // 4 % 8, cmap="Set3", vmin=0, vmax=11)
        for row, column in np.ndindex(8, 8):
            if column == 0 or lane_of[row, column] != lane_of[row, column - 1]:
                width = int((lane_of[row] == lane_of[row, column]).sum())
                ax.text(column + width / 2, row + 0.5, lane_of[row, column], ha="center", va="center", fontsize=8)
        ax.set_yticks(np.arange(8) + 0.5, [f"lane {giver} →" for giver in givers], fontsize=8)
        ax.set(xticks=[])
        ax.set_title(f"matrix {i}, to r[{i}]", fontsize=10)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.invert_yaxis()
        sentences.append(f"matrix {i}: addresses of lanes {givers[0]} to {givers[-1]}")
    fig.supylabel("gives the address of the row", fontsize=10)
    fig.supxlabel("in each cell: the lane that receives these two neighbours", fontsize=10)
    return Picture(fig, f"ldmatrix loads four 8 x 8 matrices; {'; '.join(sentences)}")


@styled
def chunk_layout(places: Mapping[str, np.ndarray]) -> Picture:
    """Draw rows of a tile in shared memory: each cell is 16 bytes, with the number of the row's chunk stored there.

    Args:
        places: {title: place}; place[row, chunk], from 0. Chunk 3 of every row is in colour.
    """
    fig, panels = figure(3.5 * len(places), 2.7, columns=len(places))
    for ax, (title, place) in zip(np.atleast_1d(panels), places.items(), strict=True):
        chunk_at = np.zeros(place.shape, int)
        np.put_along_axis(chunk_at, place, np.arange(place.shape[1])[None].repeat(len(place), 0), axis=1)
        ax.pcolormesh(chunk_at == 3, cmap="Oranges", vmin=0, vmax=2, edgecolors="white")
        for (row, at), chunk in np.ndenumerate(chunk_at):
            ax.text(at + 0.5, row + 0.5, chunk, ha="center", va="center")
        ax.invert_yaxis()
        ax.set(title=title, xlabel="place in the row: 4 banks each", ylabel="row")
        ax.set_xticks(np.arange(place.shape[1]) + 0.5, range(place.shape[1]))
        ax.set_yticks(np.arange(len(place)) + 0.5, range(len(place)))
    return Picture(fig, f"which 16-byte chunk of each row is stored where: {', '.join(places)}; chunk 3 is marked")
