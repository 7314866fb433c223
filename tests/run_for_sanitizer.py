"""Every stage, and every step of a climb, at awkward sizes: the program to run under compute-sanitizer on a GPU.

    PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 python3 tests/run_for_sanitizer.py [STAGE ...]

The other tools: racecheck, synccheck, initcheck. The results are checked too, so no failure is silent. For stage 13,
racecheck reports that copies of lse and delta overwrite them while they are read. After a barrier, one thread arrives
for its warpgroup at the mbarrier that releases them; `bulk_copies`, which runs only if named, has this pattern in four
kernels. racecheck reports the one that copies by cp.async.bulk, but not the same with a tensor map, nor the one in
which all threads arrive. We believe that its report is false: a barrier orders everything before it, whichever thread
arrives afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from helpers.attention import (
    comms,
    decoders,
    flash_attention_backward,
    flash_attention_with_kvcache,
    kernel,
    reference,
    ring_attention,
    ring_attention_backward,
    ring_schedules,
    rotary_and_projection,
)
from helpers.attention.check import check, in_float64, in_type, make_inputs
from helpers.attention.ladder import BACKWARD, FORWARD, LADDER, Stage, backward, limits
from helpers.attention.ladder.layout import Spec
from helpers.attention.ladder.stages.hopper import TALL, persistent, pick_hopper
from helpers.attention.ladder.steps import BASES, CLIMBS, FP8_CODES, MULTICAST
from helpers.attention.ladder.tensor_maps import tensor_map
from helpers.attention.score_mods import relative_bias
from helpers.bench.cases import TYPES
from helpers.device import ON_GPU, cp, describe

# (rows, keys, head_dim, causal, window); with a stage that supports masks, two batches of 4 query and 2 KV heads
SHAPES = (
    (1, 1, 8, False, None),
    (33, 31, 3, False, None),
    (65, 63, 8, True, None),
    (64, 127, 40, False, None),
    (127, 257, 64, True, None),
    (133, 100, 64, False, (30, 9)),
    (63, 65, 80, False, None),
    (65, 133, 128, True, (40, 0)),
    (40, 33, 200, True, None),
)
PERSISTENT = persistent, LADDER["fp8"].launches  # a block computes several tiles if there are few multiprocessors
OF_A_STEP = (SHAPES[1], SHAPES[3], (133, 257, 128, False, None))  # in each of its types; tails, and more than one tile
SLOW_HEAD_DIMS = (64, 128)  # for a stage that takes half a minute to compile for each
PACKED = (0, 70, 70, 71, 103), (0, 33, 50, 50, 180)  # queries and keys of four packed sequences


@contextlib.contextmanager
def few_multiprocessors(count: int) -> Iterator[None]:
    """Let the ladder plan for a GPU with so few multiprocessors that a persistent block computes several tiles."""
    there = limits.multiprocessors
    limits.multiprocessors = lambda: count
    try:
        yield
    finally:
        limits.multiprocessors = there


def run(stage: Stage, dtype: str) -> None:
    """Run everything above that the stage supports. Raises CheckFailed for a wrong result."""
    run_once(stage, dtype)
    if stage.launches in PERSISTENT:
        with few_multiprocessors(2):
            run_once(stage, dtype)


def run_once(stage: Stage, dtype: str) -> None:
    """Do what `run` does once, with as many blocks as the ladder chooses."""
    masks = "causal" in stage.features
    for n, n_kv, head_dim, causal, window in SHAPES:
        slow = stage.slow_to_compile and head_dim not in SLOW_HEAD_DIMS
        if not slow and stage.why_not(head_dim=head_dim, dtype=dtype) is None:
            mask = {"causal": causal, "window": window} if masks else {}
            heads = ((2, 4), (2, 2)) if masks else ((1, 2), (1, 2))
            compare(stage, dtype, f"{n}x{n_kv}x{head_dim}", *random(heads, n, n_kv, head_dim, dtype), **mask)
    if "varlen" in stage.features:
        cu_q, cu_k = (np.array(ends, dtype=np.int32) for ends in PACKED)
        q, k, v = (a[0] for a in random(((1, 4), (1, 2)), cu_q[-1], cu_k[-1], 64, dtype))
        launch, o = stage.prepare(q, k, v, causal=True, cu_seqlens=(cu_q, cu_k))
        launch()
        o = cp.asnumpy(o)
        for i in range(len(cu_q) - 1):
            rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
            if rows.start < rows.stop and keys.start < keys.stop:
                wanted = exact(q[:, rows], k[:, keys], v[:, keys], causal=True)
                check(f"{stage.name} {dtype} sequence {i}", o[:, rows], wanted, tolerance=near(dtype))


def run_fused(stage: Stage, dtype: str) -> None:
    """Run a bias of each kind, ALiBi and each rotary embedding, for a stage that supports them."""
    rng = np.random.default_rng(0)
    n, n_kv = 133, 101
    q, k, v = random(((2, 4), (2, 2)), n, n_kv, 64, dtype)
    padded = rng.standard_normal((4, n, 112)).astype(TYPES[dtype])[..., :n_kv]  # rows start at multiples of 16 bytes
    angles = np.linspace(0, 3, 16 * 200).reshape(200, 16)
    cos, sin = (function(angles).astype(TYPES[dtype]) for function in (np.cos, np.sin))
    places = tuple(rng.integers(0, 200, rows, dtype=np.int32) for rows in (n, n_kv))
    for options in (
        {"bias": padded, "causal": True},
        {"bias": padded.copy()},
        {"bias": rng.standard_normal((2, 1, 1, n_kv)).astype(np.float32)},
        {"bias": rng.random((n, 112))[..., :n_kv] < 0.6, "window": (40, 30)},
        {"alibi_slopes": rng.random((2, 4)).astype(np.float32)},
        {"rotary_cos": cos, "rotary_sin": sin, "rotary_positions": places},
        {"rotary_cos": cos, "rotary_sin": sin, "rotary_positions": places, "rotary_interleaved": True, "causal": True},
    ):
        launch, o = stage.prepare(q, k, v, **options)
        launch()
        found = {
            name: a.astype(np.float64) if name in ("rotary_cos", "rotary_sin") else a for name, a in options.items()
        }
        tolerance = near(dtype) * (
            4 if "rotary_cos" in options and dtype != "float32" else 1
        )  # Q and K are rounded once more
        check(f"{stage.name} {dtype} {', '.join(options)}", o, exact(q, k, v, **found), tolerance=tolerance)
    cu = tuple(np.array(ends, dtype=np.int32) for ends in PACKED)
    q, k, v = (a[0] for a in random(((1, 4), (1, 2)), cu[0][-1], cu[1][-1], 64, dtype))
    launch, o = stage.prepare(
        *(q, k, v), cu_seqlens=cu, causal=True, rotary_cos=cos, rotary_sin=sin, alibi_slopes=np.ones(4, np.float32)
    )
    launch()
    for i in (0, 3):  # the others have no rows, or no keys
        rows, keys = (slice(*ends[i : i + 2]) for ends in cu)
        n, n_kv = rows.stop - rows.start, keys.stop - keys.start
        places = np.maximum(np.arange(n) + n_kv - n, 0), np.arange(n_kv)
        beside = {
            "rotary_cos": cos.astype(np.float64),
            "rotary_sin": sin.astype(np.float64),
            "rotary_positions": places,
        }
        wanted = exact(q[:, rows], k[:, keys], v[:, keys], causal=True, alibi_slopes=np.ones(4), **beside)
        tolerance = near(dtype) * (4 if dtype != "float32" else 1)
        check(f"{stage.name} {dtype} sequence {i}, all", cp.asnumpy(o)[:, rows], wanted, tolerance=tolerance)


def run_backward(stage: Stage, dtype: str) -> None:
    """Run the gradients of all of the above, deterministic or not. Raises CheckFailed for a wrong result."""
    forward = "heads_and_masks" if dtype == "float32" else "flash_mma"
    slopes = {"alibi_slopes": np.ones(4, np.float32)}
    beside = [(forward, {}), *([(forward, slopes)] if "mod" in stage.features else [])]
    ways = (False, True) if "deterministic" in stage.features else (False,)
    for n, n_kv, head_dim, causal, window in SHAPES:
        if stage.why_not(head_dim=head_dim, dtype=dtype) is None:
            gradients_of(stage, dtype, n, n_kv, head_dim, causal=causal, window=window)
    if "varlen" in stage.features:
        cu = tuple(np.array(ends, dtype=np.int32) for ends in PACKED)
        q, k, v = (a[0] for a in random(((1, 4), (1, 2)), cu[0][-1], cu[1][-1], 64, dtype))
        do = random(((1, 4), (1, 4)), cu[0][-1], cu[0][-1], 64, dtype)[1][0]
        for (forward, slopes), deterministic in itertools.product(beside, ways):
            how = {"causal": True, "cu_seqlens": cu, **slopes}
            launch, (o, lse) = LADDER[forward].prepare(q, k, v, return_lse=True, **how)
            launch()
            launch, found = backward.prepare(stage, do, q, k, v, o, lse, deterministic=deterministic, **how)
            launch()
            dq, dk, dv = map(cp.asnumpy, found)
            for i in range(len(cu[0]) - 1):
                rows, keys = (slice(*ends[i : i + 2]) for ends in cu)
                if rows.start < rows.stop and keys.start < keys.stop:
                    own, given = (
                        (dq[:, rows], dk[:, keys], dv[:, keys]),
                        (do[:, rows], q[:, rows], k[:, keys], v[:, keys]),
                    )
                    where = f"{stage.name} {dtype} sequence {i}{', ALiBi' * bool(slopes)}"
                    compare_gradients(where, own, given, causal=True, **slopes)


def gradients_of(stage: Stage, dtype: str, n: int, n_kv: int, head_dim: int, **mask: object) -> None:
    """Run the gradients at one size, with all the stage's tiles and variants. Raises CheckFailed for a wrong result."""
    q, k, v = random(((2, 4), (2, 2)), n, n_kv, head_dim, dtype)
    do = random(((2, 4), (2, 4)), n, n, head_dim, dtype)[1]
    o, lse = LADDER["heads_and_masks" if dtype == "float32" else "flash_mma"](q, k, v, return_lse=True, **mask)
    ways = (False, True) if "deterministic" in stage.features else (False,)
    for deterministic, sizes in itertools.product(ways, all_tiles(stage, head_dim)):
        launch, found = backward.prepare(stage, do, q, k, v, o, lse, deterministic=deterministic, sizes=sizes, **mask)
        launch()
        where = f"{stage.file} {dtype} {n}x{n_kv}x{head_dim}, {tiles_in_words(sizes)}"
        compare_gradients(where, found, (do, q, k, v), **mask)


def compare_gradients(where: str, found: Sequence[Any], given: Sequence[np.ndarray], **mask: object) -> None:
    """Compare dq, dk and dv with those in float64, from do, q, k and v. Raises CheckFailed for a wrong result."""
    dtype = given[1].dtype.name
    expected = reference.attention_backward(*(a.astype(np.float64) for a in given), **mask)
    for name, got, wanted in zip(("dQ", "dK", "dV"), found, expected, strict=True):
        check(f"{where}: {name}", got, wanted, tolerance=near(dtype) * max(1.0, float(abs(wanted).max())))


def run_step(step: Stage, dtype: str) -> None:
    """Run a step of a climb: the output without a mask, or causal gradients. Raises CheckFailed for a wrong result."""
    for n, n_kv, head_dim, *_ in OF_A_STEP:
        if step.why_not(head_dim=head_dim, dtype=dtype) is not None:
            continue
        if step.direction == "backward":
            gradients_of(step, dtype, n, n_kv, head_dim, causal=True)
        else:
            q, k, v = random(((1, 2), (1, 2)), n, n_kv, head_dim, dtype)
            launch, o = step.prepare(q, k, v)
            launch()
            check(f"{step.file} {dtype} {n}x{n_kv}x{head_dim}", o, exact(q, k, v), tolerance=near(dtype))


def random(heads: Sequence[tuple[int, int]], n: int, n_kv: int, head_dim: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Draw q with heads[0] and k, v with heads[1] heads, each (batch, heads, rows, head_dim)."""
    return tuple(
        in_type(make_inputs(batch * count * rows, 1, head_dim, seed=seed)[0], dtype).reshape(
            batch, count, rows, head_dim
        )
        for seed, ((batch, count), rows) in enumerate(zip((*heads, heads[1]), (n, n_kv, n_kv), strict=True))
    )


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
    """Compute attention in float64, with K and V repeated for the heads that share them; on request also lse."""
    shared = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(a, shared, axis=-3) for a in (k, v))
    return reference.attention(*(in_float64(a) for a in (q, k, v)), **options)


def near(dtype: str) -> float:
    """Return the tolerance: rounding of P and O to the type, for values of a few units."""
    if dtype == "uint8":
        return 4 * 2.0**-4
    return 1e-5 if dtype == "float32" else 4 * float(np.finfo(np.float16).eps) * (8 if dtype == "bfloat16" else 1)


def all_tiles(stage: Stage, head_dim: int) -> list[dict[str, int]]:
    """Return the tiles of a large launch, and each alternative: -D options without HEAD_DIM."""
    own = dict(stage.tiles(head_dim))
    found = [own]
    if stage.launches is persistent:
        for masked, keys in ((True, None), (False, 1), (True, 1)):
            if (sizes := pick_hopper(head_dim, masked, keys)) not in found:
                found.append(sizes)
        if 96 < head_dim <= 128:
            found.append(TALL)
    for other in (stage.tuning.small_grid, stage.tuning.tiny_grid, stage.tuning.single_wave):
        if (sizes := {**own, **other(head_dim, limits.most_shared())}) not in found:
            found.append(sizes)
    return found


def tiles_in_words(sizes: Mapping[str, int]) -> str:
    """Format the sizes in a line, for the name of a check."""
    return "tiles " + " ".join(map(str, sizes.values()))


def compare(stage: Stage, dtype: str, where: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, **mask: object) -> None:
    """Run with the tiles of a large launch, and with each alternative. Raises CheckFailed for a wrong result."""
    wishes = {"return_lse": True} if "lse" in stage.features else {}
    for sizes in all_tiles(stage, q.shape[-1]):
        launch, got = stage.prepare(q, k, v, **mask, **wishes, sizes=sizes)
        launch()
        o = got[0] if wishes else got
        check(
            f"{stage.name} {dtype} {where}, {tiles_in_words(sizes)}", o, exact(q, k, v, **mask), tolerance=near(dtype)
        )


def run_bias_gradients() -> None:
    """Run gradients of terms added to the scores, in each form. Raises CheckFailed for a wrong result."""
    added = {"alibi_slopes": np.float32([0.5, 0.25, 0.1, 0.7]), "sinks": np.float32([-np.inf, 0, 1, 2])}
    rng, n, n_kv = np.random.default_rng(0), 133, 100
    table = rng.standard_normal((4, 41), np.float32)
    shapes = (4, 1, n_kv), (n, 1), (4, 1, 1), (2, 4, n, n_kv)
    for (dtype, d), shape in itertools.product((("float32", 59), ("float16", 40)), shapes):
        q, k, v = random(((2, 4), (2, 2)), n, n_kv, d, dtype)
        do, options = q[:, ::-1], {"bias": rng.standard_normal(shape, np.float32), **added, "causal": True}
        o, lse = (
            a.astype(t) for a, t in zip(exact(q, k, v, return_lse=True, **options), (q.dtype, np.float32), strict=True)
        )
        given = [a.swapaxes(1, 2) for a in (do, q, k, v, o)]
        got = flash_attention_backward(*given, lse, wrt=[*options][:3], **options)[3:]
        wanted = reference.attention_backward(do, q, k, v, wrt=[*options][:3], **options)[3:]
        for name, a, want in zip(options, got, wanted, strict=False):
            largest = max(1.0, float(np.abs(want).max()))
            check(f"d{name} {shape} {dtype}", a, want, tolerance=largest * (1e-5 if dtype == "float32" else 0.01))
    q, k, v = random(((1, 4), (1, 2)), n, n_kv, 20, "float32")
    options = relative_bias(table)
    bias = reference.distance_bias(table, n, n_kv)
    o, lse = exact(q, k, v, return_lse=True, bias=bias)
    given = [a.astype(np.float32).swapaxes(1, 2) for a in (q, q, k, v, o)]
    got = flash_attention_backward(*given, lse.astype(np.float32), wrt=["table"], **options)[3]
    dbias = reference.attention_backward(q, q, k, v, bias=bias, wrt=["bias"])[3]
    check("dtable", got, reference.distance_bias_gradient(dbias, 41), tolerance=1e-4)


def run_neighbours() -> None:
    """Run the rotary pass and the output projection, packed too. Raises CheckFailed for a wrong result."""
    for dtype, d, rotary_dim, interleaved in (("float32", 20, 16, True), ("float16", 40, 16, False)):
        q, k = (a.swapaxes(1, 2) for a in random(((2, 4), (2, 2)), 33, 35, d, dtype)[:2])
        at = tuple(np.arange(rows, dtype=np.int32)[::-1].copy() for rows in (33, 35))
        cos, sin = rotary_and_projection.cos_sin(40, rotary_dim)
        for a, got, positions in zip(
            (q, k), rotary_and_projection.rotary(q, k, cos, sin, interleaved=interleaved, positions=at), at, strict=True
        ):
            wanted = reference.rotary(a, cos, sin, positions[:, None], interleaved=interleaved)
            check(f"rotary {dtype}", got, wanted, tolerance=near(dtype))
    for form, d, cu in itertools.product(rotary_and_projection.FORMS, (40, 64, 128), (None, PACKED)):
        if LADDER["flash_mma"].why_not(head_dim=d, dtype="float16") is not None:
            continue
        rows, keys = (133, 70) if cu is None else (cu[0][-1], cu[1][-1])
        q, k, v = (a.swapaxes(1, 2) for a in random(((1, 4), (1, 2)), rows, keys, d, "float16"))
        w_o = (np.random.default_rng(0).standard_normal((4 * d, 136)) * (4 * d) ** -0.5).astype(np.float16)
        if cu is None:
            y = cp.asnumpy(rotary_and_projection.attention_projection(q, k, v, w_o, form=form, causal=True))
            parts = [(slice(rows), slice(keys))]
        else:
            ends = tuple(np.array(of, np.int32) for of in cu)
            y = cp.asnumpy(
                rotary_and_projection.attention_projection(
                    q[0], k[0], v[0], w_o, form=form, causal=True, cu_seqlens=ends
                )
            )[None]
            parts = [(slice(*cu[0][i : i + 2]), slice(*cu[1][i : i + 2])) for i in range(len(cu[0]) - 1)]
        for own, seen in parts:
            if own.start != own.stop and seen.start != seen.stop:
                o = exact(*(a.swapaxes(1, 2) for a in (q[:, own], k[:, seen], v[:, seen])), causal=True)
                wanted = o.swapaxes(1, 2).reshape(1, -1, 4 * d) @ w_o.astype(np.float64)
                check(f"projection {form}, d = {d}", y[:, own], wanted, tolerance=near("float16"))


def run_decoding() -> None:
    """Run every decoder, in parts and in stretches; in pages with new tokens if it supports them."""
    for decoder, d, splits in itertools.product(decoders.DECODERS.values(), (64, 128, 256), (0, 3)):
        if limits.compute_capability() < decoder.min_cc:
            continue
        last = decoder is decoders.SPLIT_KV
        for dtype, page in itertools.product(decoder.dtypes, (0, 16) if last else (0,)):
            rng = np.random.default_rng(d)
            shape = (12, page, 2, d) if page else (3, 64, 2, d)
            shapes = {"q": (3, 2, 8, d), "k_cache": shape, "v_cache": shape}
            shapes |= {"k": (3, 2, 2, d), "v": (3, 2, 2, d)} if last else {}
            arrays = {name: rng.standard_normal(shape).astype(TYPES[dtype]) for name, shape in shapes.items()}
            arrays["cache_seqlens"] = np.array([62, 2, 33], np.int32)
            arrays |= {"block_table": rng.permutation(12).reshape(3, 4).astype(np.int32)} if page else {}
            o = flash_attention_with_kvcache(**arrays, num_splits=splits, stage=decoder.name)
            wanted, _ = reference.attention_with_kvcache(**arrays)
            check(f"{decoder.name} {dtype}, d = {d}", o.astype(np.float64), wanted, tolerance=near(dtype))


# As in 13: a fifth warp copies one tile after the other to one place; four warps wait at an mbarrier and read it. They
# arrive at another mbarrier when they have read it: all threads, or one thread after a named barrier of the four warps.
_BULK_COPIES = """
#include "hopper.cuh"
template <bool BY_MAP, bool ALL>
__global__ void copy(const __grid_constant__ TensorMap map, const uint4* source, uint4* target) {
  __shared__ __align__(1024) uint4 tile[16 * 8];
  __shared__ __align__(8) unsigned long long barriers[2];
  const unsigned full = smem_address(barriers), empty = full + 8;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, ALL ? 128 : 1);
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x == 128) {
      mbarrier_wait(empty, i % 2 ^ 1);  // hazard: the tile before is still being read
      mbarrier_arrive_expect_tx(full, sizeof(tile));
      if (BY_MAP) tma_load(smem_address(tile), map, full, 0, 16 * i, 0, 0);
      else bulk_load(smem_address(tile), source + 128 * i, full, sizeof(tile));
    }
    if (threadIdx.x < 128) {
      mbarrier_wait(full, i % 2);
      const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
      target[128 * i + threadIdx.x] = tile[BY_MAP ? 8 * row + (chunk ^ row % 8) : threadIdx.x];
      if (!ALL) named_barrier_sync(1, 128);  // hazard: one thread says for all that they have read
      if (ALL || threadIdx.x == 0) mbarrier_arrive(empty);
    }
  }
}
"""


def run_bulk_copies() -> None:
    """Copy 64 rows of 64 halves, 16 at a time, in each form. Raises CheckFailed for a wrong copy."""
    source = cp.asarray(np.random.default_rng(0).standard_normal((1, 1, 64, 64)).astype(np.float16))
    box, words = tensor_map(Spec.of(source), source.data.ptr, box_rows=16), source.view(np.uint32)
    for name in ("copy<true, true>", "copy<true, false>", "copy<false, true>", "copy<false, false>"):
        target = cp.zeros_like(words)
        copy = kernel.load(kernel.with_headers(_BULK_COPIES, "bulk_copies"), name)
        copy((1,), (160,), (box, words, target))
        check(name, target.view(np.float16), cp.asnumpy(source), tolerance=0.0)


def run_ring() -> None:
    """Run three virtual ranks, causal: partial results in float32, their merge, gradients that travel."""
    ranks = comms.virtual_ranks(3)
    for dtype, d in (("float32", 18), ("float16", 20), ("float16", 128), ("bfloat16", 136)):
        if dtype != "float32" and LADDER["flash_mma"].why_not(head_dim=d + -d % 8, dtype=dtype) is not None:
            continue
        q, k, v = random(((2, 4), (2, 2)), 66, 66, d, dtype)
        do = random(((2, 4), (2, 4)), 66, 66, d, dtype)[1]
        given = [ranks.put(ring_schedules.shard(a.swapaxes(1, 2), 3)) for a in (do, q, k, v)]
        o, lse = ring_attention(*given[1:], causal=True, return_lse=True, comms=ranks)
        whole = cp.asnumpy(ring_schedules.unshard(o)).swapaxes(1, 2)
        check(f"ring {dtype}, d = {d}", whole, exact(q, k, v, causal=True), tolerance=near(dtype))
        found = ring_attention_backward(*given, o, lse, causal=True, comms=ranks)
        found = [cp.asnumpy(ring_schedules.unshard(a)).swapaxes(1, 2) for a in found]
        compare_gradients(f"ring {dtype}, d = {d}", found, (do, q, k, v), causal=True)


def main(names: Sequence[str]) -> int:
    """Run everything; the exit status is 0 if every result is right."""
    print(describe())
    if ON_GPU:
        cp.cuda.set_allocator(None)  # CuPy's pool cuts arrays from large blocks: an overrun would stay within one
    for stage in FORWARD.values():
        for dtype in stage.dtypes:
            if (not names or stage.name in names) and stage.why_not(head_dim=64, dtype=dtype) is None:
                run(stage, dtype)
                if "mod" in stage.features:
                    run_fused(stage, dtype)
    for stage in BACKWARD.values():
        for dtype in stage.dtypes:
            if (not names or stage.name in names) and stage.why_not(head_dim=64, dtype=dtype) is None:
                run_backward(stage, dtype)
    if not names or "neighbours" in names:
        run_neighbours()
    if not names or "bias_gradient" in names:
        run_bias_gradients()
    if not names or "decoding" in names:
        run_decoding()
    if "bulk_copies" in names:
        run_bulk_copies()
    if not names or "ring" in names:
        run_ring()
    aside = {name: [base] for name, base in BASES.items()} | {"fp8": [FP8_CODES]}
    aside["hopper"] = [*aside["hopper"], MULTICAST]
    for of, climb in CLIMBS.items():
        for step in (*climb[:-1], *aside.get(of, ())):  # the last one is the stage
            for dtype in step.dtypes:
                if (not names or of in names) and step.why_not(head_dim=64, dtype=dtype) is None:
                    run_step(step, dtype)
                    if LADDER[of].launches in PERSISTENT:
                        with few_multiprocessors(2):
                            run_step(step, dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
