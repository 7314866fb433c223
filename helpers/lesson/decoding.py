"""Notebook 14's shortcuts for the decoding kernels: inputs, launches, X-rays, and how work is divided into pieces.

arrays = inputs([100, 40, 260], page=16)
run(arrays)                                                 # the outputs of two launches, one after the other
xray_launches(arrays, stage="packed_heads", num_splits=2)  # the X-ray of each launch
pieces([100, 40, 260], multiprocessors=4)                   # which keys each block has
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from helpers.attention import decoding, kernel, reference
from helpers.attention.decoders import DECODERS, SPLIT_KV, DecodeCall
from helpers.attention.ladder import limits
from helpers.attention.ladder.layout import Spec
from helpers.bench.studies import decoding as study
from helpers.device import cp
from helpers.engine.cuda_source.c_types import dtype_of
from helpers.xray import Report, xray

MULTIPROCESSORS, SHARED = 132, 227 * 1024  # of an H200
Arrays = Mapping[str, np.ndarray]


def inputs(
    lengths: Sequence[int],
    *,
    heads: int = 8,
    kv_heads: int = 2,
    d: int = 64,
    dtype: str = "float16",
    page: int = 0,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Make the arrays of a call with one new token for each sequence; cache entries not yet written are NaN.

    Args:
        lengths: keys of each sequence, including the new token's. page: keys per page, with pages in any order; 0: the
            keys of a sequence are contiguous.
    """
    rng, batch, room = np.random.default_rng(seed), len(lengths), max(lengths)
    room = -(-room // page) * page if page else room
    q = (rng.standard_normal((batch, 1, heads, d)) + 0.25).astype(dtype_of(dtype))
    rows = [(rng.standard_normal((batch, room, kv_heads, d)) + 0.25).astype(q.dtype) for _ in "kv"]
    for each in rows:
        for i, length in enumerate(lengths):
            each[i, length:] = np.nan
    made = {"q": q, "cache_seqlens": np.array(lengths, np.int32)}
    if not page:
        return made | dict(zip(("k_cache", "v_cache"), rows, strict=True))
    table = rng.permutation(batch * room // page).reshape(batch, -1).astype(np.int32)
    for name, each in zip(("k_cache", "v_cache"), rows, strict=True):
        made[name] = np.empty((table.size, page, kv_heads, d), q.dtype)
        made[name][table] = each.reshape(batch, -1, page, kv_heads, d)
    return made | {"block_table": table}


def run(
    arrays: Arrays, *, code: str | None = None, stage: str | None = None, num_splits: int = 0, times: int = 2
) -> list[np.ndarray]:
    """Return the outputs of successive launches on this device, all with the same scratch and tickets.

    Args:
        code: another text of the kernel. stage: a step of the climb.
    """
    there = {name: cp.asarray(a) for name, a in arrays.items()}
    options = decoding.DecodeOptions(num_splits=num_splits, stage=stage)
    planned, every = decoding.plan(there, options, source=code)
    outputs = []
    for _ in range(times):
        every["o"][...] = np.nan
        planned.bind(every)()
        outputs.append(np.array(cp.asnumpy(every["o"])))
    return outputs


def xray_launches(
    arrays: Arrays, *, code: str | None = None, stage: str | None = None, num_splits: int = 0, multiprocessors: int = 4
) -> list[Report]:
    """X-ray each launch on the CPU, planned as for an H200 with this many multiprocessors.

    Findings about unwritten elements are left out: units in one piece have no partial results.
    """
    there = {name: cp.asarray(a) for name, a in arrays.items()}
    options = decoding.DecodeOptions(num_splits=num_splits, stage=stage)
    with limits.pretend_gpu(limits.Limits(SHARED, multiprocessors, 90)), kernel.built_when_launched():
        planned, every = decoding.plan(there, options, source=code)
    reports = []
    for launch in planned.launches:
        compiled = planned.kernels[launch.kernel]
        report = xray(compiled, launch.grid, launch.block, launch.arguments(every), launch.shared_bytes)
        findings = [finding for finding in report.findings if finding.kind != "never written"]
        reports.append(replace(report, findings=findings))
    return reports


class Piece(NamedTuple):
    """Keys first .. end - 1 of one sequence and KV head, which a block reads in one go."""

    block: int
    sequence: int
    kv_head: int
    first: int
    end: int


# Each block records its pieces in its own rows of `pieces`, from `most * blockIdx.x` on.
ASK = """#include "stream_k.cuh"

extern "C" __global__ void __launch_bounds__(32)
    ask(const int* cache_seqlens, int* pieces, int most, const DecodeParams params) {
  const Rows rows(params.attention, params.attention.heads / params.attention.kv_heads);
  StreamK at(params, rows, cache_seqlens, false, blockIdx.x, gridDim.x);
  if (at.empty()) return;
  int* to = pieces + 4 * most * blockIdx.x;
  do {
    if (threadIdx.x == 0) {
      to[0] = at.sequence;
      to[1] = at.kv_head;
      to[2] = max(at.keys.first_key(at.first), at.keys.begin);
      to[3] = min(at.keys.first_key(at.end), at.keys.end);
    }
    to += 4;
  } while (at.advance());
}
"""


def pieces(
    lengths: Sequence[int],
    *,
    heads: int = 32,
    kv_heads: int = 8,
    d: int = 128,
    num_splits: int = 0,
    multiprocessors: int = MULTIPROCESSORS,
) -> list[Piece]:
    """List split_kv's pieces of work on a GPU with this many multiprocessors, from a small kernel that asks StreamK."""
    call = _call(lengths, heads, kv_heads, d, num_splits)
    with limits.pretend_gpu(limits.Limits(SHARED, multiprocessors, 90)):
        sizes = SPLIT_KV.sizes_for(call)
        (launch,) = SPLIT_KV.launches(SPLIT_KV, call, sizes)
    (params,) = (a for a in launch.args if isinstance(a, np.ndarray))
    most = len(lengths) * kv_heads + 1
    noted = cp.full((launch.grid[0], most, 4), -1, dtype=np.int32)
    ask = kernel.load(kernel.with_headers(ASK, "ask"), "ask", defines={**sizes, "PAGED": 0})
    arguments = cp.asarray(np.array(lengths, np.int32)), noted, np.int32(most), params
    ask(launch.grid[:1], (32,), arguments)
    rows = cp.asnumpy(noted)
    return [Piece(block, *map(int, row)) for block, own in enumerate(rows) for row in own if row[0] >= 0]


def bytes_in_flight(stage: str, *, heads: int = 32, kv_heads: int = 8, d: int = 128) -> int:
    """Return how many bytes of K and V can be in flight per multiprocessor of an H200: the rings of all its warps."""
    call = _call([8192], heads, kv_heads, d, 0)
    with limits.pretend_gpu(limits.Limits(SHARED, MULTIPROCESSORS, 90)):
        sizes = DECODERS[stage].sizes_for(call)
    return sizes["WARPS"] * sizes["STAGES"] * 2 * sizes["BLOCK_N"] * d * call.arrays["q"].dtype.itemsize


def on_multiprocessors(cut: Sequence[Piece], count: int) -> list[tuple[int, int, int, int, str]]:
    """Schedule each block on the first free multiprocessor, with times in keys: for show.schedules."""
    free, place_of, blocks = [0] * count, {}, []
    for piece in cut:
        at = place_of.setdefault(piece.block, free.index(min(free)))
        end = free[at] + piece.end - piece.first
        blocks.append((at, free[at], end, piece.sequence % 6, str(piece.sequence)))
        free[at] = end
    return blocks


def _call(lengths: Sequence[int], heads: int, kv_heads: int, d: int, num_splits: int) -> DecodeCall:
    """Describe a call with one new bfloat16 token per sequence, by its shapes alone."""
    batch, dtype = len(lengths), dtype_of("bfloat16")
    cache = Spec.dense((batch, max(lengths), kv_heads, d), dtype)
    specs = {"q": Spec.dense((batch, 1, heads, d), dtype), "k_cache": cache, "v_cache": cache}
    specs["cache_seqlens"] = Spec.dense((batch,), np.int32)
    _, call, _ = decoding.check(specs, decoding.DecodeOptions(num_splits=num_splits))
    if call is None:
        raise ValueError("there is no work to divide: no sequence, or no key")
    return call


def recorded() -> dict[str, Any]:
    """Load the committed record of decoding: the contestants that were measured, and its rows.

    Raises:
        FileNotFoundError: there is no record.
    """
    record = study.recorded()
    if record is None:
        raise FileNotFoundError("notebooks/measured/ has no record of decoding")
    return record


OURS = {"contiguous": "14", "pages of 16": "14, pages of 16", "read (sum)": "torch.sum of K and V"}


def recorded_speeds(part: str = "rows") -> dict[study.Sizes, dict[str, float]]:
    """Return each kernel's GB/s of K and V by (sequences, keys, heads, KV heads, d), for pages of 16 keys.

    Args:
        part: "rows", compared with other libraries; "steps", those of the climb.
    """
    speeds: dict[study.Sizes, dict[str, float]] = {}
    for row in recorded()["rows"]:
        name = row.get("name", "")
        if row["part"] == part and (name in OURS or "pages" not in name):
            speeds.setdefault(tuple(row["row"]), {})[OURS.get(name, name)] = row["gb_per_s"]
    return speeds


def recorded_rows(part: str) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return the recorded rows of one part of the study by name, for each of the inputs measured.

    Args:
        part: "long": few sequences, one of them long; "prefix": a shared one; "tree"; "parts"; "grids"; "fp8"; "graph".
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in recorded()["rows"]:
        if row["part"] != part:
            continue
        if "lengths" in row:
            first, *others = row["lengths"]
            what = f"{first:,} and {len(others)} × {others[0]:,} keys"
            if len({*others}) > 1:
                what = f"{len(row['lengths'])} sequences of {min(row['lengths'])} to {max(row['lengths']):,} keys"
        elif "shared" in row:
            what = f"{row['row'][0]} sequences share {row['shared']:,} keys, + {row['row'][1] - row['shared']} each"
        elif "drafts" in row:
            what = f"{row['drafts']} drafts, {row['row'][0]} × {row['row'][1]:,} keys"
        elif "row" in row:
            batch, keys, heads, kv_heads, d = row["row"]
            what = f"{batch} × {keys:,} keys, {heads}/{kv_heads} heads of {d}"
            what += f", V {row['d_v']}" if row.get("d_v", d) != d else ""
        else:
            what = f"{row['batch']} sequence{'s' * (row['batch'] > 1)}" if "batch" in row else part
        found.setdefault(what, {})[row["name"]] = row
    return list(found.items())


def microseconds(part: str, names: Mapping[str, str]) -> str:
    """Tabulate a part's microseconds: a line for each input, a column for each contestant, by its title."""
    lines = [f"{'microseconds':44}" + "".join(f"{title:>13}" for title in names.values())]
    for what, rows in recorded_rows(part):
        cells = (f"{1e3 * rows[name]['ms']:.1f}" if name in rows else "" for name in names)
        lines.append(f"{what:44}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def climb_table() -> str:
    """Tabulate each step's GB/s, and its speed relative to the previous step."""
    speeds = recorded_speeds("steps")
    titles = [f"{batch} × {keys:,} keys" for batch, keys, *_ in speeds]
    lines = [f"{'GB/s, × the step before':26}" + "".join(f"{title:>20}" for title in titles)]
    names = list(next(iter(speeds.values())))
    for number, name in enumerate(names):
        cells = []
        for of_row in speeds.values():
            ratio = f"{of_row[name] / of_row[names[number - 1]]:.2f}×" if number else ""
            cells.append(f"{of_row[name]:13,.0f}{ratio:>7}")
        lines.append(f"{number} {name.replace('_', ' '):24}" + "".join(cells))
    return "\n".join(lines)


def parts(cut: Sequence[Piece]) -> dict[tuple[int, int], int]:
    """Count the pieces of each (sequence, KV head)."""
    return dict(Counter((piece.sequence, piece.kv_head) for piece in cut))


def expected(arrays: Arrays) -> np.ndarray:
    """Compute the output in float64."""
    o, _ = reference.attention_with_kvcache(**arrays)
    return o
