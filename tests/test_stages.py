"""Every stage of the ladder against the float64 reference: sizes, head dimensions, logits, layouts, errors, speed.

A new stage adds a row to STAGES.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refused import check_refused

from helpers.attention import check, kernel, reference
from helpers.attention.ladder import FORWARD, LADDER, Stage, limits
from helpers.device import ON_GPU, cp

SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 257, 400)
HEAD_DIMS = (1, 3, 8, 32, 40, 64, 80, 128)
STEPS = (*HEAD_DIMS, 256)  # each head dimension pairs the sizes differently


@dataclass(frozen=True)
class Row:
    """The promises of a stage."""

    name: str
    head_dims: tuple[int, ...] = HEAD_DIMS  # those tested; each is a compilation
    max_head_dim: int = 128
    tolerance: float = check.TOLERANCE  # for unit-normal inputs
    other_tiles: tuple[dict[str, int], ...] = ({"BLOCK_M": 1, "BLOCK_N": 1}, {"BLOCK_M": 96, "BLOCK_N": 5})
    copy_error: float = 0  # relative error of a value with all the weight
    times_numpy: float = 100  # a launch on the CPU engine takes at most this many times as long
    times_one_line: float = 20  # the same for a compilation for the CPU engine

    @property
    def stage(self) -> Stage:
        return LADDER[self.name]


ONE_WARP = {"BLOCK_M": 16, "BLOCK_N": 8, "THREADS": 32, "THREADS_X": 8}
BY_MMA = ({"BLOCK_M": 32, "BLOCK_N": 16, "WARPS": 2}, {"BLOCK_M": 128, "BLOCK_N": 80, "WARPS": 4})
TWO_WARPS = {"BLOCK_M": 64, "BLOCK_N": 20, "THREADS": 64, "THREADS_X": 4}

STAGES = (
    Row("naive"),
    Row("tiled"),
    Row("online_softmax"),
    Row("register_tiles", (*HEAD_DIMS, 256), 256, other_tiles=(ONE_WARP, TWO_WARPS)),
    Row("heads_and_masks", (*HEAD_DIMS, 256), 256, other_tiles=(ONE_WARP, TWO_WARPS)),
    Row(
        "fp16x3",
        (8, 40, 64, 128),
        other_tiles=({"BLOCK_M": 192, "BLOCK_N": 16, "STAGES": 3}, {"BLOCK_N": 48, "PINGPONG": 0}),
        copy_error=2**-20,  # 2**-20.8 on an H200
    ),
    Row(
        "tf32",
        (8, 32, 40, 64, 80, 128, 256),
        256,
        check.TOLERANCE,
        BY_MMA,
        copy_error=2**-23,
        times_numpy=250,
        times_one_line=35,
    ),
)

every_stage = pytest.mark.parametrize("row", STAGES, ids=lambda row: row.name)


def test_every_stage_has_its_row() -> None:
    """Stages for float32; the half types are tested in test_tensor_cores.py."""
    assert [row.name for row in STAGES] == [stage.name for stage in FORWARD.values() if "float32" in stage.dtypes]


def attend(row: Row, q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """Launch once, with the output poisoned before, and copy it to the host."""
    run, o = row.stage.prepare(q, k, v, **options)
    assert isinstance(o, cp.ndarray) and o.dtype == np.float32 and o.shape == q.shape
    assert np.isnan(cp.asnumpy(o)).all()
    run()
    return cp.asnumpy(o)


@functools.lru_cache(maxsize=128)  # the stages get the same inputs
def problem(n: int, n_kv: int, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Make q, k, v and the reference's output."""
    q, k, v = check.make_inputs(n, n_kv, d, seed=n + 7 * n_kv + 11 * d)
    return q, k, v, reference.attention(q, k, v)


# ---- sizes


def pairs(head_dim: int) -> list[tuple[int, int]]:
    """Return every N and every N_kv once, paired differently for each head dimension; equal ones at 64."""
    shift = STEPS.index(head_dim) - STEPS.index(64)
    return [(n, SIZES[(i + shift) % len(SIZES)]) for i, n in enumerate(SIZES)]


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize(
    ("row", "d"), [pytest.param(row, d, id=f"{row.name}-d{d}") for row in STAGES for d in row.head_dims]
)
def test_sizes(row: Row, d: int) -> None:
    for n, n_kv in pairs(d):
        q, k, v, expected = problem(n, n_kv, d)
        check.check(f"{row.name} {n} x {n_kv}", attend(row, q, k, v), expected, tolerance=row.tolerance)


@every_stage
@pytest.mark.parametrize("blocks", ["many", "few", "lone"])
def test_sizes_around_its_own_tiles(row: Row, blocks: str) -> None:
    tuning, shared = row.stage.tuning, limits.most_shared()
    other = {"many": {}, "few": tuning.small_grid(32, shared), "lone": tuning.single_wave(32, shared)}[blocks]
    tiles = {**row.stage.defines(32), **other}
    block_m, block_n = tiles["BLOCK_M"], tiles.get("BLOCK_N", 1)
    keys = (max(block_n - 1, 1), block_n, block_n + 1, 2 * block_n)
    for i, n in enumerate((block_m - 1, block_m, block_m + 1, 2 * block_m)):
        for n_kv in (keys[i], keys[i - 1]):
            q, k, v, expected = problem(n, n_kv, 32)
            check.check(
                f"{row.name} {n} x {n_kv}", attend(row, q, k, v, sizes=tiles), expected, tolerance=row.tolerance
            )


@every_stage
@pytest.mark.parametrize("which", [0, 1])
def test_other_tile_sizes(row: Row, which: int) -> None:
    q, k, v, expected = problem(100, 33, 32)
    sizes = {name: size for name, size in row.other_tiles[which].items() if name in row.stage.defines(32)}
    check.check(row.name, attend(row, q, k, v, sizes=sizes), expected, tolerance=row.tolerance)


def test_the_tiles_of_a_launch_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 132 multiprocessors have two blocks, or one, or fewer than half of them have one."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    monkeypatch.setattr(limits, "most_shared", lambda: 227 * 1024)
    stage = LADDER["heads_and_masks"]

    def block(rows: int, heads: int, **mask: bool) -> tuple[int, int]:
        sizes = stage.defines_for(64, rows, heads, **mask)
        return sizes["BLOCK_M"], sizes["THREADS"]

    assert block(4096, 5) == (128, 128)  # 160 blocks
    assert block(16384, 1) == block(4096, 4) == (128, 256)  # 128
    assert block(8192, 1) == block(1000, 8) == (32, 128)  # 64
    assert block(8576, 1) == (128, 256)  # 67 are more than half
    assert block(16384, 1, uneven=True) == (32, 128)
    assert block(17024, 1, uneven=True) == (128, 128)  # 133


# ---- values


@pytest.mark.exhaustive(each_value=())
@every_stage
@pytest.mark.parametrize("head", [5, 8, 9, 10])
def test_real_inputs(row: Row, head: int) -> None:
    """The heads that differ most: wide, the next token, the previous one, the first token from everywhere."""
    q, k, v = check.real_inputs(head)
    check.check(row.name, attend(row, q, k, v), reference.attention(q, k, v), tolerance=row.tolerance)


def along(direction: np.ndarray, lengths: np.ndarray, seed: int) -> np.ndarray:
    """Make rows of the given lengths along one direction, with a little noise."""
    noise = np.random.default_rng(seed).standard_normal((len(lengths), len(direction)))
    return (lengths[:, None] * direction + 0.01 * noise).astype(np.float32)


def large_logits(kind: str, largest: float, n: int, n_kv: int, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make q, k, v whose scaled logits reach `largest`: all over the range, or in an order hard for a running max."""
    q, k, v = check.make_inputs(n, n_kv, d, seed=d)
    if kind == "random":
        grow = np.float32(np.sqrt(largest * np.sqrt(d) / np.abs(q @ k.T).max()))
        return q * grow, k * grow, v
    length = np.sqrt(largest * np.sqrt(d))
    direction = np.ones(d) / np.sqrt(d)
    shape = {
        "all high": np.ones(n_kv),
        "all low": -np.ones(n_kv),
        "rising": np.linspace(-1, 1, n_kv),  # each tile brings a larger maximum
        "falling": np.linspace(1, -1, n_kv),  # the first tile has it
        "alternating": np.where(np.arange(n_kv) % 2, 1.0, -1.0),
        "last": np.where(np.arange(n_kv) == n_kv - 1, 1.0, -1.0),  # all earlier weights must vanish
    }[kind]
    return along(direction, np.linspace(0.5, 1, n) * length, 1), along(direction, length * shape, 2), v


@pytest.mark.exhaustive(each_value=())
@every_stage
@pytest.mark.parametrize("largest", [10.0, 100.0, 1e3, 1e4])
@pytest.mark.parametrize("kind", ["random", "all high", "all low", "rising", "falling", "alternating", "last"])
def test_large_logits(row: Row, kind: str, largest: float) -> None:
    q, k, v = large_logits(kind, largest, 65, 127, 64)
    logits = q.astype(float) @ k.T.astype(float) / 8
    assert 0.95 * largest < np.abs(logits).max() < 1.05 * largest
    out = attend(row, q, k, v)
    check.check(row.name, out, reference.attention(q, k, v), tolerance=check.tolerance_for(q, k))


@every_stage
def test_one_key_takes_all(row: Row) -> None:
    """Logits differ by 10,000: the other weights are exactly 0, and the output is one row of v, bit for bit."""
    d = 32
    length = np.float32(np.sqrt(1e4 * np.sqrt(d)))
    order = np.random.default_rng(0).permutation(d)
    unit = length * np.eye(d, dtype=np.float32)
    v = check.make_inputs(1, d, d)[2]
    out, one = attend(row, unit, unit[order], v), v[np.argsort(order)]
    np.testing.assert_allclose(out, one, rtol=row.copy_error, atol=0)


@pytest.mark.exhaustive(each_value=())
@every_stage
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0, -0.2, 2, np.float32(0.125), np.float64(0.5), np.int64(1)], ids=repr)
def test_softmax_scale(row: Row, scale: Any) -> None:
    q, k, v = check.make_inputs(33, 65, 64)
    out = attend(row, q, k, v, softmax_scale=scale)
    expected = reference.attention(q, k, v, softmax_scale=scale)
    check.check(row.name, out, expected, tolerance=check.tolerance_for(q, k, softmax_scale=scale))


@pytest.mark.exhaustive(each_value=())
@every_stage
@pytest.mark.parametrize("of_v", [1e4, 1e30, 1e-30, 1e-34])
@pytest.mark.parametrize("of_q", [1, 1e-30])
def test_values_of_any_size(row: Row, of_q: float, of_v: float) -> None:
    """All of q are small and all of k large, so scores are as usual; all of v are small or large."""
    if ON_GPU and of_v < 1e-30:
        pytest.skip("by CuPy's -ftz=true, products with small weights count as 0 where they are below 2^-126")
    q, k, v, expected = problem(65, 127, 64)
    out = attend(row, q * np.float32(of_q), k * np.float32(1 / of_q), v * np.float32(of_v))
    check.check(row.name, (out / np.float64(of_v)).astype(np.float32), expected, tolerance=row.tolerance)


@every_stage
def test_infinities_are_not_swallowed(row: Row) -> None:
    """15 turns them into NaN."""
    q, k, v, _ = problem(65, 33, 32)
    v = v.copy()
    v[20, 3] = np.inf
    out = attend(row, q, k, v)
    assert not np.isfinite(out[:, 3]).any() and np.isfinite(np.delete(out, 3, axis=1)).all()


@every_stage
def test_nan_stays_in_its_row(row: Row) -> None:
    q, k, v, expected = problem(65, 33, 32)
    q = q.copy()
    q[7, 3] = np.nan
    out = attend(row, q, k, v)
    assert np.isnan(out[7]).all()
    rest = np.arange(len(q)) != 7
    check.check(row.name, out[rest], expected[rest], tolerance=row.tolerance)


@every_stage
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_among_the_keys_is_not_swallowed(row: Row, which: str) -> None:
    q, k, v, _ = problem(65, 33, 32)
    k, v = k.copy(), v.copy()
    {"k": k, "v": v}[which][20, 3] = np.nan
    out = attend(row, q, k, v)
    assert np.isnan(out if which == "k" else out[:, 3]).all()


@every_stage
def test_the_same_launch_gives_the_same_bits(row: Row) -> None:
    q, k, v, _ = problem(257, 127, 40)
    run, o = row.stage.prepare(q, k, v)
    run()
    first = cp.asnumpy(o).copy()
    run()
    np.testing.assert_array_equal(first, cp.asnumpy(o))
    np.testing.assert_array_equal(first, cp.asnumpy(row.stage(q, k, v)))


# ---- hypothesis


def matrices(rows: int, d: int, largest: float) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, (rows, d), elements=st.floats(-largest, largest, width=32, allow_subnormal=False))


@every_stage
@settings(max_examples=12)
@given(data=st.data())
def test_any_values(row: Row, data: st.DataObject) -> None:
    n, n_kv = data.draw(st.integers(1, 9), "N"), data.draw(st.integers(1, 40), "N_kv")
    d = data.draw(st.sampled_from([d for d in (3, 8) if d in row.head_dims]), "d")
    largest = data.draw(st.sampled_from([1.0, 8.0, 64.0]), "largest")
    q, k = data.draw(matrices(n, d, largest), "q"), data.draw(matrices(n_kv, d, largest), "k")
    v = data.draw(matrices(n_kv, d, 4.0), "v")
    try:
        tolerance = check.tolerance_for(q, k)
    except ValueError:  # float32 cannot represent a softmax of such logits
        assume(False)
    out = attend(row, q, k, v)
    check.check(row.name, out, reference.attention(q, k, v), tolerance=tolerance)
    # A weighted mean is between the smallest and the largest value.
    assert (out >= v.min(axis=0) - 1e-5).all() and (out <= v.max(axis=0) + 1e-5).all()


# ---- accepted arguments


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "Fortran order": np.asfortranarray,
    "every second row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "every second column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "backwards": lambda a: a[::-1].copy()[::-1],
    "columns of a wider array": lambda a: np.pad(a, ((0, 0), (3, 5)))[:, 3:-5],
    "every second column on the device": lambda a: cp.asarray(np.repeat(a, 2, axis=1))[:, ::2],
}


@pytest.mark.exhaustive(each_value=())
@every_stage
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_that_are_not_contiguous(row: Row, layout: str) -> None:
    q, k, v, expected = problem(65, 33, 32)
    views = [LAYOUTS[layout](a) for a in (q, k, v)]
    assert not any(view.flags.c_contiguous for view in views)
    check.check(row.name, attend(row, *views), expected, tolerance=row.tolerance)


@every_stage
def test_one_array_for_all(row: Row) -> None:
    """The same array as q, k and v; and a read-only view that repeats one row."""
    v = check.make_inputs(1, 33, 32)[2]
    check.check(row.name, attend(row, v, v, v), reference.attention(v, v, v), tolerance=row.tolerance)
    repeated = np.broadcast_to(v[:1], v.shape)
    assert not repeated.flags.writeable
    check.check(row.name, attend(row, repeated, repeated, v), reference.attention(repeated, repeated, v))


@every_stage
def test_numpy_and_device_arrays_give_the_same(row: Row) -> None:
    q, k, v, expected = problem(65, 33, 32)
    host = attend(row, q, k, v)
    device = attend(row, *(cp.asarray(a) for a in (q, k, v)))
    mixed = attend(row, cp.asarray(q), k, v)
    check.check(row.name, host, expected, tolerance=row.tolerance)
    np.testing.assert_array_equal(host, device)
    np.testing.assert_array_equal(host, mixed)


@every_stage
def test_inputs_are_left_alone(row: Row) -> None:
    inputs = [a.copy() for a in problem(65, 33, 32)[:3]]
    on_device = [cp.asarray(a) for a in inputs]
    row.stage(*on_device)
    for before, after in zip(inputs, on_device, strict=True):
        np.testing.assert_array_equal(before, cp.asnumpy(after))


@pytest.mark.exhaustive(each_value=())
@every_stage
@pytest.mark.parametrize("heads", [(1,), (3,), (1, 1), (2, 3)], ids=str)
def test_heads_and_batches(row: Row, heads: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((*heads, n, 40), dtype=np.float32) + np.float32(0.25) for n in (65, 33, 33))
    sizes = row.stage.tiles(40)  # otherwise fewer blocks would have other sizes, and sums in another order
    o = attend(row, q, k, v, sizes=sizes)
    check.check(row.name, o, reference.attention(q, k, v), tolerance=row.tolerance)
    for head in np.ndindex(heads):
        np.testing.assert_array_equal(o[head], attend(row, q[head], k[head], v[head], sizes=sizes))


@every_stage
def test_an_output_of_ones_own(row: Row) -> None:
    q, k, v, expected = problem(65, 33, 32)
    out = cp.full(q.shape, cp.nan, dtype=cp.float32)
    run, o = row.stage.prepare(q, k, v, out=out)
    run()
    assert o is out
    check.check(row.name, out, expected, tolerance=row.tolerance)
    for wrong in (out[:-1], out.astype(cp.float64), cp.asarray(np.zeros((32, 65), np.float32)).T):
        with pytest.raises(ValueError, match="out is written in place"):
            row.stage.prepare(q, k, v, out=wrong)


@every_stage
def test_why_not(row: Row) -> None:
    stage = row.stage
    assert stage.why_not(head_dim=64, dtype=stage.dtypes[0]) is None
    assert stage.why_not(head_dim=64, dtype="int8") == f"it takes {' or '.join(stage.dtypes)}, not int8"
    assert f"to {stage.max_head_dim}" in stage.why_not(head_dim=stage.max_head_dim + 1, dtype=stage.dtypes[0])
    wishes = {"causal": True, "window": (1, 2), "gqa": True, "varlen": True, "return_lse": True}
    for wish, value in wishes.items():
        feature = "lse" if wish == "return_lse" else wish
        reason = stage.why_not(head_dim=64, dtype=stage.dtypes[0], **{wish: value})
        assert (reason is None) == (feature in stage.features), reason
    if "causal" not in stage.features:
        q, k, v, _ = problem(65, 33, 32)
        with pytest.raises(ValueError, match=f"stage {row.name} cannot: it has no causal=True"):
            stage(q, k, v, causal=True)


def test_an_old_gpu_is_told_what_it_lacks() -> None:
    stage = dataclasses.replace(LADDER["naive"], min_cc=990)
    assert "it needs compute capability 99.0 for float32; this GPU has" in stage.why_not(head_dim=8)


# ---- what it refuses

TOO_LARGE = max(row.max_head_dim for row in STAGES) + 1
SWAPPED = "v of the other byte order"

# How the arrays are damaged, the error, and its message. NAME, MAX and MORE stand for the stage's own.
BAD: dict[str, tuple[Callable[[Any, Any, Any], tuple[Any, Any, Any]], type[Exception], str]] = {
    "q float64": (
        lambda q, k, v: (q.astype("float64"), k, v),
        TypeError,
        "q is float64; stage NAME takes float32: q.astype('float32')",
    ),
    "k float16": (lambda q, k, v: (q, k.astype("float16"), v), TypeError, "k is float16; stage NAME takes float32"),
    "v int32": (lambda q, k, v: (q, k, v.astype("int32")), TypeError, "v is int32; stage NAME takes float32"),
    SWAPPED: (lambda q, k, v: (q, k, v.astype(">f4")), TypeError, "v is >f4; stage NAME takes"),
    "q a list": (lambda q, k, v: (q.tolist(), k, v), TypeError, "q must be a NumPy or a device array; got list"),
    "v None": (lambda q, k, v: (q, k, None), TypeError, "v must be a NumPy or a device array; got NoneType"),
    "q of one axis": (
        lambda q, k, v: (q[0], k, v),
        ValueError,
        "q has shape (8,); a stage takes (rows, head_dim), (heads, rows, head_dim) or (batch, heads, rows, head_dim)",
    ),
    "k of three axes": (
        lambda q, k, v: (q, k[None], v),
        ValueError,
        "the axes before the rows differ: q (5, 8), k (1, 6, 8), v (6, 8)",
    ),
    "other batches": (
        lambda q, k, v: (np.stack([[q]] * 2), np.stack([[k]] * 3), np.stack([[v]] * 3)),
        ValueError,
        "the axes before the rows differ: q (2, 1, 5, 8), k (3, 1, 6, 8), v (3, 1, 6, 8)",
    ),
    "five axes": (
        lambda q, k, v: tuple(a[None, None, None] for a in (q, k, v)),
        ValueError,
        "q has shape (1, 1, 1, 5, 8); a stage takes (rows, head_dim)",
    ),
    "no head": (
        lambda q, k, v: tuple(a[None][:0] for a in (q, k, v)),
        ValueError,
        "q has shape (0, 5, 8); at least one head is needed",
    ),
    "heads that do not divide": (
        lambda q, k, v: (np.stack([q] * 3), np.stack([k] * 2), np.stack([v] * 2)),
        ValueError,
        "3 heads of q cannot share 2 heads of k and v: it must divide them",
    ),
    "v a number": (
        lambda q, k, v: (q, k, v[0, :1].reshape(())),
        ValueError,
        "v has shape (); a stage takes (rows, head_dim)",
    ),
    "no query": (lambda q, k, v: (q[:0], k, v), ValueError, "q has shape (0, 8); at least one row is needed"),
    "no key": (lambda q, k, v: (q, k[:0], v[:0]), ValueError, "k has shape (0, 8); at least one row is needed"),
    "no value": (lambda q, k, v: (q, k, v[:0]), ValueError, "v has shape (0, 8); at least one row is needed"),
    "k of another head_dim": (
        lambda q, k, v: (q, k[:, :7], v),
        ValueError,
        "head_dim differs: q (5, 8), k (6, 7), v (6, 8)",
    ),
    "v of another head_dim": (
        lambda q, k, v: (q, k, v[:, :7]),
        ValueError,
        "head_dim differs: q (5, 8), k (6, 8), v (6, 7)",
    ),
    "a key without a value": (
        lambda q, k, v: (q, k, v[:5]),
        ValueError,
        "each key needs its value: k has 6 rows, v has 5",
    ),
    "head_dim 0": (
        lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]),
        ValueError,
        "head_dim = 0; this stage takes LEAST to MAX",
    ),
    "head_dim too large": (
        lambda q, k, v: tuple(np.tile(a, (1, 200))[:, :TOO_LARGE] for a in (q, k, v)),
        ValueError,
        "head_dim = MORE; this stage takes LEAST to MAX",
    ),
}


@every_stage
@pytest.mark.parametrize("where", ["host", "device"])
def test_refused_inputs(row: Row, where: str) -> None:
    words = {"NAME": row.name, "MORE": TOO_LARGE, "LEAST": row.stage.head_dim_step, "MAX": row.max_head_dim}
    for case, (change, error, message) in BAD.items():
        if (case, where) == (SWAPPED, "device"):  # a device array has the machine's byte order
            continue
        inputs = change(*check.make_inputs(5, 6, 8))
        if where == "device":
            inputs = tuple(cp.asarray(a) if isinstance(a, np.ndarray) else a for a in inputs)
        for word, value in words.items():
            message = message.replace(word, str(value))
        check_refused(case, error, message, lambda inputs=inputs: row.stage(*inputs))


def test_refused_softmax_scale() -> None:
    inputs = check.make_inputs(5, 6, 8)
    for scale, error, message in (
        ("0.125", TypeError, "softmax_scale must be a number, or None for 1 / sqrt(head_dim); got str '0.125'"),
        ([1.0], TypeError, "softmax_scale must be a number, or None for 1 / sqrt(head_dim); got list [1.0]"),
        (True, TypeError, "got bool True"),
        (1j, TypeError, "got complex 1j"),
        (float("nan"), ValueError, "softmax_scale = nan; a finite float32 is needed"),
        (float("-inf"), ValueError, "softmax_scale = -inf; a finite float32 is needed"),
        (1e39, ValueError, "softmax_scale = 1e+39; a finite float32 is needed"),
    ):
        for row in STAGES:
            call = functools.partial(row.stage, *inputs, softmax_scale=scale)
            check_refused(f"{row.name}, {scale!r}", error, message, call)


def test_softmax_scale_is_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        LADDER["naive"](*check.make_inputs(5, 6, 8), 0.125)


# ---- speed: a guard against falling off a cliff, not a benchmark

TINY = 'extern "C" __global__ void tiny(int *a) { a[threadIdx.x] = 1; }\n'


def fastest(runs: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Return seconds of CPU time of this process and its compilers: the minimum of each, run in turns."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    best = [float("inf")] * len(runs)
    for _ in range(turns):
        for i, run in enumerate(runs):
            begin = used()
            run()
            best[i] = min(best[i], used() - begin)
    return best


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["heads_and_masks", "tf32"])  # by scalars, and by tensor cores
def test_speed_on_the_cpu_engine(
    name: str, cpu_engine: Any, monkeypatch: pytest.MonkeyPatch, record_row: Callable[..., None]
) -> None:
    """A launch against NumPy on the same inputs, a compilation against that of a one-line kernel."""
    (row,) = (row for row in STAGES if row.name == name)
    q, k, v, expected = problem(512, 512, 64)
    compiled, compile_one = [], cpu_engine.compiler._compile
    monkeypatch.setattr(cpu_engine.compiler, "_compile", lambda *how: compiled.append(how) or compile_one(*how))

    def build(code: str, *options: str) -> None:
        """Compile a text that is in no cache; what all texts share, the engine and its headers, is built before."""
        unique = f"constexpr long long BUILT_AT = {time.time_ns()};"  # a comment might not reach the cache
        cpu_engine.RawModule(code=f"{code}\n{unique}\n", options=("-std=c++17", *options)).compile()

    kernel.load(row.stage.file, row.name, defines=row.stage.defines(64))
    code, options = kernel.source(row.stage.file), kernel.options(row.stage.defines(64))
    runs = [lambda: build(code, *options), lambda: build(TINY)]
    runs[1]()
    compiled.clear()
    compile_s, tiny_s = fastest(runs, 3)  # of three: the end of an earlier build counts in the first
    assert len(compiled) == 6, "not everything was compiled"

    run, o = row.stage.prepare(q, k, v)

    def in_numpy() -> np.ndarray:
        s = q @ k.T * np.float32(0.125)
        p = np.exp(s - s.max(-1, keepdims=True))
        return p @ v / p.sum(-1, keepdims=True)

    run_s, numpy_s = fastest([run, in_numpy], 5)
    check.check(row.name, o, expected, tolerance=row.tolerance)
    figures = {"CPU ms": f"{1e3 * run_s:.1f}", "times NumPy": f"{run_s / numpy_s:.1f}"}
    figures |= {"compile CPU s": f"{compile_s:.2f}", "times one line": f"{compile_s / tiny_s:.1f}"}
    record_row("CPU engine: N = N_kv = 512, d = 64", stage=row.name, **figures)
    assert run_s < row.times_numpy * numpy_s and compile_s < row.times_one_line * tiny_s, figures
