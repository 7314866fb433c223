"""Planted bugs of 13_hopper_backward.cu: wrong gradients, and each fence, barrier and wait left out in turn.

test_backward_mma.py launches the unchanged kernel, and that of 08.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import half_gradients
import numpy as np
import pytest
from half_gradients import Arrays, inputs, reference
from planted import ALL, Bug, check_all_can_be_planted

from helpers import device, engine
from helpers.attention import calls, kernel
from helpers.attention.ladder import LADDER, Stage, backward, limits
from helpers.attention.ladder.call import BackwardOptions, Call
from helpers.attention.ladder.layout import Spec, dense
from helpers.attention.ladder.score_mod import Function, ScoreMod
from helpers.attention.ladder.stages import backward as stages
from helpers.engine.cuda_source.signatures import dtype_of
from helpers.xray import find

BFLOAT16 = dtype_of("bfloat16")
SOFTCAP = ScoreMod((Function("score_mod", "30.0f * tanhf(score / 30.0f)", "1.0f - y / 30.0f * (y / 30.0f)"),))
STAGE, WIDE_STAGE = LADDER["hopper_backward"], LADDER["hopper_backward_wide"]
FILE = STAGE.file
SIZES = {"BLOCK_M": 64, "BLOCK_N": 128}
IN_TURN = {**SIZES, "DETERMINISTIC": 1}
FIRST_STORES = {**SIZES, "FIRST_STORES": 1}
PERSISTENT = {**FIRST_STORES, "PERSISTENT": 1}
SPLIT = {**SIZES, "GROUP_SPLITS": 2}


def changed(name: str, old: str, new: str = "", **more: Any) -> Bug:
    return Bug(name, old, new, **more)


@pytest.fixture(autouse=True)
def on_the_engine(cpu_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a wait may never end, or the context is lost. A persistent grid has one block."""
    monkeypatch.setattr(half_gradients, "cp", engine)
    monkeypatch.setattr(limits, "multiprocessors", lambda: 1)


# ---- wrong gradients

WRONG = (  # bugs that 08 and 13 share are in test_backward_mma.py
    # ---- operands
    changed("dQ reads K with its rows along k", "wgmma_ss<1, 0>(", "wgmma_ss<0, 0>("),
    changed("dQ reads dS transposed", "wgmma_ss<1, 0>(", "wgmma_ss<1, 1>("),
    changed("dS is stored transposed", "stmatrix_x4_trans(dS_lane", "stmatrix_x4(dS_lane"),
    changed(
        "no distance to the next 64 columns of Q",
        "wgmma_descriptor(smem_address(smem.Q), BLOCK_M * 128)",
        "wgmma_descriptor(smem_address(smem.Q))",
    ),
    changed(
        "no distance to the next 64 columns of dO",
        "wgmma_descriptor(smem_address(smem.dO), BLOCK_M * 128)",
        "wgmma_descriptor(smem_address(smem.dO))",
    ),
    changed("the next 16 rows of Q and dO are the next 32", "advance_rows(rows, i)", "advance_rows(rows, 2 * i)"),
    changed("the next 16 keys of K are the next 32", "advance_rows(k, i)", "advance_rows(k, 2 * i)"),
    changed(
        "the first 16 keys of dS over and over",
        "advance_columns(dS, i, BLOCK_M)",
        "advance_columns(dS, i / 4 * 4, BLOCK_M)",
    ),
    changed("dS of the own keys alone", "advance_columns(dS, i, BLOCK_M)", "advance_columns(dS, i % 4, BLOCK_M)"),
    changed(
        "the second panel of K is the first",
        "advance_columns(keys, i, BLOCK_N)",
        "advance_columns(keys, i % 4, BLOCK_N)",
    ),
    changed("both warpgroups have the first keys", "smem.K + consumer * 64 * 128", "smem.K"),
    changed("both warpgroups have the same columns of dQ", "PANELS == 2 ? consumer * BLOCK_N * 128 : 0", "0"),
    changed(
        "dS without the swizzle",
        "((2 * warp_id + lane_id / 8 % 2) ^ lane_id % 8) * 16",
        "(2 * warp_id + lane_id / 8 % 2) * 16",
    ),
    changed(
        "fragments of dS exchanged",
        "dS_lane + stage * DS_BYTES + n / 2 * 16 * 128, x[0], x[1], x[2], x[3]",
        "dS_lane + stage * DS_BYTES + n / 2 * 16 * 128, x[0], x[2], x[1], x[3]",
    ),
    changed("fragments of P exchanged", "P[n / 2][n % 2 * 2 + i]", "P[n / 2][n % 2 * 2 + 1 - i]"),
    changed("dP times P, both of dO", "start_keys<T>(dK_acc, dS, q)", "start_keys<T>(dK_acc, dS, dO)"),
    # ---- dQ in the order of fragments
    changed("columns g and g + 8 exchanged", "a[2 * h + e] * params", "a[2 - 2 * h + e] * params"),
    changed(
        "the other's half of dQ",
        "CONSUMERS * DQ_BYTES);\n          tma_store_commit",
        "DQ_BYTES);\n          tma_store_commit",
    ),
    changed("the first consumer's dQ in both places", "smem.dQ[consumer]", "smem.dQ[0]"),
    # ---- scores and weights
    changed("delta left out", "(dP[4 * n + i] - (i % 2 ? d.y : d.x))", "dP[4 * n + i]"),
    changed("lse of the neighbouring row", "i % 2 ? lse[4 * n].y : lse[4 * n].x", "lse[4 * n].x"),
    changed("dQ not scaled", "a[2 * h + e] * params.forward.softmax_scale", "a[2 * h + e]"),
    changed("dK not scaled", "dK_acc, scale,", "dK_acc, one,"),
    changed("dV scaled", "dV_acc, one,", "dV_acc, scale,"),
    # ---- tiles, stages, phases
    changed("always the first stage of rows", "advance_tiles(q_tiles, stage, ROWS_BYTES)", "q_tiles"),
    changed("lse of the first stage", "smem.lse[stage]) + t", "smem.lse[0]) + t"),
    changed("dS of the first stage for dQ", "advance_tiles(dS_dq, stage, DS_BYTES)", "dS_dq"),
    changed("a tile of Q is there for good", "unsigned(count / N % 2)", "0"),
    changed(
        "dQ goes to the first tile of rows",
        "dQ + (long long)slot * (BLOCK_M * DQ_COLUMNS), smem_",
        "dQ, smem_",
    ),
)
# At d = 64 the two warpgroups share dQ by rows, not columns.
WRONG_AT_64 = (
    changed("both warpgroups have the same rows of dQ", "PANELS == 2 ? 0 : consumer * DQ_ROWS * 128", "0"),
    changed("rows of dQ side by side", "PANELS == 2 ? 0 : consumer * DQ_ROWS)", "0)"),
)
# hopper_backward_first_store.cuh
WRONG_FIRST_STORES = (
    changed("the first block adds to what was there", "return bulk_store(target", "return bulk_add(target"),
    changed("each block stores", "if (state == EMPTY) return bulk_store(", "if (true) return bulk_store("),
    changed("it ends at the last tile of rows", "head += m_block == first;", "head += m_block == rows.last_tile;"),
    changed("each block begins with the second tile", "m_block = first;", "m_block = 1;"),
)
# backward_blocks.cuh, with GROUP_SPLITS
WRONG_SPLITS = (
    changed("each block has a head of K and V", "return dkv_head / GROUP_SPLITS;", "return dkv_head;"),
    changed("all blocks of a group have its first heads", "return dkv_head * group;", "return kv_head() * group;"),
    changed("all blocks of a group write the same dK and dV", "dkv_head * d_k.head", "kv_head() * d_k.head"),
)


def check(bug: Bug, given: Arrays, sizes: Mapping[str, int] = SIZES, **options: Any) -> None:
    half_gradients.check(STAGE, bug.name, sizes, given, code=bug.plant(kernel.source(FILE)), **options)


@pytest.mark.exhaustive(one_of_each=lambda bug: None)
@pytest.mark.parametrize("bug", [*WRONG, *WRONG_AT_64], ids=lambda bug: bug.name)
def test_wrong_gradients_are_found(bug: Bug) -> None:
    """The first 60 rows see no key. In the second call, keys past the end, which are 0, would weigh e^lse."""
    d = 64 if bug in WRONG_AT_64 else 128
    with pytest.raises((AssertionError, engine.LaunchError), match=r"is off by|deadlock"):
        check(bug, inputs((1, 2, 200, d), 140, 1, "bfloat16", grow=4.0), window=(-1, 0))
        do, q, k, v = inputs((1, 2, 64, d), 100, 1, "bfloat16")
        check(bug, (do, np.full_like(q, 8.0), np.full_like(k, -8.0) - np.abs(k), v))


@pytest.mark.exhaustive(one_of_each=lambda bug: None)
@pytest.mark.parametrize("bug", WRONG_FIRST_STORES, ids=lambda bug: bug.name)
def test_wrong_first_stores_are_found(bug: Bug) -> None:
    """Three blocks, each with all three tiles of rows."""
    with pytest.raises((AssertionError, engine.LaunchError), match=r"is off by|deadlock"):
        check(bug, inputs((1, 2, 140, 128), 300, 1, "bfloat16"), FIRST_STORES)


@pytest.mark.parametrize(("d", "rows"), [(128, 64), (64, 128), (80, 64)])
def test_the_first_block_stores(d: int, rows: int) -> None:
    """Each row sees a key. In the second call some blocks have no rows, in the third they have few."""
    sizes = {"BLOCK_M": rows, "BLOCK_N": 128, "FIRST_STORES": 1}
    for shape, keys, options in (
        ((1, 4, 200, d), 333, {}),
        ((2, 2, 65, d), 300, {"window": (33, 9)}),
        ((1, 2, 260, d), 260, {"window": (-1, 0)}),
    ):
        half_gradients.check(STAGE, f"{shape}", sizes, inputs(shape, keys, 1, "float16"), **options)


@pytest.mark.parametrize(("d", "rows", "stores"), [(128, 64, 1), (64, 128, 0), (80, 64, 0)])
def test_blocks_take_one_tile_of_keys_after_the_other(
    d: int, rows: int, stores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks with at least six tiles of keys. In the second and third call, no row sees some of these."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 2)
    sizes = {"BLOCK_M": rows, "BLOCK_N": 128, "FIRST_STORES": stores, "PERSISTENT": 1}
    for shape, keys, kv_heads, options in (
        ((2, 4, 200, d), 333, 2, {}),
        ((2, 2, 65, d), 500, 1, {"window": (33, 9)}),
        ((1, 2, 100, d), 900, 2, {"window": (100, 0)}),
        ((1, 3, 260, d), 260, 3, {"window": (-1, 0)}),
    ):
        half_gradients.check(STAGE, f"{shape}", sizes, inputs(shape, keys, kv_heads, "float16"), **options)


@pytest.mark.exhaustive(one_of_each=lambda bug: None)
@pytest.mark.parametrize("bug", WRONG_SPLITS, ids=lambda bug: bug.name)
def test_wrong_shares_of_a_group_are_found(bug: Bug) -> None:
    with pytest.raises((AssertionError, engine.LaunchError), match="is off by"):
        check(bug, inputs((1, 8, 140, 64), 150, 2, "bfloat16"), SPLIT)


SHARING = (
    ("hopper_backward", 64, {"BLOCK_M": 128, "BLOCK_N": 128}),
    ("hopper_backward", 128, SIZES),
    ("hopper_backward_wide", 200, {}),
    ("backward_mma", 72, {}),
)
ORDERS = ({}, {"DETERMINISTIC": 1}, {"PERSISTENT": 1, "FIRST_STORES": 1})  # the last is hopper_backward's alone


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize(
    ("name", "d", "sizes", "how"),
    [
        pytest.param(*of, how, id=f"{of[0]}-{of[1]}-{how}")
        for of in SHARING
        for how in ORDERS
        if "PERSISTENT" not in how or of[0] == STAGE.name
    ],
)
def test_blocks_share_the_heads_of_a_group(
    name: str, d: int, sizes: Mapping[str, int], how: Mapping[str, int], splits: int
) -> None:
    """Tiles of keys are cut short; with two splits a block has two heads; some keys have no row."""
    sizes = {**sizes, **how, "GROUP_SPLITS": splits}
    for shape, keys, kv_heads, options in (
        ((1, 8, 133, d), 205, 2, {"window": (-1, 0)}),
        ((2, 4, 65, d), 300, 1, {} if "FIRST_STORES" in how else {"window": (33, 9)}),
    ):
        half_gradients.check(LADDER[name], f"{shape}", sizes, inputs(shape, keys, kv_heads, "bfloat16"), **options)


@pytest.mark.parametrize("how", [{}, {"DETERMINISTIC": 1, "SLOTS": 1}], ids=str)
def test_blocks_share_the_heads_of_packed_sequences(how: Mapping[str, int]) -> None:
    half_gradients.check_packed(STAGE, {**SPLIT, **how}, (70, 200, 0, 131), (100, 250, 40, 131), 64)


def sizes_of_call(
    batch: int = 32,
    rows: int = 512,
    keys: int = 512,
    d: int = 128,
    heads: tuple[int, int] = (16, 16),
    adds: bool = False,
    **options: Any,
) -> dict[str, int]:
    """Return the sizes for a call. heads: of Q, and of K and V. adds: to a dq_accum that has sums of other keys."""
    arrays = {name: dense((batch, heads[0], rows, d), np.float16) for name in ("do", "q", "o", "dq")}
    arrays |= {name: dense((batch, heads[1], keys, d), np.float16) for name in ("k", "v", "dk", "dv")}
    arrays["lse"] = dense((batch, heads[0], rows), np.float32)
    arrays |= {"dq_accum": arrays["lse"]} if adds else {}
    return STAGE.sizes_for(Call.of(arrays, BackwardOptions(**options).checked(d)))


def test_which_calls_share_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as many blocks as fill an H200, where a group's heads in one block would leave it idle."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    one = {"batch": 1, "rows": 4096, "keys": 4096, "d": 64}
    for any_order, fixed_order, how in (
        (2, 4, {"heads": (16, 4), "causal": True}),
        (2, 2, {"heads": (16, 4), "causal": True, "batch": 2}),
        (4, 4, {"heads": (16, 4), "causal": True, "d": 128}),
        (4, 8, {"heads": (8, 1)}),
        (8, 8, {"heads": (8, 1), "causal": True}),
        (7, 7, {"heads": (28, 4), "causal": True, "rows": 1024, "keys": 1024}),
        # as many blocks as multiprocessors, with as much work; many blocks; no group to share; 17's own launches
        (None, 2, {"heads": (16, 4)}),
        (None, None, {"heads": (16, 4), "causal": True, "batch": 8}),
        (None, None, {"heads": (16, 16), "causal": True, "rows": 1024, "keys": 1024}),
        (None, None, {"heads": (8, 1), "causal": True, "adds": True}),
    ):
        chosen = [sizes_of_call(**{**one, **how}, deterministic=order) for order in (False, True)]
        assert [sizes.get("GROUP_SPLITS") for sizes in chosen] == [any_order, fixed_order], how


@pytest.mark.parametrize("on_gpu", [False, True])
def test_which_calls_get_it_unasked(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow the times of 08 and 13 on an H200: only without groups, the keys of all heads count."""
    monkeypatch.setattr(device, "ON_GPU", on_gpu)
    monkeypatch.setattr(limits, "compute_capability", lambda: 90)
    for keys, heads, d, how, hopper in (
        (1024, (6, 6), 64, {}, True),
        (1024, (5, 5), 64, {}, False),
        (1024, (5, 5), 128, {}, True),
        (1024, (8, 8), 64, {"causal": True}, False),
        (1024, (9, 9), 64, {"causal": True}, True),
        (1024, (8, 8), 128, {"window": (255, 0)}, False),
        (1024, (9, 9), 128, {"window": (255, 0)}, True),
        (1024, (8, 8), 32, {"causal": True}, False),
        (1024, (12, 12), 128, {"causal": True, "mod": SOFTCAP}, False),
        (1024, (18, 18), 128, {"causal": True, "mod": SOFTCAP}, True),
        (256, (8, 2), 128, {"causal": True}, True),
        (256, (4, 1), 64, {}, False),
        (64, (2, 2), 128, {"causal": True, "deterministic": True}, True),
        (512, (8, 8), 256, {"causal": True}, True),
    ):
        views = {name: Spec.dense((1, heads[0], keys, d), BFLOAT16) for name in ("q", "o", "do")}
        views["lse"] = Spec.dense((1, heads[0], keys), np.dtype(np.float32))
        views |= {name: Spec.dense((1, heads[1], keys, d), BFLOAT16) for name in "kv"}
        chosen = calls.choose(views, BackwardOptions(**how), None)[1].name
        assert chosen.startswith("hopper_backward") == (hopper and on_gpu), (keys, heads, d, how)


def block_by_block(shared: Any, splits: int) -> float:
    """Start each block on the multiprocessor that is free first; return the steps until the last one is done."""
    row_tiles = stages._row_tiles(shared)
    heads, group, right = shared.kv_heads * splits, shared.group // splits, shared.window[1]
    steps = [group * count + stages._BLOCK_STEPS for count in row_tiles]
    together = heads
    if shared.in_turns and (shared.deterministic or right >= 0):
        fit = stages._L2_BYTES // (8 * shared.columns * shared.rows * group)
        together = max(stages._TURN_BLOCKS // len(steps) if shared.deterministic else fit, 1)
    free = [0.0] * shared.resident
    for first in range(0, heads, together):
        some = min(together, heads - first)
        before = [-1.0] * some
        last_first = shared.in_turns and shared.deterministic and right >= 0 and first + some < heads
        for own in reversed(steps) if last_first else steps:
            for head in range(some):
                done = free[0] + own
                if shared.deterministic:
                    before[head] = done = max(done, before[head] + (right < 0))
                heapq.heapreplace(free, done)
    return max(free)


def test_the_number_of_splits_is_as_good_as_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of blocks and bounds cost at most 2 % of the steps that a simulation of each block would find."""
    rng = random.Random(7)
    tried = 0
    for _ in range(120):
        block_m, block_n = rng.choice(((128, 128), (64, 128), (64, 64)))
        shared = stages._Shared(
            kv_heads=rng.choice((1, 2, 4, 8, 24)),
            group=rng.choice((2, 3, 4, 7, 8, 16)),
            rows=rng.choice((300, 777, 1024, 2048, 4096)),
            keys=rng.choice((512, 1500, 2048, 4096, 8192)),
            tile=(block_m, block_n),
            window=rng.choice(((-1, -1), (-1, 0), (-1, 0), (512, 0), (127, 127))),
            deterministic=rng.random() < 0.4,
            in_turns=rng.random() < 0.7,
            columns=64,
            resident=132,
            split_bytes=1 << 20,
        )
        chosen = stages._best_splits(shared, 8 * 132, 1.06)
        most = 8 * 132 // (shared.kv_heads * -(-shared.keys // block_n))
        choices = [splits for splits in range(2, min(shared.group, most) + 1) if shared.group % splits == 0]
        if not choices:
            assert chosen == 1
            continue
        tried += 1
        adds = {splits: stages._SUM_STEPS + stages._STEPS_OF_A_BYTE * splits * (1 << 20) for splits in choices}
        steps = {splits: block_by_block(shared, splits) + adds.get(splits, 0.0) for splits in (1, *choices)}
        least = min(steps[splits] for splits in choices)
        allowed = 1.02 * (1.06 * least if chosen == 1 else least)
        assert steps[chosen] <= allowed and (chosen == 1 or 1.02 * steps[1] > 1.06 * least), (shared, chosen, steps)
    assert tried > 60


def test_scratch_of_shares_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow eight blocks a multiprocessor, each with dK and dV of 128 keys."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    for rows in (300, 1024, 2048, 5000, 8192):
        for batch, kv_heads in ((1, 1), (3, 2), (8, 4), (64, 1)):
            sizes = sizes_of_call(batch, rows, rows, heads=(16 * kv_heads, kv_heads), causal=True)
            blocks = batch * kv_heads * -(-rows // 128)
            assert sizes.get("GROUP_SPLITS", 1) == 1 or blocks * sizes["GROUP_SPLITS"] <= 8 * 132


def test_which_calls_have_first_stores() -> None:
    """They are chosen with at most 4096 keys and a dQ larger than the L2 cache, if each row sees a key."""
    assert all("FIRST_STORES" in sizes_of_call(causal=causal) for causal in (False, True))
    assert "FIRST_STORES" in sizes_of_call(batch=16, rows=1024, keys=512)  # each row sees all keys
    for other in (
        {"batch": 1},
        {"keys": 16384},
        {"rows": 1024, "causal": True},  # the first rows see none
        {"deterministic": True},
    ):
        assert "FIRST_STORES" not in sizes_of_call(**other), other


def test_which_calls_have_persistent_blocks() -> None:
    """They are chosen with many blocks, at head_dim 64 only with few steps; not in a fixed order."""
    assert all("PERSISTENT" in sizes_of_call(d=d, causal=causal) for d in (64, 128) for causal in (False, True))
    assert "PERSISTENT" in sizes_of_call(batch=1, rows=16384, keys=16384)
    assert "PERSISTENT" in sizes_of_call(batch=4, rows=4096, keys=4096, d=64, causal=True)
    for other in (
        {"batch": 4},
        {"batch": 4, "rows": 4096, "keys": 4096, "d": 64},
        {"batch": 1, "rows": 16384, "keys": 16384, "d": 64, "causal": True},
        {"deterministic": True},
    ):
        assert "PERSISTENT" not in sizes_of_call(**other), other


def test_nothing_is_cleared_where_the_first_block_stores() -> None:
    given = inputs((1, 1, 64, 64), 64, 1, "float16")
    *_, o, lse = reference(*given)
    for first_stores in (0, 1):
        sizes = {**SIZES, "FIRST_STORES": first_stores}
        ready, *_ = backward.plan(STAGE, *given, o.astype(np.float16), lse.astype(np.float32), sizes=sizes)
        assert any(arg == "dq_accum" for arg in ready.launches[0].args[:6]) == (not first_stores)


# ---- fences, barriers, waits


# Without such a statement the X-ray first reports what `finds` names.
DO_FULL = "bar.do_ring.wait_full(step.stage());"
DS_READY = "named_barrier_sync(DS_READY, 256);"
PACKED = {"rows": (64, 136), "keys": (30, 110)}
AT_128 = {"d": 128}
MISSING = (
    changed("mbarriers not fenced", "mbarrier_init_fence();", finds="no proxy fence"),
    changed(
        "mbarriers may not be there yet",
        "bar.init(CONSUMERS);\n  }\n  __syncthreads();",
        "bar.init(CONSUMERS);\n  }",
        finds="race",
    ),
    # ---- the producer
    changed("Q and dO replaced in use", "if (RING) bar.q_ring.wait_empty(step.stage());", finds="race"),
    changed(
        "dQ added before it is there",
        "named_barrier_sync(DQ_FULL + mine, 288);",
        "named_barrier_arrive(DQ_FULL + mine, 288);",
        finds="race",
    ),
    changed("no group to wait for", "tma_store_commit();", finds="race"),
    changed("dQ overwritten while it is added", "tma_store_wait_read<0>();", finds="race"),
    # ---- the consumers: copies
    changed("K not waited for", "mbarrier_wait(bar.k_full, queue.keys_phase());", finds="not waited for"),
    changed("V not waited for", "mbarrier_wait(bar.v_full, queue.keys_phase());", finds="not waited for"),
    changed("Q not waited for", "bar.q_ring.wait_full(step.stage());", finds="not waited for"),
    changed("dO not waited for", DO_FULL, times=2, which=1, finds="not waited for"),
    changed("dO cleared before it is there", DO_FULL, times=2, which=0, finds="not waited for", options=PACKED),
    changed("other keys' rows in the product", DS_READY, times=4, which=0, finds="race", options=PACKED),
    changed(
        "other rows in the product", DS_READY, times=4, which=1, finds="race", options={**PACKED, "rows": (70, 130)}
    ),
    changed("zeros not fenced", "uint4{};\n  async_proxy_fence();", "uint4{};", finds="no proxy fence", options=PACKED),
    # ---- the consumers: products
    changed(
        "scores not fenced", "wgmma_registers(S);\n  wgmma_fence();", "wgmma_registers(S);", finds="no wgmma fence"
    ),
    changed("P not fenced", "wgmma_registers(acc);\n  wgmma_fence();", "wgmma_registers(acc);", finds="no wgmma fence"),
    changed("scores in no group", "wgmma_commit();", times=3, which=0, finds="not waited for"),
    changed("dV and dK in no group", "wgmma_commit();", times=3, which=1, finds="not waited for"),
    changed("dQ in no group", "wgmma_commit();", times=3, which=2, finds="not waited for"),
    changed("S not waited for", "wgmma_wait<1>();", times=2, which=0, finds="not waited for"),
    changed("dP not waited for", "wgmma_wait<0>();", times=2, which=0, finds="not waited for"),
    changed("dQ not waited for", "wgmma_wait<1>();", times=2, which=1, finds="not waited for"),
    changed("dK not waited for", "wgmma_wait<0>();", times=2, which=1, finds="race"),
    # ---- the consumers: dS, dQ, the end
    changed("dS not fenced", "dO);\n    async_proxy_fence();", "dO);", finds="no proxy fence"),
    changed("the other's dS not waited for", DS_READY, times=4, which=2, finds="race"),
    changed(
        "dQ overwritten before it is added",
        "named_barrier_sync(DQ_EMPTY + consumer, 160);",
        "named_barrier_arrive(DQ_EMPTY + consumer, 160);",
        finds="race",
    ),
    changed(
        "dQ not fenced",
        "    async_proxy_fence();\n    named_barrier_arrive(DQ_FULL + step.count % ADDERS, 288);",
        "    named_barrier_arrive(DQ_FULL + step.count % ADDERS, 288);",
        finds="no proxy fence",
    ),
    changed("dQ never empty", "named_barrier_arrive(DQ_EMPTY + i, 160);", ";", finds="deadlock"),
    changed("dQ never full", "named_barrier_arrive(DQ_FULL + step.count % ADDERS, 288);", finds="deadlock"),
    changed("Q and dO never empty", "if (leader) bar.q_ring.release(step.stage());", finds="deadlock"),
    changed("dK staged while dQ reads dS", DS_READY, times=4, which=3, finds="race", options={"rows": (180,)}),
    changed("dK staged over what is copied", "__syncwarp();", times=4, which=0, finds="race", options=AT_128),
    changed("dK copied before it is staged", "__syncwarp();", times=4, which=1, finds="race"),
    changed(
        "a number read before it is drawn",
        "if (threadIdx.x == 0) drawn = atomicAdd(counter(), 1);\n  __syncthreads();",
        "if (threadIdx.x == 0) drawn = atomicAdd(counter(), 1);",
        finds="race",
        options={"sizes": IN_TURN},
    ),
    # ---- blocks that go from tile to tile
    changed(
        "K and V replaced in use",
        "if (PERSISTENT) mbarrier_wait(smem_address(&mail.keys_empty), ++with_rows & 1);",
        finds="not waited for",
        options={"sizes": PERSISTENT},
    ),
    changed("a number read before it is sent", "ring.wait_full(turn);", finds="race", options={"sizes": PERSISTENT}),
    changed(
        "a number never released", "if (leader) ring.release(turn);", finds="deadlock", options={"sizes": PERSISTENT}
    ),
    changed(
        "dS written where dK is staged",
        "if (PERSISTENT) named_barrier_sync(STORED + consumer, 128);",
        finds="race",
        options={"sizes": PERSISTENT},
    ),
)
# Not left out, but at the wrong place or with the wrong size.
MISPLACED = (
    changed(
        "Q given back too early",
        "wgmma_wait<0>();\n    wgmma_registers(dK_acc);\n    if (leader) bar.q_ring.release(step.stage());",
        "if (leader) bar.q_ring.release(step.stage());\n    wgmma_wait<0>();\n    wgmma_registers(dK_acc);",
        finds="race",
    ),
    changed("dS always at the same place", "dS_lane + stage * DS_BYTES", "dS_lane", finds="race"),
    changed(
        "one barrier for even and odd tiles",
        "DQ_FULL + step.count % ADDERS",
        "DQ_FULL",
        finds="deadlock",
        options={"sizes": IN_TURN},
    ),
    changed("nobody says that the first tile is empty", "if (mine == 0) arrive_empty();", "", finds="deadlock"),
    changed(
        "both say that the first tile is empty",
        "if (mine == 0) arrive_empty();",
        "arrive_empty();",
        finds="deadlock",
        options={"sizes": IN_TURN},
    ),
    changed(
        "fewer bytes than are sent", "sizeof(smem.Q[0]) + 4 * BLOCK_M)", "sizeof(smem.Q[0]))", finds="wrong byte count"
    ),
    changed(
        "dQ stored, not added",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
        "cp.async.bulk.global.shared::cta.bulk_group",
        finds="not waited for",
    ),
)
# Statements that no checked run on the CPU shows to be necessary, and why they are.
NOT_SEEN = {
    "wgmma_fence();": "dQ's: the fence before dV's products is later than the last use of all these registers",
    "__syncwarp();": "before DQ_EMPTY: that barrier waits for lane 0 too, but bar.arrive takes a whole warp; before "
    "release_number: as for wait_empty(turn)",
    "wait_empty(turn);": "needed between tiles of keys that no row sees: else steps order reads and writes of numbers",
    "tma_store_wait();": "before add_release, twice: the engine's copies are done at the wait for their reads",
}
SYNCHRONISES = re.compile(
    r"\b(?:wgmma_fence|wgmma_commit|wgmma_wait<\d>|mbarrier_init_fence|mbarrier_wait|wait_empty|wait_full|release|"
    r"named_barrier_sync|named_barrier_arrive|async_proxy_fence|tma_store_commit|tma_store_wait|"
    r"tma_store_wait_read<\d>|__syncwarp|__syncthreads)\([^;{]*;"
)


def x_rayed(
    code: str,
    *,
    d: int = 64,
    sizes: Mapping[str, int] = SIZES,
    rows: tuple[int, ...] = (200,),
    keys: tuple[int, ...] = (140,),
    stage: Stage = STAGE,
    heads: int = 1,
) -> list[str]:
    """Return the kinds of findings in the causal gradients of sequences with these lengths. heads: of Q."""
    kinds = []

    def looked_at(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        kinds.extend(finding.kind for finding in find(kernel, grid, block, args, shared_mem))

    given = inputs((1, heads, sum(rows), d), sum(keys), 1, "bfloat16")
    *_, o, lse = reference(*given, window=(-1, 0))
    arrays = (engine.asarray(a) for a in (*given, o.astype(given[1].dtype), lse.astype(np.float32)))
    packed = {"cu_seqlens": tuple(np.cumsum([0, *n], dtype=np.int32) for n in (rows, keys))} if len(rows) > 1 else {}
    half_gradients.gradients(stage, *arrays, sizes, window=(-1, 0), code=code, launch=looked_at, **packed)
    return [kind for kind in kinds if kind != "never written"]  # slots of shorter sequences


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.finds)
@pytest.mark.parametrize("bug", [*MISSING, *MISPLACED], ids=lambda bug: bug.name)
def test_what_is_missing_is_found(bug: Bug) -> None:
    assert bug.finds in x_rayed(bug.plant(kernel.source(FILE)), **bug.options)


@pytest.mark.parametrize(
    "options",
    [
        *({}, PACKED, AT_128, {"sizes": IN_TURN}, {"sizes": FIRST_STORES}, {"sizes": PERSISTENT}),
        {"sizes": SPLIT, "heads": 2},
    ],
    ids=str,
)
def test_nothing_is_found_where_nothing_is_missing(options: Mapping[str, Any]) -> None:
    assert not x_rayed(kernel.source(FILE), **options)


def test_every_bug_can_be_planted() -> None:
    bugs = [*WRONG, *WRONG_AT_64, *WRONG_FIRST_STORES, *WRONG_SPLITS, *MISSING, *MISPLACED]
    check_all_can_be_planted((kernel.source(FILE), bug) for bug in bugs)


def test_each_fence_barrier_and_wait_is_left_out_once() -> None:
    def synchronisation(text: str) -> Counter[str]:
        text = re.sub(r"struct Ring \{.*?\n\};", "", text, flags=re.DOTALL)  # the code that its functions replace
        return Counter(re.sub(r"\s+", " ", statement) for statement in SYNCHRONISES.findall(text))

    text = kernel.source(FILE)
    everything = synchronisation(text)
    left_out: Counter[str] = Counter()
    for bug in MISSING:
        left_out += everything - synchronisation(bug.plant(text))
    assert everything - left_out == Counter(NOT_SEEN.keys()) + Counter(["tma_store_wait();", "__syncwarp();"])


# ---- where the kernel for long rows differs

# No checked run shows that two parts are necessary: a consumer's wait for the other's tile, because the other has
# waited for it before their barrier; and the barrier before the epilogue, because the engine's products end for all
# warps at once.

WIDE = {"stage": WIDE_STAGE, "sizes": {"BLOCK_M": 64, "BLOCK_N": 64}, "d": 136}
WIDE_MISSING = (
    changed("P read before it is there", "named_barrier_sync(P_READY, 256);", finds="race", options=WIDE),
    changed("dS read before it is there", DS_READY, times=4, which=2, finds="race", options=WIDE),
    changed(
        "P and dS not fenced", "    async_proxy_fence();\n", times=2, which=ALL, finds="no proxy fence", options=WIDE
    ),
    changed(
        "P always at the same place",
        "smem_address(smem.P[stage]) + lane",
        "smem_address(smem.P) + lane",
        finds="race",
        options=WIDE,
    ),
    changed("dQ added before it is there", "wgmma_wait<1>();", finds="not waited for", options=WIDE),
    changed(
        "dQ stored, not added",
        "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};",
        "st.global.v4.f32 [%0], {%1, %2, %3, %4};",
        finds="race",
        options=WIDE,
    ),
)
WIDE_WRONG = (
    changed("both consumers have the same columns of K", "smem.K + consumer * 2 * BLOCK_N * 128", "smem.K"),
    changed("P read as it was not stored", "ldmatrix_x4_trans(P[k]", "ldmatrix_x4(P[k]"),
    changed("dQ from dS transposed", "start_columns<0, T>(dQ_acc", "start_columns<1, T>(dQ_acc"),
    changed("dV from dS", "start_columns<1, T>(dV_acc, P_desc", "start_columns<1, T>(dV_acc, dS_desc"),
    changed("columns past the end are kept", "kv_len - first_key - key, HEAD_DIM - column);", "0, 0);", times=2),
    changed("the same half of dQ", "consumer * (BLOCK_M * COLUMNS) + 4 * thread", "4 * thread"),
)


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.finds)
@pytest.mark.parametrize("bug", WIDE_MISSING, ids=lambda bug: bug.name)
def test_what_is_missing_for_long_rows_is_found(bug: Bug) -> None:
    assert bug.finds in x_rayed(bug.plant(kernel.source(WIDE_STAGE.file)), **bug.options)


@pytest.mark.exhaustive(one_of_each=lambda bug: None)
@pytest.mark.parametrize("bug", WIDE_WRONG, ids=lambda bug: bug.name)
def test_wrong_gradients_of_long_rows_are_found(bug: Bug) -> None:
    code, given = bug.plant(kernel.source(WIDE_STAGE.file)), inputs((1, 2, 100, 136), 80, 1, "bfloat16", grow=4.0)
    with pytest.raises(AssertionError, match="is off by"):
        half_gradients.check(WIDE_STAGE, bug.name, WIDE["sizes"], given, code=code, window=(-1, 0))


def test_nothing_is_found_for_long_rows() -> None:
    code = kernel.source(WIDE_STAGE.file)
    assert not x_rayed(code, **WIDE)
    assert not x_rayed(code, **WIDE, **PACKED)
    check_all_can_be_planted((code, bug) for bug in (*WIDE_WRONG, *WIDE_MISSING))


# ---- turns

LAST_FIRST = changed("", "number = number_of_block()", "number = gridDim.x - 1 - number_of_block()")


def bits(*bugs: Bug, stage: Stage = STAGE, sizes: Mapping[str, int] = IN_TURN, n: int = 330, d: int = 64) -> bytes:
    """Compute dQ of one head, whose blocks add in turn."""
    code = kernel.source(stage.file)
    for bug in bugs:
        code = bug.plant(code)
    given = inputs((1, 1, n, d), n, 1, "bfloat16")
    *_, o, lse = reference(*given)
    arrays = (engine.asarray(a) for a in (*given, o.astype(given[1].dtype), lse.astype(np.float32)))
    dq, *_ = half_gradients.gradients(stage, *arrays, sizes, code=code)
    return engine.asnumpy(dq).tobytes()


def test_blocks_add_in_turn_in_whatever_order_they_start() -> None:
    """The last block runs first: it has to wait for the others. Without the wait it adds first; on a GPU, it may."""
    in_order = bits()
    assert bits(LAST_FIRST) == in_order
    no_turns = changed("no turns", "wait_for_blocks(semaphores + slot, blocks_before(step.block, rows, m_block));")
    # If many cores run blocks in parallel, the order may happen to be right.
    assert device.ON_GPU or any(bits(LAST_FIRST, no_turns) != in_order for _ in range(5))


WIDE_IN_TURN = {"stage": WIDE_STAGE, "sizes": {**WIDE["sizes"], "DETERMINISTIC": 1}, "n": 180, "d": 136}


@pytest.mark.exhaustive
def test_blocks_of_long_rows_add_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is passed on in the next step, and after the last one."""
    in_order = bits(**WIDE_IN_TURN)
    assert bits(LAST_FIRST, **WIDE_IN_TURN) == in_order
    no_turns = changed("no turns", "wait_for_blocks(passed_on,", "if (false) wait_for_blocks(passed_on,")
    assert device.ON_GPU or any(bits(LAST_FIRST, no_turns, **WIDE_IN_TURN) != in_order for _ in range(5))
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.5")
    passed_on = "if (takes_turns && passed_on) add_release(passed_on);"
    for which in (0, 1):
        with pytest.raises(engine.LaunchError):
            bits(changed("a turn is not passed on", passed_on, times=2, which=which), **WIDE_IN_TURN)


LAST_KEYS_FIRST = "LAST_KEYS_FIRST && by_tile"


@pytest.mark.parametrize(
    ("stage", "d", "rows", "keys_of_block"), [(STAGE, 128, 64, 128), (STAGE, 64, 128, 128), (WIDE_STAGE, 136, 64, 64)]
)
def test_blocks_of_the_last_keys_come_first(
    stage: Stage, d: int, rows: int, keys_of_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last keys come first for two heads, and last for the last head. Some rows and some keys see nothing."""
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "20")
    sizes = {"BLOCK_M": rows, "BLOCK_N": keys_of_block, "DETERMINISTIC": 1}
    code = kernel.source(stage.file)
    assert code.count(LAST_KEYS_FIRST) == 1
    code = changed("a head at a time", "TURN_BLOCKS / gridDim.x", "1").plant(code)
    for n, keys, heads, options in (
        (150, 280, 6, {"window": (-1, 0)}),  # heads share K and V
        (280, 150, 3, {"window": (100, 0)}),
        (200, 333, 3, {"window": (70, 9)}),
    ):
        given = inputs((1, heads, n, d), keys, 3, "bfloat16")
        half_gradients.check(stage, f"{n}, {keys}, {options}", sizes, given, code=code, **options)
    half_gradients.check_packed(stage, sizes, (3, 130, 0, 64, 150), (200, 130, 5, 0, 300), d, code)


@pytest.mark.exhaustive(one_of_each=lambda bug: None)
@pytest.mark.parametrize(
    "bug",
    [
        changed("turns of the next block", "step.block, rows, m_block));", "step.block, rows, m_block) + 1);"),
        changed("the turn is not passed on", "add_release(semaphores + slot);"),
        changed(
            "semaphores begin with what was there",
            "if (block.first_row < block.q_len) dq_semaphore[block.slot(tiles)] = 0;",
        ),
    ],
    ids=lambda bug: bug.name,
)
def test_a_turn_that_never_comes_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_TIMEOUT", "0.5")
    with pytest.raises(engine.LaunchError):
        bits(bug)
