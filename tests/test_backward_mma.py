"""The gradients in half types, 08_backward_mma.cu and 13_hopper_backward.cu, in single launches.

Bugs are planted in the first; those of the second are in test_hopper_backward.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import half_gradients
import numpy as np
import pytest
from half_gradients import TYPES, Arrays, gradients, inputs, reference
from planted import Bug, check_all_can_be_planted

from helpers.attention import compile_report, kernel
from helpers.attention.ladder import LADDER, Stage, backward, limits, tiles
from helpers.attention.ladder.stages.backward import pick_backward_mma, pick_other_backward_mma
from helpers.device import cp
from helpers.xray import find, xray

FILE = "08_backward_mma.cu"
STAGE, HOPPER, WIDE = (LADDER[name] for name in ("backward_mma", "hopper_backward", "hopper_backward_wide"))
every_type = pytest.mark.parametrize("dtype", TYPES)

# BLOCK_M, BLOCK_N, WARPS, WARPS_KEYS, WARPS_DKV, WARPS_DQ, SLICE_M, MIN_BLOCKS
_NAMES = ("BLOCK_M", "BLOCK_N", "WARPS", "WARPS_KEYS", "WARPS_DKV", "WARPS_DQ", "SLICE_M", "MIN_BLOCKS")
REGISTERS = dict(zip(_NAMES, (64, 128, 4, 4, 4, 2, 32, 2), strict=True))  # P stays in registers
SHARED = dict(zip(_NAMES, (64, 128, 8, 4, 4, 2, 32, 1), strict=True))  # P passes through shared memory
GRIDS = "small_grid", "tiny_grid", "single_wave"
TILINGS = {
    "registers": REGISTERS,
    "shared": SHARED,
    "one buffer of dS": {**SHARED, "DQ_LATER": 0},
    **{grid: pick_other_backward_mma(grid, 64, 227 * tiles.KB) for grid in GRIDS},
    "few rows": dict(zip(_NAMES, (32, 64, 4, 2, 2, 2, 16, 1), strict=True)),
    "hopper": {"BLOCK_M": 128, "BLOCK_N": 128},
    "hopper, few rows": {"BLOCK_M": 32, "BLOCK_N": 128},
}
KINDS = "registers", "shared", "hopper"
FEWEST = pick_other_backward_mma("tiny_grid", 128, 227 * tiles.KB)
HEAD_DIM_TILINGS = {8: (REGISTERS,), 72: (REGISTERS,), 96: (SHARED,), 120: (FEWEST,), 128: (SHARED,)}
HOPPER_HEAD_DIMS = {8: 128, 40: 64, 72: 64, 96: 64, 120: 32, 128: 64}
HEAD_DIM_TILINGS = {
    d: (*HEAD_DIM_TILINGS.get(d, ()), {"BLOCK_M": rows, "BLOCK_N": 128}) for d, rows in HOPPER_HEAD_DIMS.items()
}
LAST = dict(zip(_NAMES, (32, 64, 8, 4, 2, 2, 16, 1), strict=True))  # head_dim 256


def stage_of(sizes: Mapping[str, int]) -> Stage:
    """Return the stage; only 08 has a choice of warps. Skips if this GPU has no wgmma."""
    stage = STAGE if "WARPS" in sizes else HOPPER if sizes["BLOCK_N"] == 128 else WIDE
    if reason := stage.why_not(head_dim=64, dtype="bfloat16"):
        pytest.skip(reason)
    return stage


def check(name: str, sizes: Mapping[str, int], given: Arrays, **options: Any) -> Arrays:
    return half_gradients.check(stage_of(sizes), name, sizes, given, **options)


# ---- values

SIZES = ((1, 1), (2, 300), (33, 1), (64, 63), (65, 257), (127, 32), (128, 128), (257, 127))


@pytest.mark.parametrize("tiling", TILINGS)
def test_tilings(tiling: str) -> None:
    for n, n_kv in SIZES:
        check(f"{n} x {n_kv}", TILINGS[tiling], inputs((1, 1, n, 64), n_kv, 1, "bfloat16"))


@pytest.mark.exhaustive(one_of_each=lambda d: d % 16)
@pytest.mark.parametrize("d", HEAD_DIM_TILINGS)
def test_head_dims(d: int) -> None:
    for n, n_kv in ((100, 70), (65, 257)):
        given = inputs((1, 2, n, d), n_kv, 1, "float16")
        for sizes in HEAD_DIM_TILINGS[d]:
            check(f"d = {d}, {n} x {n_kv}, {sizes}", sizes, given, window=(-1, 0))


def test_largest_head_dim() -> None:
    check("d = 256", LAST, inputs((1, 1, 70, 256), 100, 1, "bfloat16"), window=(-1, 0))


@pytest.mark.exhaustive(one_of_each=lambda: None)
@pytest.mark.parametrize("d", [136, 256, 192])
def test_long_rows_on_hopper(d: int) -> None:
    sizes = {"BLOCK_M": 64, "BLOCK_N": 64}
    for n, n_kv in ((130, 150), (65, 257), (1, 64)):
        check(f"d = {d}, {n} x {n_kv}", sizes, inputs((1, 2, n, d), n_kv, 1, "bfloat16"))
        for name in MASKS if d == 136 and n == 130 else ("causal", "window", "diagonal")[: 3 if d == 136 else 1]:
            heads = 2 if name == "causal" else 1
            given = inputs((1, 2 * heads, n, d), n_kv, heads, "bfloat16")
            check(f"d = {d}, {n} x {n_kv}, {name}", sizes, given, window=MASKS[name])
    half_gradients.check_packed(stage_of(sizes), sizes, (3, 130, 0, 64, 1, 70), (200, 130, 5, 0, 70, 33), d)
    if d == 136:  # in turn; packed sequences as well
        sizes["DETERMINISTIC"] = 1
        check("in turn", sizes, inputs((1, 4, 130, d), 257, 2, "float16"), window=(-1, 0))
        half_gradients.check_packed(stage_of(sizes), sizes, (3, 130, 0, 64, 1, 70), (200, 130, 5, 0, 70, 33), d)


MASKS = {
    "causal": (-1, 0),
    "window": (70, 20),
    "left": (40, -1),
    "right": (-1, 33),
    "diagonal": (0, 0),
    "causal window": (100, 0),
    "wider than all": (5000, 5000),
}


@pytest.mark.exhaustive(one_of_each=lambda: None)
@pytest.mark.parametrize("tiling", KINDS)
@pytest.mark.parametrize("deterministic", [0, 1])
def test_masks(tiling: str, deterministic: int) -> None:
    """With more rows than keys, some rows see nothing: zeros.

    One case has batch 2 and four query heads to two KV heads; the others have two to one, because no mask depends on
    batch or head. Each type is a compilation, so tilings and variants divide the types among them, and variants divide
    masks and lengths.
    """
    sizes = {**TILINGS[tiling], "DETERMINISTIC": deterministic}
    dtype = ("float16", "bfloat16")[(tiling == "shared") ^ deterministic]
    lengths = (130, 130), (129, 257), (200, 100), (1, 300), (300, 1)
    check("batches", sizes, inputs((2, 4, 129, 64), 257, 2, dtype), window=MASKS["causal"])
    for i, ((n, n_kv), name) in enumerate(itertools.product(lengths, MASKS)):
        if i % 2 == deterministic:  # 7 masks: each gets the other variant at the next lengths
            check(f"{name}, {n} x {n_kv}", sizes, inputs((1, 2, n, 64), n_kv, 1, dtype), window=MASKS[name])


@pytest.mark.exhaustive(one_of_each=lambda: None)
@pytest.mark.parametrize("tiling", KINDS)
@pytest.mark.parametrize("deterministic", [0, 1])
def test_packed_lengths(tiling: str, deterministic: int) -> None:
    rows, keys = (3, 130, 0, 64, 1, 70), (200, 130, 5, 0, 70, 33)
    sizes = {**TILINGS[tiling], "DETERMINISTIC": deterministic}
    half_gradients.check_packed(stage_of(sizes), sizes, rows, keys, 64)


@pytest.mark.parametrize("tiling", [*KINDS, "hopper, long rows"])
def test_a_sequence_of_nan_harms_no_other(tiling: str) -> None:
    """Its rows and keys are in the same tiles as the last ones of the previous sequence."""
    sizes, d = TILINGS.get(tiling, {"BLOCK_M": 64, "BLOCK_N": 64}), 64
    cu_seqlens = np.array([0, 70, 130], np.int32), np.array([0, 90, 140], np.int32)
    first = inputs((1, 2, 70, d), 90, 1, "float16")
    *_, o, lse = reference(*first)

    def then_nan(a: np.ndarray, more: int) -> Any:
        shape = (*a.shape[:2], more, *a.shape[3:])
        return cp.asarray(np.concatenate([a, np.full(shape, np.nan, a.dtype)], axis=2))

    do, q, k, v = (then_nan(a, more) for a, more in zip(first, (60, 60, 50, 50), strict=True))
    outputs = then_nan(o.astype(np.float16), 60), then_nan(lse.astype(np.float32), 60)
    got = gradients(stage_of(sizes), do, q, k, v, *outputs, sizes, cu_seqlens=cu_seqlens)
    half_gradients.compare(tiling, tuple(a[:, :, :n] for a, n in zip(got, (70, 90, 90), strict=True)), first)


SLOPES = np.geomspace(0.5, 0.01, 8, dtype=np.float32).reshape(2, 4)


@pytest.mark.exhaustive(one_of_each=lambda: None)
@pytest.mark.parametrize("tiling", KINDS)
def test_alibi(tiling: str) -> None:
    """Heads that share keys have different slopes, and so have batches; distances count on both sides."""
    sizes = {**TILINGS[tiling], "ALIBI": 1}
    for n, n_kv in ((130, 70), (70, 200)):
        given = inputs((2, 4, n, 64), n_kv, 2, "bfloat16")
        check(f"{n} x {n_kv}", sizes, given, alibi_slopes=SLOPES)
        check(f"{n} x {n_kv}, causal", sizes, given, alibi_slopes=SLOPES, window=(-1, 0))


def test_strides() -> None:
    """Memory is (batch, seq, heads, head_dim), and K and V are slices of one array."""
    do, q, k, v = inputs((2, 2, 70, 64), 90, 2, "float16")
    *_, o, lse = reference(do, q, k, v)
    arrays = (cp.asarray(a) for a in (do, q, k, v, o.astype(np.float16), lse.astype(np.float32)))
    dense = gradients(STAGE, *arrays, REGISTERS)

    def as_models_have_it(a: np.ndarray) -> Any:
        return cp.asarray(np.ascontiguousarray(a.swapaxes(1, 2))).swapaxes(1, 2)

    both = as_models_have_it(np.concatenate([k, v], axis=-1))

    views = *map(as_models_have_it, (do, q)), both[..., :64], both[..., 64:], as_models_have_it(o.astype(np.float16))
    got = gradients(STAGE, *views, cp.asarray(lse.astype(np.float32)), REGISTERS)
    for x, y in zip(got, dense, strict=True):
        assert np.abs(cp.asnumpy(x).astype(np.float32) - cp.asnumpy(y).astype(np.float32)).max() < 1e-3


@pytest.mark.exhaustive(each_value=())
@every_type
@pytest.mark.parametrize("scale", [0.02, -0.2, 0.0])
def test_softmax_scale(dtype: str, scale: float) -> None:
    check(f"scale {scale}", REGISTERS, inputs((1, 2, 100, 64), 150, 1, dtype), softmax_scale=scale, window=(-1, 0))


def test_large_logits() -> None:
    check("large logits", REGISTERS, inputs((1, 2, 100, 64), 150, 1, "bfloat16", grow=40.0))


@every_type
@pytest.mark.parametrize("size", [2000, 8000, 60000])
def test_large_inputs_overflow_nothing(dtype: str, size: int) -> None:
    """lse, a float32, is rounded by many powers of 2: a weight may become far too small, but not infinite or NaN.

    dQ and dK are multiples of K and Q, which may overflow float16 themselves.
    """
    do, q, k, v = inputs((1, 2, 100, 64), 150, 1, dtype)
    rng = np.random.default_rng(3)
    q, k = ((size * rng.uniform(0.99, 1.01, a.shape)).astype(a.dtype) for a in (q, k))
    *_, o, lse = reference(do, q, k, v)
    arrays = map(cp.asarray, (do, q, k, v, o.astype(TYPES[dtype]), lse.astype(np.float32)))
    dq, dk, dv = (cp.asnumpy(a).astype(np.float32) for a in gradients(STAGE, *arrays, REGISTERS))
    assert np.isfinite(dv).all() and np.abs(dv).max() <= 100 * np.abs(do.astype(np.float32)).max()
    assert not np.isnan([*dq.ravel(), *dk.ravel()]).any()


def test_absent_keys_do_no_harm() -> None:
    """All logits are very negative. A key past the end, which is 0 in shared memory, would weigh e^lse."""
    do, q, k, v = inputs((1, 1, 64, 64), 100, 1, "bfloat16")
    q, k = np.full_like(q, 8.0), np.full_like(k, -8.0) - np.abs(k)
    check("absent keys", REGISTERS, (do, q, k, v))


def test_deterministic() -> None:
    """The bits do not depend on the order of the blocks, and every block has added to every tile of dQ."""
    do, q, k, v = inputs((1, 2, 300, 64), 500, 1, "float16")
    *_, o, lse = reference(do, q, k, v)
    sizes = {**REGISTERS, "DETERMINISTIC": 1}
    runs = [
        gradients(STAGE, *(cp.asarray(a) for a in (do, q, k, v, o.astype(np.float16), lse.astype(np.float32))), sizes)
        for _ in range(2)
    ]
    for one, other in zip(*runs, strict=True):
        assert np.array_equal(cp.asnumpy(one), cp.asnumpy(other))


def test_scalar_atomics() -> None:
    """The variant for GPUs before sm_90."""
    check("scalar", {**REGISTERS, "VECTOR_ATOMICS": 0}, inputs((1, 1, 100, 72), 150, 1, "float16"), window=(-1, 0))


# ---- the X-ray


@pytest.mark.exhaustive(each_value=())
@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("tiling", [*KINDS, "one buffer of dS"])
@pytest.mark.parametrize("deterministic", [0, 1])
def test_xray_is_clean(tiling: str, deterministic: int) -> None:
    def looked_at(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        report = xray(kernel, grid, block, args, shared_mem)
        report.assert_clean()
        assert not any(figures.conflicts for figures in report.shared.values())

    sizes = {**TILINGS[tiling], "DETERMINISTIC": deterministic}
    check("X-ray", sizes, inputs((1, 2, 100, 64), 140, 1, "bfloat16"), window=(-1, 0), launch=looked_at)


@pytest.mark.usefixtures("only_x_rayed")
def test_keys_that_no_row_sees_wait_for_their_copies() -> None:
    """Their block has nothing to sum, but writes zeros to the shared memory that its copies of K and V target."""

    def looked_at(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        assert not find(kernel, grid, block, args, shared_mem)

    check("X-ray", SHARED, inputs((1, 1, 20, 64), 300, 1, "bfloat16"), window=(5, 0), launch=looked_at)


def found_by_xray(code: str, sizes: Mapping[str, int]) -> set[str]:
    kinds: set[str] = set()

    def looked_at(kernel: Any, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        kinds.update(finding.kind for finding in find(kernel, grid, block, args, shared_mem))

    given = inputs((1, 1, 200, 64), 140, 1, "bfloat16")
    *_, o, lse = reference(*given)
    arrays = (cp.asarray(a) for a in (*given, o.astype(given[1].dtype), lse.astype(np.float32)))
    gradients(STAGE, *arrays, sizes, code=code, launch=looked_at)
    return kinds


# ---- planted bugs

WAIT = "    cp_async_wait<0>();\n    __syncthreads();"
WRONG = (
    Bug("delta left out", "dP[m][n][i] = i % 2 ? -delta.y : -delta.x;", "dP[m][n][i] = 0.0f;"),
    Bug("lse not in units of log2", "l * LOG2_E", "l"),
    Bug("a row that sees no key weighs", "l == NEG_INF ? -NEG_INF : l_log2", "l_log2"),
    Bug(
        "dK not scaled",
        "pack(T(), x[0] * forward.softmax_scale, x[1] * forward.softmax_scale)",
        "pack(T(), x[0], x[1])",
    ),
    Bug(
        "only the first head of the group",
        "int next_head = m_block > rows.first_tile ? head : head + 1;",
        "int next_head = m_block > rows.first_tile ? head : block.group;",
    ),
    Bug("the diagonal is masked", "distance > rows.window_hi", "distance >= rows.window_hi"),
    Bug("absent keys weigh", " || j >= kv_len", ""),
    Bug("tiles on the diagonal are not masked", "min(first_row + rows.window_hi + 1, kv_len)", "kv_len"),
    Bug(
        "the first tile of rows left out",
        "max(block.first_key - window_hi, 0) / BLOCK_M",
        "max(block.first_key - window_hi, 0) / BLOCK_M + 1",
    ),
    Bug(
        "dQ_accum begins with what was there",
        "make_float4(0.0f, 0.0f, 0.0f, 0.0f)",
        "make_float4(1.0f, 0.0f, 0.0f, 0.0f)",
    ),
    Bug("dS not transposed", "ldmatrix_x4_trans(a, swizzle_advance<ROW>", "ldmatrix_x4(a, swizzle_advance<ROW>"),
    Bug("halves of a fragment exchanged", "c * (SLICE_M / 8) + 2 * k + i / 2", "c * (SLICE_M / 8) + 2 * k + 1 - i / 2"),
    Bug("dQ of the last tile never added", "    add_dq(previous.slot, (stage ^ 1) * SCORES_BYTES);\n", ""),
)


WRONG_ALIBI = (
    Bug("the slope of the group's first head", "    hooks.head += head;\n", ""),
    Bug("distances that start at the first key", "2 * t + kv_len - q_len;", "2 * t;"),
    Bug("the second of two rows as far as the first", "q_idx + i / 2 * 8 + i % 2", "q_idx + i / 2 * 8"),
)


@pytest.mark.exhaustive(one_of_each=lambda bug: None)
@pytest.mark.parametrize("bug", WRONG_ALIBI, ids=lambda bug: bug.name)
def test_wrong_gradients_with_alibi_are_found(bug: Bug) -> None:
    code, given = bug.plant(kernel.source(FILE)), inputs((2, 4, 100, 64), 80, 2, "bfloat16")
    with pytest.raises(AssertionError, match="is off by"):
        check(bug.name, REGISTERS, given, alibi_slopes=SLOPES, code=code)


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.new == "")
@pytest.mark.parametrize("bug", WRONG, ids=lambda bug: bug.name)
def test_wrong_gradients_are_found(bug: Bug) -> None:
    code = bug.plant(kernel.source(FILE))
    given = inputs((1, 2, 200, 64), 140, 1, "bfloat16", grow=4.0)  # the first 60 rows see no key
    with pytest.raises(AssertionError, match="is off by"):
        check(bug.name, REGISTERS, given, code=code, window=(-1, 0))
        do, q, k, v = inputs((1, 2, 64, 64), 100, 1, "bfloat16")
        check(bug.name, REGISTERS, (do, np.full_like(q, 8.0), np.full_like(k, -8.0) - np.abs(k), v), code=code)


RACES = (
    Bug("tiles are read before they have arrived", WAIT, "    __syncthreads();"),
    Bug("the other threads' copies are not waited for", WAIT, "    cp_async_wait<0>();"),
    Bug("dS is read before it is written", "    semaphore.wait(previous);\n    __syncthreads();", ""),
    Bug("one buffer of dS", "DQ_LATER ? stage * SCORES_BYTES : 0", "0"),
    Bug(
        "a tile is replaced while it is in use",
        "load_q(next, stage ^ 1);\n      load_do(next, stage ^ 1);",
        "load_q(next, stage);\n      load_do(next, stage);",
    ),
)


RACES_IN_SHARED_MEMORY = (
    Bug(
        "neighbours' P is read before it is written",
        'asm volatile("bar.sync %0, %1;" ::"r"(1 + warp.id / GROUP_WARPS)',
        'if (false) asm volatile("bar.sync %0, %1;" ::"r"(1 + warp.id / GROUP_WARPS)',
    ),
    Bug(
        "dQ of this tile in place of the last",
        "!dq_first) add_dq(due.slot, dS_due)",
        "!dq_first) add_dq(due.slot, dS_stage)",
    ),
)


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted(
        (kernel.source(FILE), bug) for bug in (*WRONG, *WRONG_ALIBI, *RACES, *RACES_IN_SHARED_MEMORY)
    )


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.new == "")
@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("bug", RACES, ids=lambda bug: bug.name)
def test_races_are_found(bug: Bug) -> None:
    code = bug.plant(kernel.source(FILE))
    assert found_by_xray(code, REGISTERS) & {"race", "not waited for", "never waited for", "uninitialised"}


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.new == "")
@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("bug", RACES_IN_SHARED_MEMORY, ids=lambda bug: bug.name)
def test_races_in_shared_memory_are_found(bug: Bug) -> None:
    assert "race" in found_by_xray(bug.plant(kernel.source(FILE)), SHARED)


@pytest.mark.usefixtures("only_x_rayed")
def test_additions_without_atomics_are_found() -> None:
    code = kernel.source(FILE)
    old = "atomicAdd(dQ_accum + 128 * fragment + 32 * i + lane_id, d[i]);"
    assert code.count(old) == 1
    code = code.replace(old, "dQ_accum[128 * fragment + 32 * i + lane_id] += d[i];")
    assert "race" in found_by_xray(code, {**REGISTERS, "VECTOR_ATOMICS": 0})


# ---- compiling


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_registers(arch: str) -> None:
    """The tiles for an A100 and an H200 spill a few values at most, with any NVRTC from 12.9 to 13.0."""
    try:
        compile_report.nvrtc_version()
    except compile_report.NvrtcMissing as missing:
        pytest.skip(str(missing))
    limit = {"sm_80": 163, "sm_90": 227}[arch] * tiles.KB
    for d in (64, 128, 256):
        usual = pick_backward_mma(d, limit)
        others = [pick_other_backward_mma(grid, d, limit) for grid in GRIDS] if d < 256 else []
        for sizes in (usual, *filter(None, others)):
            report = compile_report.compile_report(
                FILE, {"HEAD_DIM": d, **sizes}, arch, name="backward_mma<__nv_bfloat16>"
            )
            assert report.spill_bytes <= 16, report


def test_the_tiles_of_a_launch_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 132 multiprocessors, fewer blocks get smaller tiles, and blocks of uneven work count half."""
    stage = LADDER["backward_mma"]
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    monkeypatch.setattr(limits, "most_shared", lambda: 227 * tiles.KB)

    def block(head_dim: int, keys: int, kv_heads: int, **mask: bool) -> tuple[int, int, int]:
        sizes = stage.defines_for(head_dim, keys, kv_heads, **mask)
        return sizes["BLOCK_M"], sizes["BLOCK_N"], sizes["WARPS"]

    assert block(64, 4096, 5) == (64, 128, 4) and block(128, 4096, 5) == (64, 128, 8)  # 160 blocks
    assert block(64, 4096, 4) == (128, 128, 8) and block(128, 4096, 4) == (64, 128, 8)  # 128
    assert block(64, 4096, 2) == block(128, 4096, 2) == (64, 64, 8)  # 64 blocks, or 128 of 64 keys
    assert block(64, 4096, 1) == (64, 32, 4) and block(128, 4096, 1) == (64, 32, 8)  # 32, 64 of 64 keys, 128 of 32
    assert block(64, 4096, 4, uneven=True) == (64, 64, 8)  # 128, and 256 of 64 keys
    assert block(64, 4096, 2, uneven=True) == (64, 32, 4)  # 64, 128 of 64 keys, 256 of 32
    assert block(256, 128, 1) == (32, 64, 8)
    q = np.zeros((1, 1, 128, 64), np.float16)
    lse = np.zeros((1, 1, 128), np.float32)
    for deterministic, keys in ((False, 32), (True, 128)):  # in a fixed order, many small tiles would take longer
        arrays = tuple(map(cp.asarray, (q, q, q, q, q, lse)))
        ready, *_ = backward.plan(stage, *arrays, softmax_scale=1.0, deterministic=deterministic)
        assert ready.launches[1].grid[0] == 128 // keys
    monkeypatch.setattr(limits, "most_shared", lambda: 99 * tiles.KB)  # no space for the smaller blocks' two buffers
    usual = stage.defines(128)
    assert stage.defines_for(128, 128, 1)["BLOCK_N"] <= usual["BLOCK_N"]
    assert stage.shared_bytes(stage.defines_for(128, 128, 1)) <= 99 * tiles.KB
