"""Ring attention: schedules as data, virtual ranks against float64, the merge kernel and its bugs, ranks that fail."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from planted import Bug, check_all_can_be_planted

from helpers import device, engine
from helpers.attention import (
    check,
    comms,
    flash_attention,
    flash_attention_backward,
    forget,
    kernel,
    reference,
    ring,
    ring_attention,
    ring_attention_backward,
    ring_masks,
    ring_schedules,
)
from helpers.attention.comms import Message, Nccl, virtual_ranks
from helpers.attention.ladder import LADDER, limits
from helpers.attention.ladder.call import Call, ForwardOptions
from helpers.attention.ladder.layout import Spec, bits
from helpers.attention.ring_schedules import SCHEDULES, gathering_steps, positions, shard, steps, unshard
from helpers.bench.studies import ring as study
from helpers.device import cp
from helpers.xray import xray

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
on_cpu = pytest.mark.skipif(device.ON_GPU, reason="a stand-in on the CPU engine")


def inputs(rows: int, d: int, dtype: str, *, heads: int = 4, kv_heads: int = 2, keys: int = 0) -> list[np.ndarray]:
    """Make q, k, v and do with a non-zero mean."""
    rng = np.random.default_rng(rows + d)
    shapes = ((rows, heads), (keys or rows, kv_heads), (keys or rows, kv_heads), (rows, heads))
    return [(rng.standard_normal((2, *shape, d)) + 0.25).astype(TYPES[dtype]) for shape in shapes]


def on_host(parts: list[Any], schedule: str, axis: int = 1, **how: Any) -> np.ndarray:
    return unshard([cp.asnumpy(a) for a in parts], schedule, axis=axis, **how).astype(np.float64)


def in_heads(*arrays: np.ndarray) -> list[np.ndarray]:
    """Convert to (batch, heads, rows, d) in float64, with each KV head repeated for its query heads."""
    heads = arrays[0].shape[2]
    return [a.astype(np.float64).swapaxes(1, 2).repeat(heads // a.shape[2], axis=1) for a in arrays]


def around(
    ranks: Any,
    host: list[np.ndarray],
    schedule: str,
    *,
    uneven: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Return (o, lse, dq, dk, dv), each as a list over the local ranks."""
    q, k, v, do = (ranks.put(shard(a, ranks.size, schedule, uneven=uneven)) for a in host)
    options |= {"schedule": schedule, "comms": ranks}
    o, lse = ring_attention(q, k, v, return_lse=True, **options)
    return (o, lse, *ring_attention_backward(do, q, k, v, o, lse, deterministic=deterministic, **options))


# ---- schedules


@MASKS
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tile", [0, 2])
def test_each_pair_of_a_query_and_a_key_is_in_one_product(
    tile: int, size: int, schedule: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tile: the size of the tiles of keys at which products are cut into parts; 0: they are whole."""
    monkeypatch.setattr(ring_schedules, "TILE_KEYS", tile)
    check_pairs(steps(schedule, size, causal=causal, rows=6), schedule, causal, 6, in_parts=tile > 0)


def check_pairs(plan: Any, schedule: str, causal: bool, rows: int, *, in_parts: bool = False) -> None:
    """Check that the products of all ranks, or their parts, are the pairs that a mask shows, each once."""
    size = len(plan[0].sources)
    order = schedule if causal or schedule != "all_gather" else "ring"
    where = [positions(order, size, rank, rows) for rank in range(size)]
    seen, pairs = np.zeros((size * rows, size * rows), int), 0
    for step in plan:
        for rank, (source, products) in enumerate(zip(step.sources, step.products, strict=True)):
            at_hand = np.arange(size * rows) if source is None else where[source]
            for product in products:
                pairs += product.pairs
                for part in product.parts() if in_parts else (product,):
                    queries, keys = where[rank][slice(*part.rows)], at_hand[slice(*part.keys)]
                    window, causal_part = ring._mask_of(part)
                    mask = reference.visible(len(queries), len(keys), causal=causal_part, window=window)
                    seen[np.ix_(queries, keys)] += mask
    assert np.array_equal(seen, np.tri(size * rows, dtype=int) if causal else np.ones_like(seen))
    assert pairs == seen.sum()


@MASKS
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gather_with_a_step_before_it_has_each_pair_once(size: int, causal: bool) -> None:
    check_pairs(gathering_steps(size, causal, 8, 8), "all_gather", causal, 8)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_zigzag_has_equal_work_and_the_plain_ring_idles(size: int) -> None:
    rows = 32

    def work(schedule: str) -> np.ndarray:
        """Return the work as [step, rank]."""
        plan = steps(schedule, size, causal=True, rows=rows)
        return np.array([[sum(p.pairs for p in of_rank) for of_rank in step.products] for step in plan])

    zigzag, plain, gathered = map(work, SCHEDULES)
    assert (zigzag == zigzag[:, :1]).all(), "in each step all ranks have the same work"
    assert (gathered == gathered[0, 0]).all()
    whole = size * rows * (size * rows + 1) // 2
    assert zigzag.sum() == plain.sum() == gathered.sum() == whole
    # A step takes as long as its slowest rank: of 2 R - 1 halves of a full product, R are work, except for the
    # diagonal.
    share = whole / (size * plain.max(axis=1).sum())
    assert abs(share - size / (2 * size - 1)) < 1 / rows


def test_what_is_cut_comes_back() -> None:
    x = np.arange(2 * 24 * 3).reshape(2, 24, 3)
    for schedule, size in itertools.product(SCHEDULES, (1, 2, 3, 4)):
        parts = shard(x, size, schedule)
        assert np.array_equal(unshard(parts, schedule), x)
        for rank, part in enumerate(parts):
            assert part.flags.c_contiguous and np.array_equal(x[:, positions(schedule, size, rank, 24 // size)], part)
    assert shard(x, 2)[0][0, :, 0].tolist() == [*range(0, 18, 3), *range(54, 72, 3)]


# ---- results


def check_beside_float64(host: list[np.ndarray], schedule: str, size: int, **options: Any) -> None:
    """Compare the results of virtual ranks, and their types, with those of each packed sequence in float64."""
    results = around(virtual_ranks(size), host, schedule, uneven=True, **options)
    mask = {"causal": options.get("causal", False), "window": options.get("window")}
    cu = options.get("cu_seqlens", (0, host[0].shape[1]))
    exact: list[list[np.ndarray]] = [[] for _ in range(5)]
    for span in itertools.pairwise(sorted({*cu})):  # without empty sequences
        q64, k64, v64, do64 = in_heads(*(a[:, slice(*span)] for a in host))
        of_sequence = (
            *reference.attention(q64, k64, v64, return_lse=True, **mask),
            *reference.attention_backward(do64, q64, k64, v64, **mask),
        )
        for parts, a in zip(exact, of_sequence, strict=True):
            parts.append(a)
    wholes = [np.concatenate(parts, axis=2) for parts in exact]
    tolerance = TOLERANCE[host[0].dtype.name]
    for name, got, want in zip(("o", "lse", "dq", "dk", "dv"), results, wholes, strict=True):
        whole = on_host(got, schedule, 2 if name == "lse" else 1, uneven=True)
        if name == "lse":
            assert got[0].dtype == np.float32
            check.check(name, whole, want, tolerance=1e-5)
            continue
        want = want.reshape(len(whole), whole.shape[2], -1, *want.shape[2:]).sum(axis=2)
        check.check(name, whole.swapaxes(1, 2), want, tolerance=tolerance * (1 if name == "o" else 4))
        assert got[0].dtype == host[0].dtype


@pytest.mark.exhaustive(each_value=())
@MASKS
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("size", "dtype", "d"), [(1, "float32", 20), (2, "float16", 64), (3, "float32", 20), (4, "bfloat16", 24)]
)
def test_virtual_ranks_beside_float64(size: int, dtype: str, d: int, schedule: str, causal: bool) -> None:
    check_beside_float64(inputs(26 * size, d, dtype), schedule, size, causal=causal)


CUT: list[tuple[str, int, int, dict[str, Any]]] = [
    ("zigzag", 3, 25, {"causal": True}),
    ("ring", 3, 25, {"causal": True}),
    ("ring", 3, 25, {}),
    ("zigzag", 4, 5, {"causal": True}),
    ("zigzag", 2, 24, {"causal": True, "window": (5, 0)}),
    ("ring", 4, 32, {"causal": True, "window": (3, 0)}),
    ("ring", 3, 25, {"window": (4, 2)}),
    ("zigzag", 2, 25, {"window": (-1, 3)}),
    ("all_gather", 2, 24, {"window": (2, 9)}),
    ("zigzag", 3, 31, {"causal": True, "cu_seqlens": (0, 5, 5, 20, 28, 31)}),
    ("ring", 2, 24, {"cu_seqlens": (0, 3, 17, 24)}),
    ("ring", 4, 24, {"causal": True, "cu_seqlens": (0, 6, 12, 18, 24)}),
    ("all_gather", 2, 24, {"causal": True, "cu_seqlens": (0, 3, 17, 24)}),
    ("zigzag", 3, 40, {"causal": True, "window": (6, 0), "cu_seqlens": (0, 9, 33, 40)}),
]


@pytest.mark.exhaustive(one_of_each=lambda schedule, dtype: (schedule, dtype))
@pytest.mark.parametrize(
    ("schedule", "size", "tokens", "options", "dtype"),
    [(*cut, dtype) for cut, dtype in zip(CUT, itertools.cycle(["float32", "float16"]))],
    ids=str,
)
def test_windows_packed_sequences_and_uneven_parts_beside_float64(
    schedule: str, size: int, tokens: int, options: dict[str, Any], dtype: str
) -> None:
    host = [a[: 1 if "cu_seqlens" in options else 2] for a in inputs(tokens, 16, dtype)]
    check_beside_float64(host, schedule, size, tokens=tokens, **options)


@pytest.mark.parametrize("seed", range(12))
def test_each_pair_that_a_mask_shows_is_in_one_piece(seed: int) -> None:
    """In 50 random masks and cuts, each pair of a row and a key occurs once if the row sees the key, else never."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        schedule, size = SCHEDULES[rng.integers(3)], int(rng.integers(1, 5))
        tokens, left, right = (int(rng.integers(*ends)) for ends in ((0, 40), (-1, 9), (-1, 9)))
        cu = 0, *sorted(rng.integers(0, tokens + 1, rng.integers(5)).tolist()), tokens
        want, seen = (np.zeros((tokens, tokens), int) for _ in range(2))
        for first, end in itertools.pairwise(cu):
            here = slice(first, end)
            want[here, here] = reference.visible(end - first, end - first, window=(left, right))
        where = [
            positions(schedule, size, rank, n, tokens=tokens)
            for rank, n in enumerate(ring_masks.rows_of(schedule, size, tokens))
        ]
        for sources, products in ring_masks.masked_steps(schedule, size, tokens, left, right, cu):
            for rank, pieces in enumerate(products):
                source = sources[rank]
                at_hand = np.arange(tokens) if source is None else where[source]
                for piece in pieces:
                    queries, keys = where[rank][slice(*piece.rows)], at_hand[slice(*piece.keys)]
                    packed = piece.cu_seqlens or ((0, len(queries)), (0, len(keys)))
                    for of_rows, of_keys in zip(*map(itertools.pairwise, packed), strict=True):
                        pair = queries[slice(*of_rows)], keys[slice(*of_keys)]
                        seen[np.ix_(*pair)] += reference.visible(*map(len, pair), window=piece.window)
        assert np.array_equal(seen, want), (schedule, size, tokens, left, right, cu)


def test_a_ring_ends_after_the_last_step_that_computes() -> None:
    def count(*args: Any) -> int:
        return len(ring_masks.masked_steps("ring", 4, 32, *args))

    assert [count(left, 0, (0, 32)) for left in (0, 1, 7, 8, 9, 16, 17, -1)] == [1, 2, 2, 2, 3, 3, 4, 4]
    assert count(-1, 0, (0, 8, 16, 24, 32)) == 1 and count(-1, 0, (0, 9, 16, 24, 32)) == 2


def test_masks_that_are_refused() -> None:
    ranks = virtual_ranks(2)
    q, k, v, _ = (ranks.put(shard(a[:1], 2)) for a in inputs(20, 16, "float32"))
    two = [cp.concatenate([a, a]) for a in q]
    odd = [cp.zeros((1, n, 4, 16), "float32") for n in (4, 5)]
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "a window: as many rows of q as of k are needed; got 4 and 10", {"q": 4, "window": (3, 0)}),
        (ValueError, "packed sequences: as many rows", {"q": 4, "cu_seqlens": [0, 20]}),
        (ValueError, "rank 0 has 10 rows; of 22 tokens it has 11", {"tokens": 22, "schedule": "ring"}),
        (ValueError, "rank 0 has 10 rows; of 21 tokens it has 11", {"tokens": 21}),
        (ValueError, "cu_seqlens ends at 19, and the whole sequence has 20", {"tokens": 20, "cu_seqlens": [0, 19]}),
        (ValueError, "cu_seqlens falls from 9 to 7", {"cu_seqlens": [0, 9, 7, 20]}),
        (ValueError, "cu_seqlens begins with 1", {"cu_seqlens": [1, 20]}),
        (TypeError, r"cu_seqlens\[1\] must be a whole number", {"cu_seqlens": [0, 20.0]}),
        (TypeError, "cu_seqlens must be a list or an array of the host; got int", {"cu_seqlens": 20}),
        (TypeError, "window must be a pair", {"window": 4}),
        (TypeError, "tokens must be a whole number", {"tokens": "20"}),
        (ValueError, "packed sequences are a batch of 1; q has shape", {"both": two, "cu_seqlens": [0, 20]}),
        (
            ValueError,
            "9 tokens, 2 ranks: all_gather takes no uneven",
            {"both": odd, "tokens": 9, "schedule": "all_gather"},
        ),
    ]
    for error, message, options in refused:
        rows, both = options.pop("q", None), options.pop("both", None)
        given = [a[:, :rows] for a in both or q], both or k, both or v
        with pytest.raises(error, match=message):
            ring_attention(*given, comms=ranks, **options)
    with pytest.raises(ValueError, match=r"rank 0 has 5 rows; of 9 tokens it has 4"):
        unshard([cp.zeros((1, 5)), cp.zeros((1, 4))], "ring", uneven=True)
    with pytest.raises(ValueError, match=r"rank 1 has 4 rows; of 9 tokens it has 5"):
        positions("ring", 2, 1, 4, tokens=9)


def test_more_keys_than_rows_and_a_scale() -> None:
    host = inputs(24, 16, "float32", keys=40)
    o, lse, *_ = around(virtual_ranks(2), host, "ring", softmax_scale=0.7)
    exact, exact_lse = reference.attention(*in_heads(*host[:3]), softmax_scale=0.7, return_lse=True)
    check.check("o", on_host(o, "ring").swapaxes(1, 2), exact)
    check.check("lse", on_host(lse, "ring", 2), exact_lse)


def test_gathered_keys_give_the_bits_of_one_device() -> None:
    """There are no partial results: the kernel sees all keys of a row in one launch."""
    host = inputs(64, 64, "float16")
    whole = flash_attention(*map(cp.asarray, host[:3]), causal=True, return_lse=True, stage="flash_mma")
    o, lse, *_ = around(virtual_ranks(2), host, "all_gather", causal=True)
    assert np.abs(on_host(o, "all_gather") - cp.asnumpy(whole[0])).max() <= 2**-10
    assert np.abs(on_host(lse, "all_gather", 2) - cp.asnumpy(whole[1])).max() < 1e-5


@pytest.mark.exhaustive(one_of_each=lambda forward: forward)
@pytest.mark.parametrize(
    ("forward", "backward", "dtype"),
    [("flash_mma", "backward_mma", "float16"), ("hopper", "hopper_backward", "bfloat16")],
)
def test_results_in_float32_are_those_before_rounding(forward: str, backward: str, dtype: str) -> None:
    names = forward, backward, *(("hopper_backward_wide",) if backward == "hopper_backward" else ())
    if any(LADDER[name].why_not(head_dim=72, dtype=dtype) for name in names):
        pytest.skip("not on this GPU")
    q, k, v, do = map(cp.asarray, inputs(70, 72, dtype))
    half, lse = flash_attention(q, k, v, causal=True, return_lse=True, stage=forward)
    whole, same = flash_attention(q, k, v, causal=True, return_lse=True, stage=forward, out_dtype="float32")
    assert np.array_equal(cp.asnumpy(whole).astype(TYPES[dtype]), cp.asnumpy(half))
    assert np.array_equal(cp.asnumpy(lse), cp.asnumpy(same)) and whole.dtype == np.float32
    for stage in names[1:]:
        both = [
            flash_attention_backward(do, q, k, v, half, lse, causal=True, stage=stage, out_dtype=out)
            for out in (None, np.float32)
        ]
        for rounded, exact in zip(*both, strict=True):
            want = cp.asnumpy(rounded).astype(np.float32)
            assert exact.dtype == np.float32  # on a GPU dq is added in any order
            assert (np.abs(cp.asnumpy(exact) - want) <= 2**-7 * np.abs(want) + 1e-3).all()


def test_who_has_no_results_in_float32_says_so() -> None:
    q, k, v, _ = map(cp.asarray, inputs(8, 64, "float16"))
    with pytest.raises(ValueError, match="it has no results in float32"):
        flash_attention(q, k, v, stage="flash_wmma", out_dtype="float32")
    with pytest.raises(TypeError, match="out_dtype must be float32, float16, bfloat16 or None"):
        flash_attention(q, k, v, out_dtype=np.float64)
    with pytest.raises(ValueError, match="bfloat16"):
        flash_attention(q, k, v, out_dtype="bfloat16")
    q, k, v, _ = map(cp.asarray, inputs(8, 64, "float32"))
    assert np.array_equal(*(cp.asnumpy(flash_attention(q, k, v, out_dtype=out)) for out in (None, np.float32)))


def test_a_persistent_grid_leaves_multiprocessors() -> None:
    q = Spec.dense((1, 16, 4096, 128), np.float16)
    call = Call.of(dict.fromkeys("qkvo", q), ForwardOptions().checked(128))
    hopper = LADDER["hopper"]
    h200 = limits.Limits(227 << 10, 132, 90)

    def grid() -> tuple[int, ...]:
        with limits.pretend_gpu(h200):
            return hopper.launches(hopper, call, hopper.sizes_for(call))[-1].grid

    assert grid() == (132,)
    with limits.reserve_sms(8):
        assert grid() == (124,)
        with limits.reserve_sms(0):
            assert grid() == (132,)
        with limits.reserve_sms(500):
            assert grid() == (1,)
    assert limits.reserved_sms() == 0


# ---- the merge


def merged(case: str, join: Callable[..., Any] = ring.merge) -> None:
    """Compare merged partial results of two sets of keys with float64; rows see nothing before, now, or at all."""
    heads, n, d = 3, 37, {"odd": 18, "odd, rounded": 18, "wide": 256}.get(case, 64)
    rng = np.random.default_rng(5)
    rows = (9, 31) if case in ("rows", "last") else (0, n)
    part_rows = rows[1] - rows[0]
    o, part = (rng.standard_normal((2, m, heads, d)).astype(np.float32) for m in (n, part_rows))
    lse, part_lse = (3 * rng.standard_normal((2, heads, m)).astype(np.float32) for m in (n, part_rows))
    if case == "large":
        lse += 90
        part_lse += 90
    for a, its_lse, which in ((o, lse, slice(9, 12)), (part, part_lse, slice(0, 11))):
        its_lse[:, :, which] = -np.inf
        a[:, which] = 0
    want, want_lse = o.astype(np.float64), lse.astype(np.float64)
    where = slice(*rows)
    total = np.logaddexp(want_lse[:, :, where], part_lse)
    finite = np.where(np.isinf(total), 0, total)
    weigh = [np.exp(a - finite).swapaxes(1, 2)[..., None] for a in (want_lse[:, :, where], part_lse)]
    want[:, where] = want[:, where] * weigh[0] + part * weigh[1]
    want_lse[:, :, where] = total
    there = [cp.asarray(a) for a in (o, part, lse, part_lse)]
    dtype = np.float16 if case in ("last", "odd, rounded") else None
    got = join(there[0], there[1], rows, *there[2:], dtype)
    assert got.dtype == (dtype or np.float32) and (got is there[0]) == (dtype is None)
    check.check("o", cp.asnumpy(got), want, tolerance=2e-3 if dtype else 1e-6)
    check.check("lse", cp.asnumpy(there[2]), want_lse, tolerance=1e-5)
    unseen = np.isinf(part_lse).swapaxes(1, 2)
    if not dtype:
        assert np.array_equal(cp.asnumpy(got)[:, where][unseen], o[:, where][unseen]), "not to the bit"


@pytest.mark.parametrize("case", ["all", "rows", "last", "odd", "odd, rounded", "wide", "large"])
def test_a_partial_result_is_merged(case: str) -> None:
    merged(case)


def test_what_cannot_be_merged() -> None:
    o, lse = cp.zeros((1, 4, 2, 16), "float32"), cp.zeros((1, 2, 4), "float32")
    refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, r"rows = \(0, 5\); o has rows 0 to 4", (o, o, (0, 5))),
        (ValueError, r"rows = \(-1, 3\)", (o, o, (-1, 3))),
        (ValueError, r"rows = \(3, 1\)", (o, o, (3, 1))),
        (TypeError, "rows must be a pair", (o, o, 4)),
        (ValueError, r"part must be float32 \(1, 2, 2, 16\)", (o, o, (2, 4))),
        (ValueError, r"part must be float32 \(1, 4, 2, 16\)", (o, o[:, :, :1], (0, 4))),
        (ValueError, "o must be float32 .* C-contiguous; got float16", (o.astype("float16"), o, (0, 4))),
        (ValueError, "o must be float32 .* strides", (o[:, ::2], o[:, :2], (0, 2))),
        (TypeError, r"o must be a device array .* got shape \(4, 2, 16\)", (o[0], o, (0, 4))),
        (TypeError, "o must be a device array .* got ndarray", (np.zeros((1, 4, 2, 16), np.float32), o, (0, 4))),
        (ValueError, r"lse must be float32 \(1, 2, 4\)", (o, o, (0, 4), lse[:, :1], lse)),
        (ValueError, r"part_lse must be float32 \(1, 2, 4\)", (o, o, (0, 4), lse, lse[:, :, :2])),
        (TypeError, "dtype = 'float64'; there are float32", (o, o, (0, 4), lse, lse, "float64")),
    ]
    for error, message, args in refused:
        with pytest.raises(error, match=message):
            ring.merge(*args[:3], *(args[3:] or (lse, lse)))


@on_cpu
@pytest.mark.parametrize("case", ["all", "last", "odd"])
def test_the_x_ray_of_a_merge_is_clean(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not x_rayed(case, ring.MERGE, monkeypatch)


def x_rayed(case: str, file: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the X-ray's findings in the merges of a case."""
    found: list[Any] = []

    def observed(compiled: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int) -> None:
        found.extend(xray(compiled, grid, block, args, shared_mem).findings)

    monkeypatch.setattr(ring, "MERGE", file)
    with kernel.launches_replaced(observed), contextlib.suppress(check.CheckFailed):
        merged(case)
    return found


BUGS = (
    Bug("the exponent's sign", "keep = expf(a - base)", "keep = expf(base - a)"),
    Bug("what was there keeps its weight", "keep *= inverse, join *= inverse;", "join *= inverse;"),
    Bug("no division", "keep *= inverse, join *= inverse;", ""),
    Bug("weights exchanged", "o.x[i] * keep + p.x[i] * join", "o.x[i] * join + p.x[i] * keep"),
    Bug("the mean of both", "o.x[i] * keep + p.x[i] * join", "0.5f * (o.x[i] + p.x[i])"),
    Bug("a sum in place of a mean", "o.x[i] * keep + p.x[i] * join", "o.x[i] + p.x[i]"),
    Bug("no maximum subtracted", "base = larger == NEG_INF ? 0.0f : larger;", "base = 0.0f;", inputs="large"),
    Bug("minus infinity subtracted", "base = larger == NEG_INF ? 0.0f : larger;", "base = larger;"),
    Bug("a row without keys is divided by 0", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"),
    Bug("lse of the larger alone", "*own = base + logf(sum);", "*own = base;"),
    Bug("lse in units of log2", "*own = base + logf(sum);", "*own = base + log2f(sum);"),
    Bug("lse is not written", "*own = base + logf(sum);", ";"),
    Bug("the part's rows begin at 0", "row - first_part;", "row;", inputs="rows", cpu_only=True),
    Bug("a row of the part too many", "part_row < rows_part;", "part_row <= rows_part;", inputs="last", cpu_only=True),
    Bug("rows before the part are joined", "exists && part_row >= 0 &&", "exists &&", inputs="last", cpu_only=True),
    Bug("lse of another head", "(batch * heads + head) * rows_part", "(batch * heads) * rows_part"),
    Bug("the batch's first lse", "lse + (batch * heads + head) * N", "lse + head * N"),
    Bug("a row of the first batch", "((batch * N + row) * heads", "((row) * heads"),
    Bug("half of a long row", "c < HEAD_DIM;", "c < HEAD_DIM / 2;", inputs="wide"),
    Bug("lanes of a row are not awaited", "__syncwarp();", "", inputs="in X-ray", cpu_only=True),
)


def test_the_bugs_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source(ring.MERGE), bug) for bug in BUGS)


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.error)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.ON_GPU and bug.cpu_only:
        pytest.skip("shows on the CPU engine for certain")
    wrong = bug.plant(kernel.source(ring.MERGE))
    if bug.inputs == "in X-ray":
        assert x_rayed("all", wrong, monkeypatch)
        return
    monkeypatch.setattr(ring, "MERGE", wrong)
    with pytest.raises((AssertionError, check.CheckFailed, engine.LaunchError)):
        merged("all" if bug.inputs == "unit-normal" else bug.inputs)


# ---- what a call refuses


def test_what_does_not_fit_is_refused() -> None:
    ranks = virtual_ranks(2)
    q, k, v, _ = (ranks.put(shard(a, 2)) for a in inputs(20, 16, "float32"))
    refused = [
        (ValueError, "cannot be halved", {"q": [a[:, :5] for a in q], "k": [a[:, :5] for a in k]}, {"causal": True}),
        (ValueError, "as many rows of q as of k", {"q": [a[:, :4] for a in q]}, {"causal": True}),
        (ValueError, "schedule = 'stripes'; there are zigzag", {}, {"schedule": "stripes"}),
        (ValueError, r"schedule = \['ring'\]; there are zigzag", {}, {"schedule": ["ring"]}),
        (ValueError, "one array per local rank, 2; got 1", {"q": q[:1]}, {}),
        (ValueError, "q differs between ranks", {"q": [q[0], q[1][:, :4]]}, {}),
        (TypeError, "q has device arrays", {"q": [[1], [2]]}, {}),
        (TypeError, "causal must be True or False", {}, {"causal": 1}),
        (ValueError, "do not fit", {"q": [a[0] for a in q]}, {}),
        (TypeError, "return_lse must be True or False", {}, {"return_lse": 1}),
        (ValueError, "4 heads of q cannot share 3 heads", {"k": [cp.zeros((2, 10, 3, 16), "float32")] * 2}, {}),
        (ValueError, r"head_dim differs: q has shape \(2, 10, 4, 16\)", {"k": [a[..., :8] for a in k]}, {}),
    ]
    for error, message, changed, options in refused:
        given = {"q": q, "k": k, "v": v, **changed}
        if "k" in changed:
            given["v"] = given["k"]
        with pytest.raises(error, match=message):
            ring_attention(**given, **options, comms=ranks)
    with pytest.raises(ValueError, match="20 tokens cannot be cut into 6 chunks"):
        shard(np.zeros((1, 20, 2)), 3)
    for nothing in (None, 2, "nccl"):
        with pytest.raises(TypeError, match=r"comms is of helpers.attention.comms, such as virtual_ranks\(2\); got"):
            ring_attention(q, k, v, comms=nothing)
    if not device.ON_GPU:
        with pytest.raises(RuntimeError, match="use virtual_ranks"):
            comms.nccl()


def test_a_backward_pass_names_the_shape_that_it_was_given() -> None:
    ranks = virtual_ranks(2)
    q, k, v, do = (ranks.put(shard(a, 2)) for a in inputs(20, 16, "float32"))
    o, lse = ring_attention(q, k, v, return_lse=True, comms=ranks)
    given = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    rows = r"lse of each rank must be float32 \(2, 4, 10\), as q is \(2, 10, 4, 16\); got "
    refused = [
        (ValueError, rows + r"float32 \(2, 10, 4\)", {"lse": [a.swapaxes(1, 2) for a in lse]}),
        (ValueError, rows + r"float32 \(2, 4, 5\)", {"lse": [a[:, :, :5] for a in lse]}),
        (ValueError, rows + r"float16 \(2, 4, 10\)", {"lse": [a.astype("float16") for a in lse]}),
        (ValueError, r"do of each rank .* got float32 \(2, 10, 2, 16\)", {"do": [a[:, :, :2] for a in do]}),
        (ValueError, r"o of each rank .* got float16", {"o": [a.astype("float16") for a in o]}),
        (TypeError, "deterministic must be True or False", {"deterministic": None}),
        (TypeError, "comms is of", {"comms": None}),
    ]
    for error, message, changed in refused:
        with pytest.raises(error, match=message):
            ring_attention_backward(**{**given, "comms": ranks, **changed})


NO_POSITIONS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    (("zigzag", 2, 0, 7), ValueError, "rows = 7; a rank has 2 chunks of equal length"),
    (("zigzag", 2, 5, 8), ValueError, "rank = 5; there are 0 to 1, as size is 2"),
    (("zigzag", 2, 2, 8), ValueError, "rank = 2"),
    (("ring", 2, -1, 4), ValueError, "rank = -1; 0 or more"),
    (("ring", 0, 0, 4), ValueError, "size = 0; 1 or more"),
    (("ring", 2, 0, -4), ValueError, "rows = -4"),
    (("ring", 2, 0, 4.0), TypeError, "rows must be a whole number; got float"),
    (("ring", 2, True, 4), TypeError, "rank must be a whole number; got bool"),
    (("stripes", 2, 0, 4), ValueError, "schedule = 'stripes'"),
    (("ring", 2**10, 0, 2**21), ValueError, "rows = 2097152 .* int32"),
]


@pytest.mark.parametrize(("args", "error", "message"), NO_POSITIONS, ids=str)
def test_positions_that_there_are_not(args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        positions(*args)


def test_positions_by_numbers_of_numpy() -> None:
    assert positions("zigzag", np.int64(2), np.int32(1), np.int64(4)).tolist() == [2, 3, 4, 5]
    assert positions("ring", 3, 2, 5).tolist() == [*range(10, 15)] and positions("zigzag", 2, 0, 0).shape == (0,)


def test_cuts_that_there_are_not() -> None:
    x, wrong = np.zeros((1, 8, 2), np.float32), [np.zeros((1, 3, 2)), np.zeros((1, 3, 2))]
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "size = 0; 1 or more", lambda: shard(x, 0)),
        (ValueError, "size = -2; 1 or more", lambda: shard(x, -2)),
        (TypeError, "size must be a whole number", lambda: shard(x, 2.0)),
        (TypeError, "x must be an array of NumPy or the device; got list", lambda: shard([1, 2], 2)),
        (ValueError, r"axis = 3; x has shape \(1, 8, 2\)", lambda: shard(x, 2, axis=3)),
        (ValueError, r"axis = 1; x has shape \(\)", lambda: shard(np.ones(()), 2)),
        (ValueError, "schedule = 'stripes'", lambda: shard(x, 2, "stripes")),
        (TypeError, "x is complex128; numbers of 1, 2, 4 or 8", lambda: shard(x.astype(complex), 2)),
        (TypeError, "x is object; numbers", lambda: shard(x.astype(object), 2)),
        (TypeError, "parts must be a list .* got none", lambda: unshard([])),
        (TypeError, "parts must be a list .* got ndarray", lambda: unshard(x)),
        (TypeError, r"parts\[1\] must be an array of NumPy or the device; got int", lambda: unshard([x, 3])),
        (ValueError, r"parts\[1\] ndarray float32 \(1, 4, 2\)", lambda: unshard([x, x[:, :4]])),
        (ValueError, r"parts\[1\] ndarray float64", lambda: unshard([x, x.astype(float)])),
        (ValueError, "parts have 3 rows, which are no two chunks", lambda: unshard(wrong)),
        (ValueError, "size = 0", lambda: steps("ring", 0, causal=True, rows=4)),
        (ValueError, "rows = -4", lambda: steps("ring", 2, causal=True, rows=-4)),
        (TypeError, "keys must be a whole number", lambda: steps("ring", 2, causal=False, rows=4, keys=1.5)),
        (TypeError, "causal must be True or False", lambda: steps("ring", 2, causal="no", rows=4)),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


def test_an_axis_counts_from_the_end_too() -> None:
    x = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    for parts in zip(shard(x, 2), shard(x, np.int64(2), axis=-2), strict=True):
        assert np.array_equal(*parts)
    assert np.array_equal(unshard(shard(x, 2, axis=-2), axis=-2), x)


def test_ranks_that_there_are_not() -> None:
    ranks, a = virtual_ranks(2), cp.zeros(3, np.float32)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "size = 0; 1 or more", lambda: virtual_ranks(0)),
        (TypeError, "size must be a whole number", lambda: virtual_ranks(True)),
        (TypeError, "size must be a whole number", lambda: virtual_ranks("2")),
        (ValueError, "arrays has 3; 2 are needed", lambda: ranks.put([a, a, a])),
        (TypeError, "arrays must be a list .* got ndarray", lambda: ranks.put(np.zeros((2, 3)))),
        (
            ValueError,
            "rank 1 waits for a message that rank 0 does not send",
            lambda: ranks.start([], [Message(1, 0, a)]),
        ),
        (ValueError, "rank 1 does not wait for a message that rank 0", lambda: ranks.start([Message(0, 1, a)], [])),
        (
            ValueError,
            "rank 0 sends 8 bytes to rank 1, which waits for 12",
            lambda: ranks.start([Message(0, 1, a[:2])], [Message(1, 0, a)]),
        ),
        (ValueError, "rank = 2; there are 0 to 1", lambda: comms.nccl_of_id(2, 2, b"")),
        (ValueError, "size = 0", lambda: comms.nccl_of_id(0, 0, b"")),
        (ValueError, "timeout = -1; seconds, or None", lambda: comms.nccl_of_id(2, 0, b"", timeout=-1)),
        (ValueError, "timeout = nan", lambda: comms.nccl_of_id(2, 0, b"", timeout=float("nan"))),
        (ValueError, "leave = -1; 0 or more", lambda: comms.nccl_of_id(2, 0, b"", leave=-1)),
    ]
    if device.ON_GPU:
        refused += [
            (ValueError, "gpus = .* each once", functools.partial(comms.peer_copies, gpus))
            for gpus in ([], [0, 0], [99])
        ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


# ---- NCCL, replaced by a fake whose ranks are threads


class Library:
    """A fake of cupy.cuda.nccl for one rank: at the end of a group its messages are copied.

    mail: by (sender, receiver), the same for all ranks.
    """

    NCCL_UINT8 = 1

    def __init__(self, rank: int, mail: dict[tuple[int, int], queue.Queue[bytes]]) -> None:
        self.rank, self.mail = rank, mail
        self.group: list[tuple[str, int, int, int]] = []
        self.aborted, self.error = False, ""

    def groupStart(self) -> None:
        assert not self.group, "a group within a group"

    def send(self, address: int, size: int, kind: int, peer: int, stream: int) -> None:
        self.group.append(("send", address, size, peer))

    def recv(self, address: int, size: int, kind: int, peer: int, stream: int) -> None:
        self.group.append(("recv", address, size, peer))

    def groupEnd(self) -> None:
        for what, address, size, peer in self.group:
            if what == "send":
                self.mail[self.rank, peer].put(ctypes.string_at(address, size))
        for what, address, size, peer in self.group:
            if what == "recv" and not self.error:
                sent = self.mail[peer, self.rank].get(timeout=600)
                assert len(sent) == size
                ctypes.memmove(address, sent, size)
        self.group.clear()

    def check_async_error(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def abort(self) -> None:
        self.aborted = True


def nccl_ranks(size: int, **options: Any) -> list[tuple[Nccl, Library]]:
    mail = {pair: queue.Queue() for pair in itertools.product(range(size), repeat=2)}
    libraries = [Library(rank, mail) for rank in range(size)]
    return [(Nccl(size, {i: 0}, {i: each}, library=each, **options), each) for i, each in enumerate(libraries)]


def on_each(all_ranks: list[tuple[Nccl, Library]], call: Callable[[int, Nccl], Any]) -> list[Any]:
    """Call a function for each rank in its own thread. Return the results, or the errors."""
    results: list[Any] = [None] * len(all_ranks)

    def rank(number: int, ranks: Nccl) -> None:
        try:
            results[number] = call(number, ranks)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(i, ranks)) for i, (ranks, _) in enumerate(all_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


OF_PROCESSES: list[tuple[str, dict[str, Any]]] = [
    *((schedule, {"causal": causal}) for schedule in SCHEDULES for causal in (False, True)),
    ("ring", {"causal": True, "cu_seqlens": (0, 4, 19, 25), "tokens": 25}),
    ("ring", {"window": (7, 2), "tokens": 25}),
]


@pytest.mark.exhaustive(one_of_each=lambda options: "tokens" in options)
@on_cpu
@pytest.mark.parametrize(("schedule", "options"), OF_PROCESSES, ids=str)
def test_a_process_for_each_rank_gives_the_bits_of_virtual_ranks(schedule: str, options: dict[str, Any]) -> None:
    """Equal parts and, for 25 tokens, uneven ones."""
    host = [a[:1] for a in inputs(options.get("tokens", 36), 16, "float16")]
    uneven = "tokens" in options

    def call(number: int, ranks: Any) -> list[list[np.ndarray]]:
        if number >= 0:
            ranks.connect()
        results = around(ranks, host, schedule, uneven=uneven, deterministic=uneven, **options)
        return [[cp.asnumpy(a) for a in each] for each in results]

    want = call(-1, virtual_ranks(3))
    for rank, got in enumerate(on_each(nccl_ranks(3), call)):
        assert isinstance(got, list), got
        for name, mine, of_all in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert np.array_equal(mine[0], of_all[rank]), (name, rank)


@on_cpu
def test_a_rank_that_fails_ends_the_others_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 never comes, or NCCL reports it: rank 0 ends in time, aborts its communicator, and repeats why later."""
    monkeypatch.setattr(engine.cuda.Event, "done", property(lambda event: False))
    host = inputs(8, 16, "float32")
    for error, kind, message in (("", TimeoutError, "rank 0 has waited 0.2 s"), ("remote", RuntimeError, "remote")):
        (ranks, library), (_, other) = nccl_ranks(2, timeout=0.2)
        library.error = error
        monkeypatch.setattr(ranks, "agree", lambda call: None)
        other.mail[1, 0].put(bytes(host[1][:, :4].nbytes))
        other.mail[1, 0].put(bytes(host[2][:, :4].nbytes))
        q, k, v = (ranks.put(shard(a, 2)) for a in host[:3])
        with pytest.raises(kind, match=message):
            ring_attention(q, k, v, comms=ranks)
        assert library.aborted
        with pytest.raises(RuntimeError, match="given up"):
            ring_attention(q, k, v, comms=ranks)


@on_cpu
def test_an_error_in_a_rank_aborts_its_communicator() -> None:
    (ranks, library), _ = nccl_ranks(2)
    q, k, v = (ranks.put(shard(a, 2)) for a in inputs(8, 16, "float32")[:3])
    library.groupEnd = lambda: (_ for _ in ()).throw(OSError("no route"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no route"):
        ring_attention(q, k, v, comms=ranks)
    assert library.aborted


@on_cpu
def test_a_rank_waits_longer_for_the_first_message_than_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may still be compiling. A rank that never comes ends the wait."""
    monkeypatch.setattr(engine.cuda.Event, "done", property(lambda event: False))
    monkeypatch.setattr(comms, "COMPILING", 0.2)
    (ranks, library), (_, other) = nccl_ranks(2, timeout=0.1)
    other.mail[1, 0].put(bytes(comms._FIRST_BYTES))
    q, k, v = (ranks.put(shard(a, 2)) for a in inputs(8, 16, "float32")[:3])
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0\.3 s"):
        ring_attention(q, k, v, comms=ranks)
    assert library.aborted


DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("causal is False on ranks 0, 1, True on rank 2", {"causal": True}),
    ("softmax_scale is None on ranks 0, 1, 0.5 on rank 2", {"softmax_scale": 0.5}),
    ("schedule is zigzag on ranks 0, 1, all_gather on rank 2", {"schedule": "all_gather"}),
    (r"q.shape is \(2, 4, 4, 16\) on ranks 0, 1, \(2, 2, 4, 16\) on rank 2; k.shape is", {"rows": 2}),
    ("q.dtype is float32 on ranks 0, 1, float16 on rank 2", {"dtype": "float16"}),
]


@on_cpu
@pytest.mark.parametrize(("message", "changed"), DIFFERENT, ids=lambda value: "".join(value) if value else "")
def test_ranks_that_call_differently_all_say_how(message: str, changed: dict[str, Any]) -> None:
    """Afterwards they can continue."""
    host = inputs(12, 16, "float32")
    all_ranks = nccl_ranks(3)

    def call(number: int, ranks: Nccl) -> Any:
        options = dict(changed) if number == 2 else {}
        rows, dtype = options.pop("rows", 4), options.pop("dtype", "float32")
        q, k, v = (ranks.put([a[:, :rows].astype(dtype) for a in shard(a, 3)]) for a in host[:3])
        return ring_attention(q, k, v, comms=ranks, **options)

    for error in on_each(all_ranks, call):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match="the ranks call with different arguments: " + message):
            raise error
    changed = {}
    assert all(isinstance(each, list) for each in on_each(all_ranks, call))


@on_cpu
def test_a_rank_that_refuses_a_call_ends_those_of_the_others() -> None:
    host = inputs(12, 16, "float32")

    def call(number: int, ranks: Nccl) -> Any:
        q, k, v = (ranks.put(shard(a, 2)) for a in host[:3])
        return ring_attention(q, k, v[:0] if number else v, comms=ranks)

    other, own = on_each(nccl_ranks(2), call)
    assert isinstance(own, ValueError) and isinstance(other, RuntimeError)
    assert str(other) == f"rank 1 has refused this call: ValueError: {own}"


@MASKS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_is_compiled_before_anything_is_sent(schedule: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that compiles for a minute does not let the others wait for keys meanwhile."""
    ranks = virtual_ranks(3)
    start, counts = ranks.start, []

    def counted(*messages: Any) -> Callable[[], None]:
        counts.append(kernel.COUNTS["compiled"])
        return start(*messages)

    monkeypatch.setattr(ranks, "start", counted)
    q, k, v, do = (ranks.put(shard(a, 3, schedule)) for a in inputs(36, 16, "float16"))
    options = {"causal": causal, "schedule": schedule, "comms": ranks}

    def assert_compiled_first(call: Callable[..., Any], *arrays: Any, **more: Any) -> Any:
        forget()
        counts.clear()
        before = kernel.COUNTS["compiled"]
        results = call(*arrays, **options, **more)
        assert before < counts[0] == kernel.COUNTS["compiled"]
        return results

    with kernel.compiled_anew():
        results = assert_compiled_first(ring_attention, q, k, v, return_lse=True)
        assert_compiled_first(ring_attention_backward, do, q, k, v, *results)
    forget()


def test_waiting_for_ranks_that_do_not_come_ends() -> None:
    assert comms.within(5, lambda: 3, "") == 3
    with pytest.raises(KeyError):
        comms.within(5, lambda: {}["a"], "")
    event = threading.Event()
    with pytest.raises(TimeoutError, match=r"rank 0 of 2: not all ranks have come after 0.05 s"):
        comms.within(0.05, event.wait, "rank 0 of 2: not all ranks have come")
    event.set()


def test_messages_between_two_ranks_keep_their_order() -> None:
    a, b, c, d = (cp.asarray(np.full(3, i, np.float32)) for i in range(4))
    sends = [Message(0, 1, a), Message(0, 1, b)]
    virtual_ranks(2).start(sends, [Message(1, 0, c), Message(1, 0, d)])()
    assert cp.asnumpy(c).tolist() == [0, 0, 0] and cp.asnumpy(d).tolist() == [1, 1, 1]


# ---- graphs


def all_ranks() -> list[Any]:
    """Return virtual ranks and, with two GPUs, theirs."""
    made = [virtual_ranks(2)]
    if device.ON_GPU and cp.cuda.runtime.getDeviceCount() > 1:
        made += [comms.peer_copies([0, 1]), comms.nccl([0, 1])]
    return made


def test_a_graph_gives_the_bits_of_calls_for_what_its_inputs_hold_now() -> None:
    if not device.ON_GPU:
        pytest.skip("the CPU engine has no graphs")
    for ranks in all_ranks():
        for schedule, options in itertools.product(SCHEDULES, ({}, {"causal": True}, {"window": (40, 3)})):
            options = {"schedule": schedule, "comms": ranks, **options}
            first, then = ([ranks.put(shard(a, 2, schedule)) for a in inputs(256, 64, "bfloat16")] for _ in range(2))
            for a in itertools.chain(*first):
                with a.device:
                    bits(a)[...] = cp.roll(bits(a), 1, axis=1)

            def step(arrays: list[Any] = first, options: Any = options) -> list[Any]:
                q, k, v, do = arrays
                o, lse = ring_attention(q, k, v, return_lse=True, **options)
                gradients = ring_attention_backward(do, q, k, v, o, lse, deterministic=True, **options)
                return [*o, *lse, *itertools.chain(*gradients)]

            again = ranks.captured(step)
            for a, b in zip(itertools.chain(*first), itertools.chain(*then), strict=True):
                with a.device:
                    bits(a)[...] = bits(b)
            want = study.to_host(step(then))
            for _ in range(3):
                got = study.to_host(again())
                assert all(np.array_equal(a.view("uint8"), b.view("uint8")) for a, b in zip(got, want, strict=True))
            assert not ranks.capturing


def test_what_a_graph_cannot_hold_and_who_has_none() -> None:
    ranks = virtual_ranks(2)
    q = ranks.put(shard(inputs(16, 16, "float32")[0][:1], 2))
    if not device.ON_GPU:
        assert ranks.captured(len) is len
    packed = functools.partial(ring_attention, q, q, q, cu_seqlens=(0, 3, 8, 16), comms=ranks)
    packed()
    ranks.capturing = dict.fromkeys(ranks.ranks, contextlib.nullcontext())
    with pytest.raises(ValueError, match="a graph cannot hold cu_seqlens"):
        packed()


# ---- the study


def test_the_model_of_a_ring() -> None:
    assert study.tokens_to_hide_copies(16, 16) == 1500 and study.tokens_to_hide_copies(32, 8, causal=True) == 750
    for size in (2, 8, 1024):
        at_once = {"gb_per_s": 1e9}
        plain = study.efficiency(size, 8192, 16, 16, causal=True, schedule="ring", **at_once)
        assert plain == pytest.approx(size / (2 * size - 1))
        assert study.efficiency(size, 8192, 16, 16, causal=True, **at_once) == pytest.approx(1)
        assert study.efficiency(size, 1500, 16, 16) == pytest.approx(1)
        assert study.efficiency(size, 750, 16, 16) == pytest.approx(size / (2 * size - 1))
    assert study.efficiency(2, 1500, 16, 16, schedule="all_gather") == pytest.approx(2 / 3)


@on_cpu
@pytest.mark.exhaustive
def test_short_steps_and_an_all_gather_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {
        "HEADS": ((2, 1),),
        "SHORT": (32,),
        "LOCAL": (32,) * 6,
        "D": 16,
        "ROUNDS": 1,
        "AT_LEAST_MS": 0.0,
        "SHORT_AT_LEAST_MS": 0.0,
        "ON_AND_ON_MS": 0.0,
    }
    for name, value in few.items():
        monkeypatch.setattr(study, name, value)
    for name in ("synchronize", "free"):
        monkeypatch.setattr(study, name, lambda ranks: None)
    monkeypatch.setattr(study, "sm_mhz", lambda: 1980.0)
    ranks, merge = virtual_ranks(2), ring.merge
    for backward in (False, True):
        rows = [*study.measure_short(ranks, backward=backward)]
        names = {row["name"] for row in rows}
        assert len(rows) == 2 * len(names) == 12 and all(row["ms"] > 0 for row in rows)
    rows = [*study.measure_gathered(ranks)]
    assert len(rows) == 12 and "on and on" in study.line(rows[0])
    assert ring.merge is merge and "start" not in vars(ranks)  # only copies of the ranks are mute


def test_a_record_of_the_study_is_shown() -> None:
    rows = [
        {"part": "processes", "joined_by": "mpi", "skipped": "not installed"},
        {"part": "fails", "case": "never", "error": "TimeoutError: no", "seconds": 8.04, "ok": True},
        {"part": "copies", "name": "nccl", "rows": 2048, "ms": 0.02, "gb_per_s": 400.2},
    ]
    lines = study.table({"rows": [{**row, "gpus": 2} for row in rows]}).splitlines()
    assert lines[-3:] == [
        "2 GPUs  processes  mpi         not installed",
        "2 GPUs  fails      never       TimeoutError: no after 8.0 s",
        "2 GPUs  copies        2048 tokens  nccl                          0.020 ms    400 GB/s",
    ]
