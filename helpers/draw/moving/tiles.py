"""The register tiles of register_tiles: what each BLOCK_M and BLOCK_N costs, and its recorded speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from helpers.attention.ladder.tiles import GPUS, KB, Tiles
from helpers.draw.moving.figure import Moving, element, picture, rect
from helpers.draw.picture import GPU, WRITE

WARPS = 64  # the most that a multiprocessor holds
MOST_REGISTERS = 255  # the most that a thread has
WIDTH, ROW, BAR = 372, 34, 12


def moving_tiles(speeds: Mapping[Tiles, float], shape: Sequence[int], on: str) -> Moving:
    """Show a chosen tile's registers, shared memory, warps and traffic, and the speed of all tiles.

    Args:
        speeds: TFLOP/s of each tile. shape: (batch, heads, n, head_dim) that they were measured at. on: the GPU.
    """
    tiles = sorted(speeds, key=lambda tile: (tile.block_m, tile.block_n))
    best = max(tiles, key=lambda tile: speeds[tile])
    most = max(requested_bytes(tile, shape) for tile in tiles)
    data = {
        "tiles": [
            {
                "block": [tile.block_m, tile.block_n],
                "tflops": round(speeds[tile], 1),
                "costs": _costs(tile, shape, most),
            }
            for tile in tiles
        ],
        "first": tiles.index(best),
        "bar": [WIDTH, ROW, BAR],
        "colours": [GPU, WRITE],
    }
    text = "; ".join(f"{tile.block_m} x {tile.block_n}: {speeds[tile]:.1f} TFLOP/s" for tile in tiles)
    return Moving("tiles", _frame(data, on), data, f"BLOCK_M x BLOCK_N of 04 on an {on}, and what each costs. {text}")


def registers_by_hand(tile: Tiles, head_dim: int) -> int:
    """Count by hand the registers for accumulators, scores, fragments, m_i and l_i during the products S = QK^T."""
    rows, keys = tile.scores
    return rows * (head_dim // tile.threads_x) + rows * keys + 4 * keys + rows + 2 * rows


def requested_bytes(tile: Tiles, shape: Sequence[int]) -> int:
    """Count the bytes requested from global memory: Q and O once, K and V once for each block of rows."""
    batch, heads, n, head_dim = shape
    return 4 * batch * heads * head_dim * (2 * n + 2 * n * -(-n // tile.block_m))


def _costs(tile: Tiles, shape: Sequence[int], most: int) -> list[tuple[str, str, float]]:
    """List the costs of a tile: name, value as text, and share of the limit, above 1 if it is exceeded.

    most: the largest number of bytes that a tile requests.
    """
    head_dim, gpu = shape[3], GPUS[-1]
    (rows, keys), registers, shared = tile.scores, registers_by_hand(tile, head_dim), tile.shared_bytes(head_dim)
    blocks, limit = gpu.resident(tile.threads, min(registers, MOST_REGISTERS), shared)
    warps = blocks * tile.threads // 32
    words = (rows + keys) / (rows * keys)
    traffic = requested_bytes(tile, shape)
    costs = [
        (
            f"registers, by hand: {rows} × {keys} scores a thread",
            f"{registers} of {MOST_REGISTERS}",
            registers / MOST_REGISTERS,
        ),
        ("shared memory of a block", f"{shared / KB:.0f} of {gpu.limit // KB} KB", shared / gpu.limit),
        (f"warps at a time, limited by {limit}", f"at most {warps} of {WARPS}", warps / WARPS),
        ("words of shared memory for an FMA of the scores", f"{words:.2f}", words),
        ("requested from global memory", f"{traffic / 1e9:.2f} GB", traffic / most),
    ]
    return [(what, value, round(share, 3)) for what, value, share in costs]


def _frame(data: dict[str, Any], on: str) -> str:
    columns = sorted({tile["block"][1] for tile in data["tiles"]})
    best = data["tiles"][data["first"]]
    head = "".join(f"<th>{n}</th>" for n in columns)
    lines = [f"<tr><th>BLOCK_M \\ BLOCK_N</th>{head}</tr>"]
    for m in sorted({tile["block"][0] for tile in data["tiles"]}):
        speed = {tile["block"][1]: tile["tflops"] for tile in data["tiles"] if tile["block"][0] == m}
        cells = (
            f'<td style="background-color:rgba(0,114,178,{0.7 * (speed[n] / best["tflops"]) ** 3:.2f})">{speed[n]}</td>'
            if n in speed
            else "<td></td>"
            for n in columns
        )
        lines.append(f"<tr><th>{m}</th>{''.join(cells)}</tr>")
    words = f"TFLOP/s on an {on}; below, the tile of {best['block'][0]} × {best['block'][1]}"
    alt = "; ".join(f"{what}: {value}" for what, value, _ in best["costs"])
    return f'<table class="part choice">{"".join(lines)}</table>\n<p class="part">{words}</p>\n' + picture(
        WIDTH, ROW * len(best["costs"]), _bars(best["costs"]), alt
    )


def _bars(costs: Sequence[tuple[str, str, float]]) -> Iterator[str]:
    for i, (what, value, share) in enumerate(costs):
        y = ROW * i
        yield element("text", what, x=0, y=y + 12, kind="what")
        yield element("text", value, x=WIDTH, y=y + 12, text_anchor="end", kind="value")
        yield rect(0, y + 17, WIDTH, BAR, fill="currentColor", opacity=0.1)
        colour = WRITE if share > 1 else GPU
        yield rect(0, y + 17, round(WIDTH * min(share, 1), 1), BAR, fill=colour, kind="bar")
