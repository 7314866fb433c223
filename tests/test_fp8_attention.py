"""fp8 against float64 on the numbers that its e4m3 inputs stand for; and the error of the tensor core's sums."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_with_kvcache,
    kernel,
    reference,
    ring_attention,
)
from helpers.attention.check import expect
from helpers.attention.comms import virtual_ranks
from helpers.attention.fp8 import dequantise, quantise
from helpers.attention.ladder import LADDER, limits
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.params import attention_params
from helpers.attention.ladder.stages import fp8 as fp8_stages
from helpers.attention.ladder.stages import hopper
from helpers.attention.ladder.steps import CLIMBS, FP8_CODES
from helpers.attention.run import forget
from helpers.bench.studies.fp8 import KERNELS
from helpers.device import cp

ROUNDED = 0.03  # rms error of rounding P to e4m3, for normal data: 2.2e-2 to 2.5e-2
KEY_AT = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def normal(*shape: int, mean: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return (mean + scale * np.random.default_rng().standard_normal(shape)).astype(np.float32)


def expected(q: Any, k: Any, v: Any, descales: Any = (1.0, 1.0, 1.0), **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Compute the output and lse in float64, for e4m3 arrays (batch, seq, heads, head_dim)."""
    wide = []
    for a, descale in zip((q, k, v), descales, strict=True):
        by_head = np.asarray(descale, np.float64)
        by_head = by_head[:, None, :, None] if by_head.ndim else by_head
        wide.append(dequantise(a, by_head, np.float64).swapaxes(1, 2).repeat(q.shape[2] // a.shape[2], axis=1))
    return reference.attention(*wide, return_lse=True, **options)


def rms(got: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=pytest.mark.exhaustive), 72])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (70, 20)}], ids=lambda options: next(iter(options), "no mask")
)
def test_equals_the_reference(head_dim: int, options: dict[str, Any]) -> None:
    """Rows and keys that fill no tile, heads that share keys, a descale for each head."""
    q, k, v = normal(2, 133, 4, head_dim), normal(2, 257, 2, head_dim), normal(2, 257, 2, head_dim)
    descales = [np.abs(a).max((1, 3)) / np.float32(448) for a in (q, k, v)]
    e4m3 = [quantise(a, descale[:, None, :, None]) for a, descale in zip((q, k, v), descales, strict=True)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    o, lse = flash_attention(*e4m3, return_lse=True, out_dtype="float32", **names, **options)
    want, want_lse = expected(*e4m3, descales, **options)
    assert rms(o.swapaxes(1, 2), want) < ROUNDED
    np.testing.assert_allclose(lse, want_lse, atol=3e-2)  # the sum is that of rounded weights


@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.exhaustive)])
def test_descales_of_blocks_of_rows(head_dim: int) -> None:
    """Blocks of 128 rows of very different magnitudes; the last ones are shorter, and heads share keys."""
    q, k, v = normal(2, 270, 4, head_dim), normal(2, 400, 2, head_dim), normal(2, 400, 2, head_dim)
    names, e4m3, wide = {}, [], []
    for name, a in (("q_descale", q), ("k_descale", k), ("v_descale", v)):
        blocks = -(-a.shape[1] // 128)
        descale = np.random.default_rng().choice([0.01, 0.1, 1.0], (2, a.shape[2], blocks)).astype(np.float32)
        by_row = descale.repeat(128, axis=2)[..., : a.shape[1]].swapaxes(1, 2)[..., None]
        names[name] = descale
        e4m3.append(quantise(a))
        wide.append(dequantise(e4m3[-1], by_row, np.float64).swapaxes(1, 2).repeat(4 // a.shape[2], axis=1))
    for options in ({}, {"causal": True}):
        o, lse = flash_attention(*e4m3, return_lse=True, out_dtype="float32", **names, **options)
        want, want_lse = reference.attention(*wide, return_lse=True, **options)
        assert rms(o.swapaxes(1, 2), want) < ROUNDED
        np.testing.assert_allclose(lse, want_lse, atol=6e-2)
        np.testing.assert_allclose(expect(*e4m3, **names, **options).o.swapaxes(1, 2), want)


def test_packed_sequences_do_not_see_their_neighbours() -> None:
    """One has no row, one ends within a tile, and neighbouring rows are NaN."""
    cu_q, cu_k = np.array([0, 30, 30, 150], np.int32), np.array([0, 60, 70, 270], np.int32)
    q, k, v = (quantise(normal(n, 2, 64)) for n in (150, 270, 270))
    k[60:70] = v[60:70] = 0x7F
    o = flash_attention_varlen(q, k, v, cu_q, cu_k, causal=True, out_dtype="float32")
    for i in (0, 2):
        rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        want, _ = expected(q[None, rows], k[None, keys], v[None, keys], causal=True)
        assert rms(o[None, rows].swapaxes(1, 2), want) < ROUNDED


def test_a_packed_sequence_without_keys_is_zero() -> None:
    cu_q, cu_k = np.array([0, 64, 128], np.int32), np.array([0, 64, 64], np.int32)
    q, k, v = (quantise(normal(n, 2, 64)) for n in (128, 64, 64))
    o, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert not np.asarray(o[64:], np.float32).any() and (lse[:, 64:] == -np.inf).all()


def test_rows_without_keys_are_zero() -> None:
    q, k, v = (quantise(normal(1, n, 1, 128)) for n in (200, 100, 100))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert not np.asarray(o[:, :100], np.float32).any() and (lse[..., :100] == -np.inf).all()
    assert np.isfinite(lse[..., 100:]).all()


def test_nan_stays_in_its_column() -> None:
    q, k, v = (quantise(normal(1, 140, 1, 64)) for _ in range(3))
    v[0, 100, 0, 3] = 0x7F
    o = np.asarray(flash_attention(q, k, v), np.float32)[0, :, 0]
    assert np.isnan(o[:, 3]).all() and np.isfinite(np.delete(o, 3, axis=1)).all()


def test_nan_in_a_key_reaches_the_rows_that_see_it() -> None:
    q, k, v = (quantise(normal(1, 140, 2, 64)) for _ in range(3))
    k[0, 100, 0, 3] = 0xFF
    o = np.asarray(flash_attention(q, k, v, causal=True), np.float32)[0]
    assert np.isnan(o[100:, 0]).all() and np.isfinite(o[:100, 0]).all() and np.isfinite(o[:, 1]).all()


def test_a_negative_scale() -> None:
    q, k, v = (quantise(normal(1, 140, 1, 64)) for _ in range(3))
    want, _ = expected(q, k, v, softmax_scale=-0.1)
    got = flash_attention(q, k, v, softmax_scale=-0.1, out_dtype="float32")
    assert rms(got.swapaxes(1, 2), want) < ROUNDED


@pytest.mark.parametrize(
    "source, low, high",
    [
        (None, 0.9985, 1.0),
        ("steps/16_03_codes.cu", 0.9985, 1.0),
        ("steps/16_05_row_of_ones.cu", 0.9985, 1.0),
        ("steps/16_06_quarters.cu", 0.9985, 1.0),
        ("steps/16_02_two_levels.cu", 0.997, 0.9992),
        ("steps/16_01_one_level.cu", 0.97, 0.99),
    ],
    ids=["summed weights lose alike", "codes", "ones", "quarters", "each tile added in float32", "one level of sums"],
)
def test_what_sums_lose(source: str | None, low: float, high: float) -> None:
    """The output's projection on the exact one, if V has a mean: an H200 had 0.9993, 0.9985 and 0.985 at 1024 keys."""
    q, k, v = normal(64, 128), normal(1024, 128), normal(1024, 128, mean=1.0, scale=0.5)
    e4m3 = [quantise(a) for a in (q, k, v)]
    o = cp.full(q.shape, cp.nan, "float32")
    steps = {step.file: step for step in (*CLIMBS["fp8"], FP8_CODES)}
    steps[source or "16_fp8.cu"](*e4m3, out=o)
    want, _ = expected(*(a[None, :, None] for a in e4m3))
    assert low < float((cp.asnumpy(o) * want[0, 0]).sum() / (want**2).sum()) < high


def test_rows_whose_scores_are_all_negative() -> None:
    """The maxima of bits are too small there; the kernel has to compute again, in the first tile and in a later one."""
    q, k = normal(1, 70, 1, 64, mean=4.0), normal(1, 500, 1, 64, mean=-4.0)
    k[:, 300:] *= 0.25
    e4m3 = [quantise(a) for a in (q, k, normal(1, 500, 1, 64))]
    o, lse = flash_attention(*e4m3, return_lse=True, out_dtype="float32")
    want, want_lse = expected(*e4m3)
    assert rms(o.swapaxes(1, 2), want) < ROUNDED
    np.testing.assert_allclose(lse, want_lse, atol=6e-2)


@pytest.mark.parametrize(
    "head_dim, block_n, keys",
    [(128, 160, 300), (64, 192, 333), (256, 128, 150), (80, 64, 100), (176, 32, 40), (16, 32, 40)],
)
def test_transposed_tiles(head_dim: int, block_n: int, keys: int) -> None:
    """V^T byte by byte, in P's order of keys, swizzled, with zeros past the last key."""
    v = np.random.default_rng().integers(0, 256, (keys, head_dim)).astype(np.uint8)
    name, file = "transpose_v", kernel.source("16_transpose.cu")
    transpose = kernel.load(file, name, defines={"HEAD_DIM": head_dim, "BLOCK_N": block_n})
    strides = dict.fromkeys("qkvo", (0, head_dim, 0))
    params = attention_params(
        strides, n=keys, n_kv=keys, heads=1, kv_heads=1, window=(-1, -1), softmax_scale=1.0, sequences=0
    )
    tiles = -(-keys // block_n)
    width = next(w for w in (128, 64, 32) if block_n % w == 0)
    image = cp.full((tiles, block_n * (head_dim + 8)), 77, np.uint8)
    shared = fp8_stages.transpose_shared_bytes({"HEAD_DIM": head_dim, "BLOCK_N": block_n})
    threads = fp8_stages.TRANSPOSE_THREADS
    grid = tiles * (block_n // width), 1, 1
    transpose(grid, (threads,), (cp.asarray(v), image, None, params), shared_mem=shared)
    whole = np.zeros((tiles * block_n, head_dim), np.uint8)
    whole[:keys] = v
    rows = np.arange(head_dim)
    column = rows // 16 * 16 + rows % 16 % 8 * 2 + rows % 16 // 8
    of_place = np.arange(block_n) // 16 * 16 + np.array(KEY_AT)[np.arange(block_n) % 16]
    for tile in range(tiles):
        panels = cp.asnumpy(image)[tile].reshape(block_n // width, head_dim + 8, width // 16, 16)
        assert (panels[:, head_dim] == 0x38).all() and not panels[:, head_dim + 1 :].any()
        spread = rows % 8 if width == 128 else rows // 2 % 4 if width == 64 else rows // 4 % 2
        chunks = np.arange(width // 16)[None] ^ spread[:, None]
        straight = panels[:, rows[:, None], chunks].transpose(1, 0, 2, 3).reshape(head_dim, block_n)
        np.testing.assert_array_equal(straight, whole[tile * block_n :][of_place][:, column].T)


def order_of(shape: tuple[int, ...], causal: bool) -> tuple[np.ndarray, dict[str, int]]:
    """Return a call's table of tiles (rounds, blocks, 4), as written by the device; and the sizes."""
    stage, (batch, _, rows, head_dim) = LADDER["fp8"], shape
    arrays = {name: Spec.dense(shape, np.uint8) for name in "qkvo"}
    window = (-1, 0) if causal else (-1, -1)
    call = Call(arrays, 1.0, window, rows=rows, sequences=batch, aligned=True)
    sizes = stage.defines(head_dim)
    _, *orders, main = stage.launches(stage, call, sizes)
    table = cp.empty(stage.scratch(call, sizes)["schedule"].shape, np.int32)
    for each in orders:
        kernel.load(each.file, each.kernel)(each.grid, each.block, each.arguments({"schedule": table}))
    assert main.grid == table.shape[1:2]
    return cp.asnumpy(table), sizes


@pytest.mark.parametrize(
    "shape, most", [((16, 4, 4096, 128), 1.02), ((1, 16, 16384, 128), 1.01), ((4, 8, 4096, 256), 1.02)], ids=str
)
def test_blocks_get_equal_amounts_of_work(shape: tuple[int, ...], most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal, 132 blocks: in each round the longest tile goes to the block with the least work so far.

    most: the largest amount over the mean; dealt back and forth it is 1.04 or more.
    """
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    batch, heads, rows, _ = shape
    table, sizes = order_of(shape, True)
    wanted = itertools.product(range(batch), range(heads), range(0, rows, sizes["BLOCK_M"]))
    assert sorted(map(tuple, table[table[..., 3] >= 0][:, [0, 1, 3]].tolist())) == list(wanted)
    first, consumers = table[..., 3, None] + np.arange(0, sizes["BLOCK_M"], 64), sizes["BLOCK_M"] // 64
    tiles = -(-np.where(first < rows, np.minimum(first + 64, rows), 0) // sizes["BLOCK_N"])  # of keys, by consumer
    cost = np.where(table[..., 3] < 0, 0, consumers * tiles.max(-1) + tiles.sum(-1) + 2 * consumers)
    so_far = np.zeros(table.shape[1], int)
    for costs in cost:
        assert (np.diff(costs[np.argsort(so_far, kind="stable")]) <= 0).all()
        so_far += costs
    assert so_far.max() < most * so_far.mean()
    if rows % sizes["BLOCK_M"] == 0:  # as the host computes it, which counts whole tiles
        work = fp8_stages.work_of_tiles(rows, rows, sizes["BLOCK_M"], sizes["BLOCK_N"])
        together = hopper.heads_that_fit(2 * rows * shape[3], 1, batch * heads)
        assert fp8_stages.most_work(hopper.in_order(work, batch * heads, together), 132) == so_far.max()


@pytest.mark.parametrize(
    "shape, cut",
    [((16, 4, 4096, 128), 24), ((4, 32, 4096, 64), 0), ((3, 8, 2112, 64), 0), ((1, 1, 2100, 64), 0)],
    ids=str,
)
def test_without_a_mask_short_tiles_come_last(
    shape: tuple[int, ...], cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row occurs once. If the last round has space for both halves of its whole tiles, they are split."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    batch, heads, rows, _ = shape
    table, sizes = order_of(shape, False)
    seen = np.zeros((batch, heads, rows), int)
    entries = table[table[..., 3] >= 0]
    lengths = np.where(entries[:, 2] >> 16, 64 * (entries[:, 2] >> 16), sizes["BLOCK_M"])
    for (sequence, head, kv_head, first), length in zip(entries, lengths, strict=True):
        assert kv_head & 0xFFFF == head and first < rows
        seen[sequence, head, first : first + length] += 1
    assert (seen == 1).all()
    assert sum(entries[:, 2] >> 16 == 1) == sum(entries[:, 2] >> 16 == 2) == cut
    of_tile = np.minimum(lengths, rows - entries[:, 3])
    assert (of_tile[: len(entries) - 2 * cut - batch * heads] == sizes["BLOCK_M"]).all()


def test_steps_launch_their_own_files() -> None:
    """A step's own file is measured, although the stage transposes V in the background."""
    many = [cp.zeros((1, 4, 4096, 128), np.uint8)] * 3
    files = {stage.file: {launch.file for launch in stage.plan(*many)[0].launches} for stage in KERNELS.values()}
    assert fp8_stages.BACKGROUND in files.pop("16_fp8.cu")
    for file, of_launches in files.items():
        assert fp8_stages.BACKGROUND not in of_launches, file


@pytest.mark.parametrize("blocks", [3, 7])
@pytest.mark.parametrize(
    "head_dim, options",
    [
        *((80, {}), (80, {"causal": True}), (128, {"causal": True})),
        *(pytest.param(256, options, marks=pytest.mark.exhaustive) for options in ({}, {"causal": True})),
    ],
    ids=str,
)
def test_v_transposed_in_the_background(
    head_dim: int, blocks: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as after a launch that transposes V; a second call, with another V, finds its counters cleared."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: blocks)
    for module in (hopper, fp8_stages):
        monkeypatch.setattr(module, "FEWEST_KEYS", 430)
    q, k = (quantise(normal(2, n, h, head_dim)) for n, h in ((400, 6), (430, 3)))
    values = [quantise(normal(2, 430, 3, head_dim)) for _ in range(2)]
    outputs = {}
    for few in (1, 10**6):
        monkeypatch.setattr(fp8_stages, "FEWEST_TILES", few)
        forget()
        outputs[few] = [flash_attention(q, k, v, out_dtype="float32", **options) for v in values]
    forget()
    for v, background, before in zip(values, outputs[1], outputs[10**6], strict=True):
        np.testing.assert_array_equal(background, before)
        assert rms(background.swapaxes(1, 2), expected(q, k, v, **options)[0]) < ROUNDED


@pytest.mark.parametrize("blocks", [3, 7])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 10)}], ids=str)
def test_blocks_that_take_many_tiles(blocks: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers leave tiles of keys to others, and go from tile to tile. With 7 blocks, the last tiles are split."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: blocks)
    monkeypatch.setattr(hopper, "FEWEST_KEYS", 430)
    forget()
    e4m3 = [quantise(normal(1, n, h, 64)) for n, h in ((400, 4), (430, 2), (430, 2))]
    o, lse = flash_attention(*e4m3, return_lse=True, out_dtype="float32", **options)
    forget()
    want, want_lse = expected(*e4m3, **options)
    assert rms(o.swapaxes(1, 2), want) < ROUNDED
    np.testing.assert_allclose(lse, want_lse, atol=6e-2)


def test_a_stage_takes_descales() -> None:
    e4m3 = [quantise(normal(1, 2, 40, 64)) for _ in range(3)]
    descale = np.array([[2.0, 0.5]], np.float32)
    o, twice = (cp.asnumpy(LADDER["fp8"](*e4m3, **of_v)).astype(np.float32) for of_v in ({}, {"v_descale": descale}))
    np.testing.assert_allclose(twice, o * descale[..., None, None], rtol=2**-7)


def test_arrays_and_types_of_results() -> None:
    """Bytes and ml_dtypes' arrays are equivalent; the output is bfloat16, unless another type is requested."""
    e4m3 = [quantise(normal(1, 40, 2, 64)) for _ in range(3)]
    o = flash_attention(*e4m3)
    assert o.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(flash_attention(*(a.view(ml_dtypes.float8_e4m3fn) for a in e4m3)), o)
    assert flash_attention(*e4m3, out_dtype="float16").dtype == np.float16


def test_descales_of_blocks_are_refused_by_name() -> None:
    """Packed sequences and steps have one per head."""
    e4m3 = [quantise(normal(1, 40, 2, 64)) for _ in range(3)]
    blocks = np.ones((1, 2, 1), np.float32)
    cu = np.array([0, 40], np.int32)
    with pytest.raises(
        ValueError,
        match=r"q_descale is float32 .1, 2, 1.; float32 .1, 2. is needed: .*; packed sequences have none for blocks",
    ):
        flash_attention_varlen(*(a[0] for a in e4m3), cu, cu, q_descale=blocks)
    heads_first = (a[0].swapaxes(0, 1) for a in e4m3)
    with pytest.raises(ValueError, match="it has no q_descale for each block of rows"):
        FP8_CODES(*heads_first, q_descale=blocks)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"q_descale": np.ones((1, 3), np.float32)}, "q_descale is float32 .1, 3.; float32 .1, 2. is needed"),
        ({"v_descale": np.ones((1, 2), np.float64)}, "v_descale is float64 .1, 2.; float32 .1, 2. is needed"),
        (
            {"q_descale": np.ones((1, 2, 2), np.float32)},
            r"float32 \(1, 2\) is needed: one for each head of each sequence, or \(1, 2, 1\): one for each 128 rows",
        ),
        (
            {"q_descale": np.ones((1, 2, 1), np.float32), "k_descale": np.ones((1, 2), np.float32)},
            "all are for heads, or all for blocks of rows",
        ),
        ({"k_descale": 1.0}, "k_descale must be an array; got float"),
        ({"out_dtype": "float64"}, "out_dtype must be float32, float16, bfloat16 or None"),
        ({"stage": "hopper"}, "takes float16 or bfloat16, not e4m3 .in uint8."),
        ({"bias": np.zeros((40, 40), np.float32)}, "it has no bias"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    e4m3 = [quantise(normal(1, 40, 2, 64)) for _ in range(3)]
    with pytest.raises((TypeError, ValueError), match=words):
        flash_attention(*e4m3, **options)


def test_other_types_have_no_descale() -> None:
    q = normal(1, 40, 2, 64)
    with pytest.raises(ValueError, match="no q_descale"):
        flash_attention(q, q, q, q_descale=np.ones((1, 2), np.float32))


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz])
def test_other_floats_of_8_bits_are_refused(kind: Any) -> None:
    q = quantise(normal(1, 40, 2, 64)).view(kind)
    with pytest.raises(TypeError, match=f"q is {np.dtype(kind)}; of floats of 8 bits the kernels take float8_e4m3fn"):
        flash_attention(q, q, q)


@pytest.mark.parametrize("head_dim", [257, 320])
def test_a_large_head_dim_is_refused(head_dim: int) -> None:
    q = quantise(normal(1, 5, 1, head_dim))
    with pytest.raises(ValueError, match=rf"e4m3 .*fp8: head_dim = {head_dim}; this stage takes 16 to 256"):
        flash_attention(q, q, q)


@pytest.mark.parametrize(
    "capability, words",
    [
        (80, "needs compute capability 9.0 for e4m3 .in uint8.; this GPU has 8.0"),
        (89, "this GPU has 8.9"),
        (100, "is compiled for sm_90a, which only compute capability 9.0 runs; this GPU has 10.0"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"stage": "fp8"}], ids=["by itself", "by name"])
def test_other_gpus_are_refused(capability: int, words: str, options: dict[str, Any]) -> None:
    q = quantise(normal(1, 7, 1, 16))
    forget()
    with limits.pretend_gpu(limits.Limits(99 * 1024, 100, capability)), pytest.raises(ValueError, match=words):
        flash_attention(q, q, q, **options)


def test_nothing_else_takes_e4m3() -> None:
    q = quantise(normal(1, 40, 2, 64))
    lse = np.zeros((1, 2, 40), np.float32)
    with pytest.raises(TypeError, match=r"the stages of gradients take .*: helpers.attention.fp8.dequantise\(q\)"):
        flash_attention_backward(q, q, q, q, q, lse)
    with pytest.raises(ValueError, match="backward_mma cannot: it takes float16 or bfloat16, not e4m3"):
        flash_attention_backward(q, q, q, q, q, lse, stage="backward_mma")
    with pytest.raises(TypeError, match=r"q is e4m3 .in uint8.; split_kv takes float32, float16, bfloat16"):
        flash_attention_with_kvcache(q[:, :1], q, q, cache_seqlens=np.array([40], np.int32))
    shards = [cp.asarray(q)] * 2
    with pytest.raises(TypeError, match=r"uint8.*; there are float32, float16, bfloat16"):
        ring_attention(shards, shards, shards, comms=virtual_ranks(2))
    with pytest.raises(TypeError, match="stage flash_mma takes float16 or bfloat16"):
        LADDER["flash_mma"](*[q[0]] * 3)
    with pytest.raises(TypeError, match=r"q is float32; stage fp8 takes e4m3 \(in uint8\)$"):
        LADDER["fp8"](*[normal(40, 64)] * 3)


# ---- PyTorch's tensors


@pytest.fixture
def tensor() -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(quantise(normal(1, 40, 2, 64))).view(torch.float8_e4m3fn)


def test_tensors(tensor: Any) -> None:
    """The bytes of an array, and a bfloat16 tensor as result, from either entry point; packed sequences too."""
    import torch

    from helpers import torch_attention

    want = torch.from_numpy(np.asarray(flash_attention(*[tensor.view(torch.uint8).numpy()] * 3), np.float32))
    cu = torch.tensor([0, 40], dtype=torch.int32)
    with torch.autocast("cpu"):
        cast = torch_attention.flash_attention(tensor, tensor, tensor)
    packed = torch_attention.flash_attention_varlen(*[tensor[0]] * 3, cu, cu)
    for o in (flash_attention(tensor, tensor, tensor), cast, packed[None]):
        assert o.dtype == torch.bfloat16 and torch.equal(o.float(), want)
    ones = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(1, 2))
    o = torch_attention.flash_attention(tensor, tensor, tensor, **ones, out_dtype=torch.float32)
    assert o.dtype == torch.float32 and torch.allclose(o, want, atol=2e-2)


def test_tensors_are_refused_by_name(tensor: Any) -> None:
    import torch

    from helpers import torch_attention as ours

    other = tensor.view(torch.float8_e5m2)
    for call in (flash_attention, ours.flash_attention):
        with pytest.raises(TypeError, match="is float8_e5m2; of floats of 8 bits the kernels take float8_e4m3fn"):
            call(other, other, other)
        with pytest.raises(TypeError, match="k requires grad"):
            call(tensor, tensor.clone().requires_grad_(), tensor)
    with pytest.raises(NotImplementedError, match="scaled_dot_product_attention has no descales"):
        ours.scaled_dot_product_attention(tensor, tensor, tensor)
    with pytest.raises(NotImplementedError, match=r"operators for torch.compile take no 8-bit types"):
        torch.compile(ours.flash_attention, backend="eager")(tensor, tensor, tensor)
    with pytest.raises(TypeError, match=r"q_descale is for float8_e4m3fn, and q is torch.float32"):
        ours.flash_attention(*[tensor.float()] * 3, q_descale=torch.ones(1, 2))


def test_layers_of_transformers_are_refused(tensor: Any) -> None:
    pytest.importorskip("transformers")
    import torch

    from helpers.transformers_attention import attend

    q = tensor.transpose(1, 2)
    with pytest.raises(NotImplementedError, match=r"query is torch.float8_e4m3fn: course has no descales"):
        attend(torch.nn.Module(), q, q, q, None)
