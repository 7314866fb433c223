"""Read Nsight Compute's counters for each stage: bytes at DRAM, occupancy, issued instructions, pipe utilisation.

All stages of the ladder, at one shape and, from register_tiles on, at one with wider heads; the steps of the climbs;
PyTorch's attention, its gradients and matrix products, where PyTorch is installed. This module reads the record; the
study profile_stages measures it, and prints all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.bench import records, steps

RECORD = records.MEASURED / "nvidia-h200-stages.json"
SHAPE = (1, 16, 4096, 64)
WIDE = 128  # the other head_dim
COLUMNS = 5  # columns of the table side by side
# Kinds of rows that a table includes only if they are named.
BY_NAME = ("step", "experiment", "backward", "backward step", "backward peer")

_BUSY = ".avg.pct_of_peak_sustained_active"
# figure -> Nsight Compute's metrics, of which the first one that the chip has is used.
FIGURES: dict[str, tuple[str, ...]] = {
    "ms": ("gpu__time_duration.sum",),
    "dram bytes read": ("dram__bytes_read.sum",),
    "dram bytes written": ("dram__bytes_write.sum",),
    "L2 bytes": ("lts__t_bytes.sum",),
    "occupancy %": ("sm__warps_active" + _BUSY,),
    "occupancy % at most": ("sm__maximum_warps_per_active_cycle_pct",),
    "multiprocessors at work %": ("sm__cycles_active.avg.pct_of_peak_sustained_elapsed",),
    "issue slots used %": ("smsp__issue_active" + _BUSY, "sm__inst_issued" + _BUSY),
    "instructions": ("smsp__inst_executed.sum",),
    "FMA pipe %": ("sm__pipe_fma_cycles_active" + _BUSY, "sm__inst_executed_pipe_fma" + _BUSY),
    "tensor pipe %": (
        "sm__pipe_tensor_cycles_active" + _BUSY,
        "sm__pipe_tensor_op_hmma_cycles_active" + _BUSY,
        "sm__inst_executed_pipe_tensor_op_hmma" + _BUSY,
        "sm__inst_executed_pipe_tensor" + _BUSY,
    ),
    "exp2 pipe %": ("sm__inst_executed_pipe_xu" + _BUSY,),
    "shared memory %": ("l1tex__data_pipe_lsu_wavefronts_mem_shared" + ".avg.pct_of_peak_sustained_active",),
    "bank conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "registers": ("launch__registers_per_thread",),
    "local memory instructions": (
        "smsp__inst_executed_op_local.sum",
        "smsp__sass_inst_executed_op_local.sum",
        "smsp__inst_executed_op_local_ld.sum",
        "smsp__sass_inst_executed_op_local_ld.sum",
    ),
    "static shared bytes": ("launch__shared_mem_per_block_static",),
    "dynamic shared bytes": ("launch__shared_mem_per_block_dynamic",),
    "blocks": ("launch__grid_size",),
    "threads a block": ("launch__block_size",),
}
# Why a warp issued nothing: Nsight Compute's warp states, in cycles per issued instruction.
STALLS: dict[str, str] = {
    "issued": "selected",
    "another warp was issued": "not_selected",
    "result of shared memory or exp2": "short_scoreboard",
    "result of global memory": "long_scoreboard",
    "barrier": "barrier",
    "products of a warpgroup": "gmma",  # Hopper's wgmma
    "fixed latency": "wait",
    "busy pipe": "math_pipe_throttle",
    "full queue to memory and exp2": "mio_throttle",
    "full queue to global memory": "lg_throttle",
    "dispatch": "dispatch_stall",
    "no instruction": "no_instruction",
    "branch": "branch_resolving",
    "constant": "imc_miss",
    "memory fence": "membar",
    "stores before the end": "drain",
    "sleeping": "sleeping",
    "texture queue": "tex_throttle",
    "other": "misc",
}


def stall_metric(state: str) -> str:
    """Return Nsight Compute's name of one of the STALLS."""
    return f"smsp__average_warps_issue_stalled_{state}_per_issue_active.ratio"


def recorded(path: Path | None = None) -> dict[str, Any] | None:
    """Read the record; None if it does not exist."""
    return records.load(path or RECORD)


def select(
    record: Mapping[str, Any],
    stages: Sequence[str] | None = None,
    *,
    head_dim: int | str = SHAPE[3],
    dtype: str = "first",
) -> list[Mapping[str, Any]]:
    """Select rows of a record, in its order.

    Args:
        stages: only these, which may be peers, matrix products, steps and gradients too ("SDPA flash", "matmul", "mma:
            07_2_swizzle", "backward", "SDPA flash backward"); or all except the kinds in BY_NAME.
        head_dim: a number, or "all". Rows without one, such as a matrix product's, are always included.
        dtype: a type, "all", or "first" for the first in which each was counted.
    """
    first: dict[str, str] = {}
    for row in record["rows"]:
        first.setdefault(row["stage"], row.get("dtype"))
    return [
        row
        for row in record["rows"]
        if (row.get("kind") not in BY_NAME if stages is None else row["stage"] in stages)
        and (head_dim == "all" or _head_dim(row) in (head_dim, None))
        and (dtype == "all" or row.get("dtype") == (first[row["stage"]] if dtype == "first" else dtype))
    ]


def _head_dim(row: Mapping[str, Any]) -> int | None:
    shape = row.get("shape", ())
    return shape[3] if len(shape) == 4 else None


@records.shown
def counters_table(
    record: Mapping[str, Any] | None = None,
    stages: Sequence[str] | None = None,
    *,
    head_dim: int | str = SHAPE[3],
    dtype: str = "first",
) -> str:
    """Format the recorded figures as text, a stage a column, a few columns side by side. See also `select`."""
    wanted = select(record, stages, head_dim=head_dim, dtype=dtype)
    shown = [row for row in wanted if row["figures"]]
    lines: list[tuple[str, Callable[[Mapping[str, Any]], Any]]] = [
        ("", lambda row: row["stage"]),
        ("", lambda row: row["dtype"]),
        ("heads", lambda row: math.prod(row["shape"][:2]) if _head_dim(row) else ""),
    ]
    if any(_head_dim(row) not in (SHAPE[3], None) for row in shown):
        lines.append(("head_dim", lambda row: _head_dim(row) or ""))
    for figure in FIGURES:
        if any(figure in row["figures"] for row in shown):
            lines.append((figure, lambda row, figure=figure: _text(row["figures"].get(figure))))
    blocks = [
        "\n".join(
            (f"{head:28}" + "".join(f" {cell(row):>17}" for row in shown[i : i + COLUMNS])).rstrip()
            for head, cell in lines
        )
        for i in range(0, len(shown), COLUMNS)
    ]
    failed = [f"{row['stage']}: {row['error']}" for row in wanted if "error" in row]
    return "\n\n".join([*blocks, *(["\n".join(failed)] if failed else [])])


@records.shown
def climb_table(
    stage: str,
    figures: Sequence[str],
    *,
    head_dim: int,
    dtype: str | None = None,
    record: Mapping[str, Any] | None = None,
    numbers: Collection[int] = (),
    after: Sequence[str] = (),
) -> str:
    """Format some figures of the steps to a stage, a step a line, in the climb's order; the stage is last.

    Args:
        figures: keys of FIGURES, a column each.
        dtype: a type; None for the first in which each step was counted.
        numbers: only these steps; all if empty.
        after: stages to compare with, shown first.
    """
    rows = [r for r in record["rows"] if r.get("of") == stage and _head_dim(r) == head_dim]
    if rows:
        dtype = dtype or rows[0]["dtype"]
        of_stage = next(iter(select(record, [stage], head_dim=head_dim, dtype=dtype)), None)
        rows = steps.in_order(stage, [r for r in rows if r["dtype"] == dtype], of_stage)
        rows = [row for row in rows if not numbers or row.get("step") in numbers]
        rows = [*select(record, after, head_dim=head_dim, dtype=dtype), *rows]
    labels = [f"{row['step']}  {row['idea']}" if "step" in row else row["stage"] for row in rows]
    width = max(map(len, labels), default=0) + 2
    columns = [[f"{label:{width}}" for label in ("", *labels)]]
    for figure in figures:
        cells = [
            figure,
            *(_text(row["figures"].get(figure)) if steps.is_measured(row) else steps.NOT_MEASURED for row in rows),
        ]
        gap = 1 if columns[1:] else 0  # behind the labels there is one
        width = max(len(figure) + 3, *(len(cell) + gap for cell in cells))
        columns.append([f"{cell:>{width}}" for cell in cells])
    return "\n".join("".join(line).rstrip() for line in zip(*columns, strict=True))


@records.shown
def cycles_table(
    stage: str,
    numbers: Sequence[int],
    states: Mapping[str, str],
    *,
    head_dim: int,
    tile: tuple[int, int],
    record: Mapping[str, Any] | None = None,
) -> str:
    """Format how a warp spends its cycles for one tile of keys, a step of the climb to a stage a line.

    Args:
        states: {one of STALLS: the head of its column}; the first column is the sum of all states.
        tile: a warp's rows, and the keys of a tile.
    """
    rows = [r for r in record["rows"] if r.get("of") == stage and _head_dim(r) == head_dim]
    shown = [row for row in steps.in_order(stage, rows) if row["step"] in numbers and steps.is_measured(row)]
    labels = [f"{row['step']:2}  {row['idea']}" for row in shown]
    wide = max(map(len, labels), default=0)
    heads = ["in all", *states.values()]
    lines = [" " * wide + "".join(f"   {head:>6}" for head in heads)]
    for label, row in zip(labels, shown, strict=True):
        batch, of_heads, n, _ = row["shape"]
        tiles = batch * of_heads * (n / tile[0]) * (n / tile[1])
        stalls = row["stalls"]
        each = (row["figures"]["instructions"] / tiles * s for s in (sum(stalls.values()), *map(stalls.get, states)))
        cells = (f"   {cycles:>{max(6, len(head))},.0f}" for cycles, head in zip(each, heads, strict=True))
        lines.append(f"{label:{wide}}" + "".join(cells))
    return "\n".join(lines)


@records.shown
def stalls_table(
    names: Sequence[str],
    *,
    head_dim: int,
    dtype: str = "first",
    record: Mapping[str, Any] | None = None,
    least: float = 0.1,
) -> str:
    """Format what the warps waited for as text: a state a line, a stage, step or peer a column.

    A number is the cycles that a warp spent in that state per issued instruction (Nsight Compute's warp states). The
    states of a column add up to the cycles between two instructions of one warp.

    Args:
        names: as in `select`. least: states with fewer cycles in every column are left out.
    """
    selected = select(record, names, head_dim=head_dim, dtype=dtype)
    rows = sorted((row for row in selected if row.get("stalls")), key=lambda row: names.index(row["stage"]))
    states = [s for s in STALLS if any(row["stalls"].get(s, 0) >= least for row in rows)]
    states.sort(key=lambda s: (s != "issued", -max(row["stalls"].get(s, 0) for row in rows)))
    wide = max((len(s) for s in states), default=0) + 2
    heads = [f"{row['stage'].partition(': ')[2] or row['stage']} {row['dtype']}" for row in rows]
    lines = [" " * wide + "".join(f"  {head:>12}" for head in heads)]
    for state in [*states, "together"]:
        each = (row["stalls"].get(state) if state != "together" else sum(row["stalls"].values()) for row in rows)
        cells = (f"  {_text(value):>{max(12, len(head))}}" for value, head in zip(each, heads, strict=True))
        lines.append(f"{state:{wide}}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
