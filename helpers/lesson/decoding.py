"""What notebook 14 does with the kernels that decode: inputs, launches, X-rays, and how they cut up their work.

arrays = inputs([100, 40, 260], page=16)
run(arrays)                                                 # the outputs of two launches, one after the other
xray_launches(arrays, stage="packed_heads", num_splits=2)  # the X-ray of each launch
pieces([100, 40, 260], multiprocessors=4)                   # which keys each block has
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from helpers.attention import decoding, kernel, reference
from helpers.attention.decoders import DECODERS, SPLIT_KV, Call
from helpers.attention.ladder import limits
from helpers.attention.ladder.layout import Spec
from helpers.device import cp
from helpers.engine.cuda_source.c_types import dtype_of
from helpers.renamed import old_names
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
    """The arrays of a call with one new token of each sequence; keys that nobody has written are NaN.

    Args:
        lengths: keys of each sequence, that of the new token among them. page: keys of a page, in any order; 0: the
            keys of a sequence lie one after the other.
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
    """The outputs of so many launches on this device, one after the other, with the same scratch and tickets.

    Args:
        code: another text of the kernel. stage: a step of the climb.
    """
    there = {name: cp.asarray(a) for name, a in arrays.items()}
    options = decoding.Options(num_splits=num_splits, stage=stage)
    planned, every = decoding.plan(there, options, source=code)
    outputs = []
    for _ in range(times):
        every["o"][...] = np.nan
        for launch in planned.bind(every):
            launch()
        outputs.append(np.array(cp.asnumpy(every["o"])))
    return outputs


def xray_launches(
    arrays: Arrays, *, code: str | None = None, stage: str | None = None, num_splits: int = 0, multiprocessors: int = 4
) -> list[Report]:
    """The X-ray of each launch, on the CPU, as planned for a GPU like the H200 with so many multiprocessors.

    Findings of what nobody writes are left out: units that are not cut have no partial results.
    """
    there = {name: cp.asarray(a) for name, a in arrays.items()}
    options = decoding.Options(num_splits=num_splits, stage=stage)
    with limits.of_another(limits.Limits(SHARED, multiprocessors, 90)), kernel.built_when_launched():
        planned, every = decoding.plan(there, options, source=code)
    reports = []
    for launch, compiled in zip(planned.launches, planned.kernels, strict=True):
        report = xray(compiled, launch.grid, launch.block, launch.arguments(every), launch.shared_bytes)
        found = [finding for finding in report.findings if finding.kind != "never written"]
        reports.append(replace(report, findings=found))
    return reports


class Piece(NamedTuple):
    """Keys first .. end - 1 of one sequence and one head of K and V: what a block goes through in one go."""

    block: int
    sequence: int
    kv_head: int
    first: int
    end: int


# A block notes its pieces in its own rows of `pieces`, from `most * blockIdx.x` on.
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
    """How 14 cuts up its work on a GPU with so many multiprocessors: by its own StreamK, which a small kernel asks."""
    call = _call(lengths, heads, kv_heads, d, num_splits)
    with limits.of_another(limits.Limits(SHARED, multiprocessors, 90)):
        sizes = SPLIT_KV.sizes(call)
        (launch,) = SPLIT_KV.launches(call, sizes)
    (params,) = (a for a in launch.args if isinstance(a, np.ndarray))
    most = len(lengths) * kv_heads + 1
    noted = cp.full((launch.grid[0], most, 4), -1, dtype=np.int32)
    ask = kernel.load(kernel.with_headers(ASK, "ask"), "ask", defines={**sizes, "PAGED": 0})
    arguments = cp.asarray(np.array(lengths, np.int32)), noted, np.int32(most), params
    ask(launch.grid[:1], (32,), arguments)
    rows = cp.asnumpy(noted)
    return [Piece(block, *map(int, row)) for block, own in enumerate(rows) for row in own if row[0] >= 0]


def bytes_in_flight(stage: str, *, heads: int = 32, kv_heads: int = 8, d: int = 128) -> int:
    """At most, on a multiprocessor of an H200, of K and V: what the rings of all its warps hold."""
    call = _call([8192], heads, kv_heads, d, 0)
    with limits.of_another(limits.Limits(SHARED, MULTIPROCESSORS, 90)):
        sizes = DECODERS[stage].sizes(call)
    return sizes["WARPS"] * sizes["STAGES"] * 2 * sizes["BLOCK_N"] * d * call.arrays["q"].dtype.itemsize


def on_multiprocessors(cut: Sequence[Piece], count: int) -> list[tuple[int, int, int, int, str]]:
    """The blocks on so many multiprocessors, each on the first that is free, in keys: for show.schedules."""
    free, places, found = [0] * count, {}, []
    for piece in cut:
        at = places.setdefault(piece.block, free.index(min(free)))
        end = free[at] + piece.end - piece.first
        found.append((at, free[at], end, piece.sequence % 6, str(piece.sequence)))
        free[at] = end
    return found


def _call(lengths: Sequence[int], heads: int, kv_heads: int, d: int, num_splits: int) -> Call:
    """The call of one new token of each sequence, in bfloat16: only shapes, no arrays."""
    batch, dtype = len(lengths), dtype_of("bfloat16")
    cache = Spec.dense((batch, max(lengths), kv_heads, d), dtype)
    specs = {"q": Spec.dense((batch, 1, heads, d), dtype), "k_cache": cache, "v_cache": cache}
    specs["cache_seqlens"] = Spec.dense((batch,), np.int32)
    _, call, _ = decoding.check(specs, decoding.Options(num_splits=num_splits))
    if call is None:
        raise ValueError("there is nothing to cut: no sequence, or no key")
    return call


def parts(cut: Sequence[Piece]) -> dict[tuple[int, int], int]:
    """In how many pieces each unit is, by its sequence and head."""
    counts: dict[tuple[int, int], int] = {}
    for piece in cut:
        unit = piece.sequence, piece.kv_head
        counts[unit] = counts.get(unit, 0) + 1
    return counts


def splits_of_flash_attention_3(lengths: Sequence[int], *, kv_heads: int = 8, tile: int = 128) -> list[int]:
    """The parts of each sequence that FlashAttention-3 chooses on an H200, where it is given the lengths.

    After flash-attention's hopper/flash_api.cpp, heuristics.h and flash_prepare_scheduler.cu. tile: keys of its tile.
    """
    tiles = [-(-length // tile) for length in lengths]
    most = _most_splits_of_flash_attention_3(kv_heads, max(tiles))  # as if the longest sequence were alone
    of_one = max(1, math.ceil(sum(tiles) * 1.1 * kv_heads / MULTIPROCESSORS))  # tiles of a multiprocessor
    return [max(min(-(-each // of_one), most), 1) for each in tiles]


def _most_splits_of_flash_attention_3(units: int, tiles: int) -> int:
    """The fewest parts that fill the multiprocessors nearly as well as any number does."""
    if units >= 0.8 * MULTIPROCESSORS or tiles <= 4:
        return 1
    waves = [units * splits / MULTIPROCESSORS for splits in range(1, min(128, MULTIPROCESSORS, tiles) + 1)]
    full = [each / math.ceil(each) for each in waves]
    return next(splits for splits, share in enumerate(full, start=1) if share >= 0.85 * max(full))


def expected(arrays: Arrays) -> np.ndarray:
    """The output in float64."""
    o, _ = reference.attention_with_kvcache(**arrays)
    return o


old_names(__name__, look="xray_launches")
