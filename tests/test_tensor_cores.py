"""Stages 06, 07 and 10, on tensor cores, in half types: sizes, masks, lengths, large logits, tiles, planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from planted import ALL, Bug, check_all_can_be_planted

from helpers import engine
from helpers.attention import check, flash_attention, flash_attention_varlen, kernel
from helpers.attention.ladder import LADDER, limits
from helpers.attention.ladder.stages.tensor_cores import mma_shared_bytes, pick_few_mma, pick_mma
from helpers.device import cp

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NAMES = ("flash_wmma", "flash_mma", "hopper")
SIZES = ((1, 1), (2, 1000), (31, 64), (33, 1), (64, 63), (65, 257), (127, 32), (128, 128), (129, 65), (257, 127))
HEAD_DIMS = {"flash_wmma": (8, 64, 72, 128), "flash_mma": (8, 64, 72, 96, 128, 256)}
HEAD_DIMS["hopper"] = HEAD_DIMS["flash_mma"]

every_stage = pytest.mark.parametrize("name", NAMES)
every_type = pytest.mark.parametrize("dtype", TYPES)


@pytest.fixture(autouse=True)
def _where_the_stage_runs(request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name in NAMES and (reason := LADDER[name].why_not(head_dim=64, dtype="float16")):
        pytest.skip(reason)


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def inputs(shape: tuple[int, ...], n_kv: int, kv_heads: int, dtype: str, *, grow: float = 1.0) -> Arrays:
    """Make q of `shape`, (batch, heads, N, d), and k, v, with non-zero means; logits `grow` times as large."""
    batch, _, _, d = shape
    rng = np.random.default_rng([*shape, n_kv, kv_heads])
    kv = (batch, kv_heads, n_kv, d)
    q, k, v = rng.standard_normal(shape) + 0.3, rng.standard_normal(kv) + 0.2, rng.standard_normal(kv) + 0.5
    return tuple(a.astype(TYPES[dtype]) for a in (q * grow**0.5, k * grow**0.5, v))


def check_both(name: str, got: tuple[Any, Any], q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> None:
    oracle.check_output(name, got, oracle.expected(q, k, v, **options))


def run(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[Any, Any]:
    return LADDER[name](q, k, v, return_lse=True, **options)


# ---- values


SIZED = [  # each head dimension is a compilation; bfloat16 has two
    (name, d, dtype)
    for dtype in TYPES
    for name in NAMES
    for d in HEAD_DIMS[name]
    if dtype == "float16" or d in (64, 128)
]


@pytest.mark.exhaustive(each_value=("name",))
@pytest.mark.parametrize(("name", "d", "dtype"), SIZED)
def test_sizes(name: str, d: int, dtype: str) -> None:
    for n, n_kv in SIZES:
        q, k, v = inputs((1, 2, n, d), n_kv, 2, dtype)
        check_both(f"{name} {n} x {n_kv}", run(name, q, k, v), q, k, v)


MASKS = {
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "left": {"window": (40, -1)},
    "right": {"window": (-1, 33)},
    "diagonal": {"window": (0, 0)},
    "causal window": {"causal": True, "window": (100, -1)},
    "wider than all": {"window": (5000, 5000)},
}


@pytest.mark.exhaustive(each_value=("name",))
@every_stage
@every_type
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("n", "n_kv"), [(200, 200), (129, 333), (333, 129), (1, 300), (300, 1)])
def test_masks(name: str, dtype: str, mask: str, n: int, n_kv: int) -> None:
    """With more rows than keys some rows see nothing: 0 and -inf.

    With the causal mask batch 2, four query heads to one KV head; no mask depends on batch or head, so the others have
    two heads to one.
    """
    q, k, v = inputs((2, 4, n, 64) if mask == "causal" else (1, 2, n, 64), n_kv, 1, dtype)
    check_both(f"{name}, {mask}", run(name, q, k, v, **MASKS[mask]), q, k, v, **MASKS[mask])


@pytest.mark.exhaustive(each_value=("name",))
@every_stage
@every_type
@pytest.mark.parametrize("causal", [False, True])
def test_packed_lengths(name: str, dtype: str, causal: bool) -> None:
    rows, keys = (3, 130, 0, 64, 1, 70), (200, 130, 5, 0, 70, 33)
    attend = partial(flash_attention_varlen, causal=causal, return_lse=True, stage=name)
    q, k, v = (a[0].swapaxes(0, 1) for a in inputs((1, 4, sum(rows), 64), sum(keys), 2, dtype))
    oracle.check_packed(name, attend, q, k, v, (rows, keys), causal=causal)


@every_stage
def test_layouts(name: str) -> None:
    """(batch, seq, heads, head_dim), slices of one array, and rows that do not start at multiples of 16 bytes."""
    q, k, v = inputs((2, 2, 70, 64), 90, 2, "float16")
    o = cp.asnumpy(run(name, q, k, v, causal=True)[0])
    together = cp.asarray(np.concatenate([k, v], axis=-1).swapaxes(1, 2))
    odd = cp.asarray(np.pad(q.swapaxes(1, 2), ((0, 0), (0, 0), (0, 0), (0, 3))))[..., :64]
    got = flash_attention(odd, together[..., :64], together[..., 64:], causal=True, stage=name)
    assert np.array_equal(cp.asnumpy(got).swapaxes(1, 2), o)


@pytest.mark.exhaustive(each_value=("name",))
@every_stage
@every_type
@pytest.mark.parametrize("scale", [1.0, 1e-3, -0.125, 0.0])
def test_scales(name: str, dtype: str, scale: float) -> None:
    q, k, v = inputs((1, 1, 130, 64), 150, 1, dtype)
    check_both(f"{name}, scale {scale}", run(name, q, k, v, softmax_scale=scale), q, k, v, softmax_scale=scale)


def last_bits(x: np.ndarray) -> float:
    """Return the error of rounding scores to float32 in their own unit: float32's spacing at the largest of them."""
    return float(np.spacing(np.abs(x).max().astype(np.float32)))


@pytest.mark.exhaustive(each_value=("name",))
@every_stage
@every_type
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1023.0, 1025.0, 1e9])
@pytest.mark.parametrize("causal", [False, True])
def test_a_huge_scale(name: str, dtype: str, sign: int, scale: float, causal: bool) -> None:
    one_key_wins(name, dtype, softmax_scale=sign * scale, causal=causal)


def one_key_wins(name: str, dtype: str = "float16", source: str | None = None, **options: Any) -> None:
    """Make a call with scores so large that one key takes all the weight.

    Products of small integers are exact in float32, so it is clear which key it is. Some queries see it after others,
    and some scores are below 0.
    """
    sign = np.sign(options["softmax_scale"])
    rng = np.random.default_rng(5)
    shapes = (1, 2, 130, 64), (1, 2, 300, 64), (1, 2, 300, 64)
    q, k, v = (rng.integers(-37, 38, shape).astype(TYPES[dtype]) for shape in shapes)
    q[..., 100:, :] = 37
    k[..., 5::7, :] *= np.linspace(0, 1, 64) < 0.9
    k[..., 77, :] = 37 * sign
    launch, results = LADDER[name].prepare(q, k, v, return_lse=True, source=source, **options)
    launch()
    o, lse = map(cp.asnumpy, results)
    want, want_lse, tolerance = oracle.expected(q, k, v, **options)
    check.check(name, o, want, tolerance=tolerance)
    check.check(f"{name}, lse", lse, want_lse, tolerance=2 * last_bits(want_lse))


@pytest.mark.exhaustive(each_value=("name",))
@every_stage
@every_type
@pytest.mark.parametrize("case", ["all", "all below 0", "later keys", "earlier keys", "some rows", "rising from below"])
def test_large_inputs(name: str, dtype: str, case: str) -> None:
    """q and k of about 8000, where PyTorch's attention is right: multiples of 64, whose products are exact in float32.

    A warp's rows, and the tiles of a row, may have large scores or small ones.
    """
    rng = np.random.default_rng(8)
    q, k = (64.0 * rng.integers(120, 131, shape) for shape in ((1, 2, 70, 64), (1, 2, 300, 64)))
    v = rng.standard_normal(k.shape)
    if case == "all below 0":
        k = -k
    elif case == "later keys":
        k[..., :200, :] *= 2.0**-20
    elif case == "earlier keys":
        k[..., 150:, :] *= 2.0**-20
    elif case == "some rows":
        q[..., ::3, :] *= 2.0**-20
    elif case == "rising from below":
        k *= np.linspace(-1, 1, 4).repeat(75)[:, None].round(1)
        k -= k % 64
    q, k, v = (a.astype(TYPES[dtype]) for a in (q, k, v))
    check_both(name, run(name, q, k, v), q, k, v)


@every_stage
@pytest.mark.parametrize("sign, scale", [(1, 1330.769), (-1, 1907.692)])
def test_maxima_a_last_bit_apart(name: str, sign: int, scale: float) -> None:
    """Beyond 2**27 floats are 16 apart: m_i + 8 would round to m_i + 16, and 2**16 is too large for a float16."""
    q, k, v = (np.zeros((1, 1, rows, 64), np.float16) for rows in (64, 384, 384))
    q[..., 0], q[..., 1], q[..., 2] = 300.0 * sign, 1.0, np.arange(64) / 8
    k[..., 0], k[..., 2], v[...] = 240.0, 8.0, 1.0
    k[..., 256:, 1] = 2**-7 * round(2**7 * 16 / (scale * np.log2(np.e)))  # one ulp more in the later keys
    o = cp.asnumpy(LADDER[name](q, k, v, softmax_scale=scale))
    check.check(name, o, np.ones_like(o), tolerance=0.01)


@pytest.mark.exhaustive(each_value=("name",))
@every_stage
@pytest.mark.parametrize("order", ["as they come", "rising", "falling"])
@pytest.mark.parametrize("causal", [False, True])
def test_large_logits(name: str, order: str, causal: bool) -> None:
    """Scores far beyond the largest float16, 65504; every tile raises the maximum, or none does."""
    q, k, v = inputs((1, 1, 130, 64), 300, 1, "float16", grow=20000.0)
    if order != "as they come":
        q = np.abs(q)
        length = np.linspace(0.01, 1, 300) if order == "rising" else np.linspace(1, 0.01, 300)
        k = (np.abs(k) * length[None, None, :, None]).astype(np.float16)
    assert np.abs(q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)).max() > 1e5
    check_both(f"{name}, {order}", run(name, q, k, v, causal=causal), q, k, v, causal=causal)


@every_stage
def test_maxima_that_rise_slowly(name: str) -> None:
    """Each tile's maximum exceeds m_i: in 07 too little for a rescale, but in the end by more."""
    q = np.full((1, 1, 40, 64), 1.0, np.float16)
    steps = np.linspace(0, 3, 640) + 0.01 * np.random.default_rng(1).standard_normal(640)
    k = np.repeat(steps[None, None, :, None], 64, -1).astype(np.float16)
    v = inputs((1, 1, 1, 64), 640, 1, "float16")[2]
    check_both(name, run(name, q, k, v, softmax_scale=0.25), q, k, v, softmax_scale=0.25)


# ---- sizes of tiles


@pytest.mark.parametrize("name", ["flash_wmma", "flash_mma"])
@pytest.mark.parametrize("limit", [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_fit_the_shared_memory(name: str, limit: int) -> None:
    stage = LADDER[name]
    pick = stage.tuning.tiles
    least, most = (99 * 1024 if name == "flash_mma" else 0), stage.max_head_dim  # 07 needs sm_80
    for head_dim in range(8, most + 1, 8):
        if limit >= least:
            assert stage.shared_bytes({"HEAD_DIM": head_dim, **pick(head_dim, limit)}) <= limit
    with pytest.raises(ValueError, match=f"1 to {most}"):
        pick(most + 8, limit)
    with pytest.raises(ValueError, match="no tile for head_dim = 128 fits"):
        pick(128, 16 * 1024)


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("pick", [pick_mma, pick_few_mma], ids=["many blocks", "few blocks"])
@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 96, 128, 136, 256])
def test_every_tile_of_07_is_right(head_dim: int, limit: int, pick: Callable[[int, int], dict[str, int]]) -> None:
    sizes = pick(head_dim, limit)
    assert mma_shared_bytes({"HEAD_DIM": head_dim, **sizes}) <= limit
    q, k, v = inputs((1, 1, 150, head_dim), 200, 1, "float16")
    launch, got = LADDER["flash_mma"].prepare(q, k, v, causal=True, return_lse=True, sizes=sizes)
    launch()
    check_both(f"flash_mma {sizes}", got, q, k, v, causal=True)


def test_few_blocks_get_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of 200 rows are 4 blocks of 128 rows, or 8 of 64. A causal mask halves the work of some of them."""
    grids = []
    for multiprocessors, mask in ((7, {}), (8, {}), (3, {"causal": True}), (4, {"causal": True}), (4, {})):
        monkeypatch.setattr(limits, "multiprocessors", lambda many=multiprocessors: many)
        with kernel.launches_replaced(lambda self, grid, *_, **__: grids.append(grid)):
            LADDER["flash_mma"].prepare(*inputs((1, 2, 200, 64), 100, 2, "float16"), **mask)[0]()
    assert grids == [(2, 2, 1), (4, 2, 1), (2, 2, 1), (4, 2, 1), (2, 2, 1)]


@pytest.mark.parametrize(("limit", "block_n"), [(99, 64), (163, 128), (227, 128)])
def test_many_keys_a_tile_only_where_two_blocks_have_room(limit: int, block_n: int) -> None:
    assert pick_mma(64, limit * 1024)["BLOCK_N"] == block_n
    assert pick_mma(48, limit * 1024)["BLOCK_N"] == 64
    assert pick_mma(128, limit * 1024)["BLOCK_N"] == {99: 32, 163: 32, 227: 64}[limit]


# ---- planted bugs


def changed(name: str, old: str, new: str = "", **more: Any) -> Bug:
    return Bug(name, old, new, which=ALL, **more)


def no_barrier(name: str, which: int, times: int) -> Bug:
    return Bug(name, "__syncthreads();", "", times=times, which=which, cpu_only=True)


# The prologue, which 06 and 07 share with 05, has its bugs in test_planted_bugs; a few are planted here too, in 06.
SHARED = (
    changed("full tiles end late", "|| first + BLOCK_N > min(first_row", "|| first > min(first_row"),
    changed("full for the first row is full for all", "first < last_row + window.lo", "first < first_row + window.lo"),
    changed("ends where the first row does", "end = min(last_pos +", "end = min(first_pos +"),
    changed("wrong head of K and V", "head / (params.heads / params.kv_heads)", "head % params.kv_heads"),
    changed("division by zero", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"),
    changed("lse in units of log2", "LN_2 * (m_i", "(m_i"),
)

BUGS: dict[str, tuple[Bug, ...]] = {
    "flash_wmma": (
        *SHARED,
        changed("no maximum for rows that see nothing", " = M_INIT", " = NEG_INF"),
        no_barrier("no barrier after Q and K", 0, times=3),
        no_barrier("no barrier before P V", 1, times=3),
        no_barrier("no barrier after P V", 2, times=3),
        changed("acc is not rescaled", "acc[m][n].x[e] *= factor.x[e];", ";"),
        changed("second half of acc has the factors of the first", "S_smem + 16 * m, 0,", "S_smem, 0,"),
        changed("l_i is not rescaled", "    l_i *= rescale;\n"),
        changed("K is not transposed", "tc::col_major> k_frag;", "tc::row_major> k_frag;"),
        changed("P is read with the stride of S", "+ k, 2 * S_STRIDE);", "+ k, S_STRIDE);", cpu_only=True),
        changed("second half of P is the first", "P_smem + 16 * m * 2 * S_STRIDE + k", "P_smem + k"),
        changed("a key too many", "first + j > high", "first + j > high + 1"),
        changed("a key too few", "first + j < low", "first + j <= low"),
        changed("rows past the end are read", "r >= end || ", "", cpu_only=True),
    ),
    "flash_mma": (
        changed("no maximum for rows that see nothing", "m_i = M_INIT;", "m_i = NEG_INF;"),
        changed("no wait for the copies", "cp_async_wait<0>();", cpu_only=True),
        changed("waits for all but the newest copies", "cp_async_wait<0>();", "cp_async_wait<1>();", cpu_only=True),
        no_barrier("no barrier in the loop", 0, times=1),
        changed(
            "the next tile overwrites this one",
            "K_smem + (stage_offset ^ TILE) + copy_offset",
            "K_smem + stage_offset + copy_offset",
            cpu_only=True,
        ),
        changed("always the first half of V_smem", "v_lane + stage_offset", "v_lane"),
        changed(
            "swizzled on the way out alone",
            "copy_offset = swizzle<CHUNKS>(copy_row, copy_chunk)",
            "copy_offset = 16 * (copy_row * CHUNKS + copy_chunk)",
        ),
        changed("halves of K's fragment exchanged", "S[m][2 * n], a[m], b[0], b[1]", "S[m][2 * n], a[m], b[1], b[0]"),
        changed(
            "halves of V's fragment exchanged", "acc[m][2 * n], a[m], b[0], b[1]", "acc[m][2 * n], a[m], b[1], b[0]"
        ),
        changed(
            "registers of P exchanged",
            "row_pair(S, row, 2 * k + i / 2)",
            "row_pair(S, 2 * m + i / 2, 2 * k + i % 2)",
        ),
        changed("V is not transposed", "ldmatrix_x4_trans(b, ", "ldmatrix_x4(b, "),
        changed("half of acc is not rescaled", "row_pair(acc, i, n)[1] *= rescale;"),
        changed("l_i is not rescaled", "    l_i[i] *= rescale;\n"),
        changed(
            "maxima of two lanes out of four",
            "row_allreduce(fmaxf(m_old, m_new[i]), [](float a, float b) { return fmaxf(a, b); })",
            "fmaxf(fmaxf(m_old, m_new[i]), __shfl_xor_sync(0xffffffff, fmaxf(m_old, m_new[i]), 1))",
        ),
        changed("a key too many", "BLOCK_N>(min(high + 1, end)", "BLOCK_N>(min(high + 2, end)"),
        changed("a key past the end", "BLOCK_N>(min(high + 1, end)", "BLOCK_N>(high + 1"),
        changed("a key too few", "keys_before<BLOCK_N>(low)", "keys_before<BLOCK_N>(low + 1)"),
        changed("bits of a thread's second keys", "min(keys % 8, 2)", "min(keys % 8, 1)"),
        changed("rows past the end are read", "i < rows_left && ", "", cpu_only=True),
        changed("large maxima are rounded", "if (!large) return false;", "return large;"),
        changed(
            "large scores are not rounded as their maximum",
            "(__fmul_rn(s, softmax_scale_log2) - m_new[i])",
            "fmaf(s, softmax_scale_log2, -m_new[i])",
        ),
        changed("large maxima are forgotten", "base[i] = large ? m_new[i] : 0.0f", "base[i] = 0.0f"),
        changed("maxima before the scale", "s_max * softmax_scale_log2", "s_max"),
    ),
}
CASES = [(name, bug) for name, bugs in BUGS.items() for bug in bugs]
WITH_BUG: tuple[dict[str, Any], ...] = (
    {"n": 150, "n_kv": 200, "window": (90, 90)},
    {"n": 200, "n_kv": 130, "causal": True, "softmax_scale": -0.2},  # some rows see nothing
    {"n": 40, "n_kv": 300, "grow": 400.0},
)


def check_with(name: str, text: str) -> None:
    """Check a few calls with another text of the kernel: shared K and V, tails, masks, large logits."""
    for case in WITH_BUG:
        options = dict(case)
        q, k, v = inputs((1, 4, options.pop("n"), 32), options.pop("n_kv"), 2, "float16", grow=options.pop("grow", 1.0))
        launch, (o, lse) = LADDER[name].prepare(q, k, v, source=text, return_lse=True, **options)
        launch()
        check_both(name, (o, lse), q, k, v, **options)
    one_key_wins(name, softmax_scale=1e9, source=text)


@every_stage
def test_kernel_without_a_bug_passes(name: str) -> None:
    check_with(name, kernel.source(LADDER[name].file))


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source(LADDER[name].file), bug) for name, bug in CASES)


@pytest.mark.exhaustive(one_of_each=lambda name, bug: (name, bug.cpu_only))
@pytest.mark.parametrize(("name", "bug"), CASES, ids=[f"{name}-{bug.name}" for name, bug in CASES])
def test_bug_is_seen(name: str, bug: Bug, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = bug.plant(kernel.source(LADDER[name].file))
    with pytest.raises((AssertionError, engine.LaunchError)):
        check_with(name, text)
