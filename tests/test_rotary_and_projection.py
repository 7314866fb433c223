"""The rotary embedding in its own pass, and attention with output projection: values, errors, planted bugs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import needs_nvrtc
from planted import Bug

from helpers import device, engine
from helpers.attention import check, compile_report, kernel, reference, rotary_and_projection
from helpers.attention.ladder import LADDER, launches, limits
from helpers.attention.ladder.stages.tensor_cores import mma_shared_bytes, pick_projection
from helpers.attention.rotary_and_projection import (
    FORMS,
    attention_projection,
    cos_sin,
    plan_projection,
    plan_rotary,
    rotary,
)
from helpers.device import cp
from helpers.xray import Report, xray

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HALVES = ("float16", "bfloat16")
needs_tensor_cores = pytest.mark.skipif(
    LADDER["flash_mma"].why_not(head_dim=64, dtype="float16") is not None, reason="needs compute capability 8.0"
)


def normal(*shape: int, dtype: str = "float16", mean: float = 0.25) -> np.ndarray:
    """Draw normal numbers, seeded by the shape."""
    return (np.random.default_rng(shape).standard_normal(shape) + mean).astype(TYPES[dtype])


# ---- rotary embedding


def rotated(a: np.ndarray, positions: Any, rotary_dim: int, interleaved: bool) -> np.ndarray:
    """Rotate (batch, rows, heads, d) in float64, by float32 angles."""
    positions = np.broadcast_to(positions, a.shape[:2])[:, :, None]
    return reference.rotary(a, *cos_sin(64, rotary_dim), positions, interleaved=interleaved)


def check_rotary(dtype: str, d: int, rotary_dim: int, interleaved: bool, text: str | None = None) -> None:
    """Check default and given positions; two batches, fewer heads of k; awkward numbers of rows; both places."""
    cos, sin = cos_sin(64, rotary_dim)
    steps = 4 * float(ml_dtypes.finfo(TYPES[dtype]).eps)
    for n, n_kv, places in ((5, 33, None), (33, 7, "each"), (33, 7, "all"), (1, 1, None)):
        q, k = normal(2, n, 4, d, dtype=dtype), normal(2, n_kv, 2, d, dtype=dtype)
        at = np.arange(n) + n_kv - n, np.arange(n_kv)
        if places:
            shapes = ((2, n), (2, n_kv)) if places == "each" else ((n,), (n_kv,))
            at = tuple(np.random.default_rng(1).integers(0, 64, shape).astype(np.int32) for shape in shapes)
            for positions in at:
                positions[..., -1] = 63  # the last one in the tables
        planned = plan_rotary(q, k, cos, sin, interleaved=interleaved, positions=at if places else None, source=text)
        for array in planned.result:
            array[...] = device.cp.full(array.shape, np.nan, dtype=array.dtype)
        for name, a, got, positions in zip("qk", (q, k), planned(), at, strict=True):
            where = f"{name} {dtype} {n} x {n_kv}, d = {d}, {rotary_dim} rotated, interleaved = {interleaved}"
            check.check(where, got, rotated(a, positions, rotary_dim, interleaved), tolerance=steps)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_rotary(dtype: str, interleaved: bool) -> None:
    for d, rotary_dim in ((64, 64), (48, 32), (40, 16)) if dtype == "float16" else ((64, 32),):
        check_rotary(dtype, d, rotary_dim, interleaved)


def test_tables_may_have_q_s_dtype() -> None:
    q, k = normal(2, 9, 4, 64), normal(2, 9, 2, 64)
    tables = [a.astype(np.float16) for a in cos_sin(9, 64)]
    for a, b in zip(rotary(q, k, *tables), rotary(q, k, *(a.astype(np.float32) for a in tables)), strict=True):
        assert np.array_equal(cp.asnumpy(a).view(np.uint16), cp.asnumpy(b).view(np.uint16))


@needs_tensor_cores
def test_known_calls_plan_nothing() -> None:
    """Call the rotary embedding and the projection with arrays of known shapes, then of other ones."""
    w_o = weights(256, 72, "float16")

    def calls(n: int) -> None:
        q, k = normal(1, n, 4, 64), normal(1, n, 2, 64)
        for in_place in (False, True):
            rotary(cp.asarray(q), cp.asarray(k), *cos_sin(64, 64), in_place=in_place)
        for form in FORMS:
            attention_projection(q, k, k, w_o, form=form)

    calls(33)
    for n, planned, loaded in ((33, 0, 0), (34, 4, 0)):
        before = dict(kernel.COUNTS)
        calls(n)
        assert kernel.COUNTS["planned"] - before["planned"] == planned
        assert kernel.COUNTS["loaded"] - before["loaded"] == loaded


@needs_tensor_cores
def test_what_has_no_rows_or_keys_is_projected_to_zero() -> None:
    w_o = weights(256, 72, "float16")
    for batch, n, n_kv in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        k = normal(batch, n_kv, 2, 64)
        y = attention_projection(normal(batch, n, 4, 64), k, k, w_o)
        assert y.shape == (batch, n, 72) and y.dtype == np.float32 and not y.any()


def test_rotary_in_place_and_with_gaps() -> None:
    """Columns of one array (batch, rows, heads, 3 d), as written by a fused product for q, k and v."""
    qkv = normal(2, 9, 4, 3 * 48)
    there = cp.asarray(qkv)
    q, k = there[..., :48], there[..., 48:96]
    cos, sin = cos_sin(9, 32)
    got = rotary(q, k, cos, sin, in_place=True)
    assert got[0] is q and got[1] is k
    found = cp.asnumpy(there).astype(np.float64)
    exact = [rotated(qkv[..., part], np.arange(9), 32, False) for part in (slice(48), slice(48, 96))]
    check.check("in place", found[..., :96], np.concatenate(exact, axis=-1), tolerance=4e-3)
    assert np.array_equal(found[..., 96:], qkv[..., 96:].astype(np.float64))


def test_a_rotation_keeps_what_attention_sees() -> None:
    """Scores depend only on the difference of positions."""
    q, k = normal(1, 8, 2, 64, dtype="float32"), normal(1, 8, 2, 64, dtype="float32")
    cos, sin = cos_sin(64, 64)
    scores = []
    for start in (0, 40):
        at = np.arange(start, start + 8, dtype=np.int32)
        a, b = (cp.asnumpy(found)[0, :, 0] for found in rotary(q, k, cos, sin, positions=(at, at)))
        scores.append(a @ b.T)
    check.check("scores", scores[0], scores[1].astype(np.float64), tolerance=1e-4)


WRONG_ROTARY: Mapping[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"q": np.zeros((1, 4, 2, 64))}, TypeError, "k is float16 and q is float64"),
    "axes": ({"q": normal(4, 2, 64)}, ValueError, "4 axes are needed"),
    "no array": ({"q": [1.0]}, TypeError, "q must be a NumPy or a device array; got list"),
    "angles of another type": ({"cos": np.ones((9, 32))}, TypeError, "rotary_cos is float64; float16 or float32 is"),
    "two types": ({"cos": np.ones((9, 32), np.float16)}, ValueError, "one shape and one dtype for both is needed"),
    "two shapes": ({"sin": np.ones((9, 16), np.float32)}, ValueError, "one shape and one dtype for both is needed"),
    "too many columns": ({"d": 32}, ValueError, "rotary_dim from 2 to head_dim = 32"),
    "odd pairs": ({"cos": np.ones((9, 12), np.float32)}, ValueError, "rotary_dim = 24, .* is a multiple of 16"),
    "few positions": ({"k": normal(1, 12, 2, 64)}, ValueError, "rotary_cos has 9 positions, and k has 12 keys"),
    "before 0": ({"q": normal(1, 8, 2, 64)}, ValueError, r"row i would be at i \+ N_kv - N, below 0"),
    "positions": ({"positions": (np.arange(4), np.arange(5))}, TypeError, r"rotary_positions\[0\] is int64"),
    "rows": ({"positions": (np.arange(4, dtype=np.int32),) * 2}, ValueError, r"rotary_positions\[1\] has shape \(4,\)"),
    "in place": ({"in_place": True}, ValueError, "in_place: q is a device array"),
    "one position": ({"positions": (np.arange(4, dtype=np.int32),)}, TypeError, "positions must be a pair .* got 1"),
    "three": ({"positions": (np.arange(4, dtype=np.int32),) * 3}, TypeError, "positions must be a pair .* got 3"),
    "no pair": ({"positions": np.arange(4, dtype=np.int32)}, TypeError, "positions must be a pair .* got ndarray"),
    "no angles": (
        {"cos": np.ones((0, 32), np.float32), "sin": np.ones((0, 32), np.float32)},
        ValueError,
        r"rotary_cos has shape \(0, 32\)",
    ),
    "interleaved": ({"interleaved": 2}, TypeError, "interleaved must be True or False; got int 2"),
    "in place or not": ({"in_place": "no"}, TypeError, "in_place must be True or False"),
}


@pytest.mark.parametrize("name", WRONG_ROTARY)
def test_rotary_errors(name: str) -> None:
    changes, error, message = WRONG_ROTARY[name]
    given = dict(zip(("cos", "sin"), cos_sin(9, 64), strict=True))
    options = {"q": normal(1, 4, 2, 64), "k": normal(1, 5, 2, 64), **given, **changes}
    if d := options.pop("d", None):
        options.update(q=normal(1, 4, 2, d), k=normal(1, 5, 2, d))
    with pytest.raises(error, match=message):
        rotary(options.pop("q"), options.pop("k"), options.pop("cos"), options.pop("sin"), **options)


def test_in_place_takes_what_it_can_write() -> None:
    cos, sin = cos_sin(9, 64)
    q, k = (cp.asarray(a) for a in (normal(2, 4, 2, 64), normal(2, 5, 2, 64)))
    for both in ((q, q), (k[:, :4], k[:, 1:])):
        with pytest.raises(ValueError, match="q and k share memory, which would be rotated twice"):
            rotary(*both, cos, sin, in_place=True)
    shared = cp.ndarray(q.shape, q.dtype, q.data, (0, *q.strides[1:]))
    with pytest.raises(ValueError, match=r"q has shape .* and strides \(0, .* one in memory, and in_place rotates it"):
        rotary(shared, k, cos, sin, in_place=True)
    if not device.ON_GPU:  # CuPy's arrays are always writeable
        k.flags.writeable = False
        with pytest.raises(ValueError, match="k is read-only, and in_place rotates it"):
            rotary(q, k, cos, sin, in_place=True)


def test_positions_past_the_tables_are_those_of_their_ends(cpu_engine: Any) -> None:
    """Nothing is read past them, as in the fused form."""
    q, k = normal(1, 5, 2, 64), normal(1, 4, 2, 64)
    at = np.array([-3, 0, 8, 9, 2**31 - 1], np.int32), np.array([-(2**31), -1, 3, 100], np.int32)
    planned = plan_rotary(q, k, *cos_sin(9, 64), positions=at)
    assert xray(*planned.launch).findings == []
    for name, a, got, positions in zip("qk", (q, k), planned(), at, strict=True):
        check.check(name, got, rotated(a, np.clip(positions, 0, 8), 64, False), tolerance=4e-3)


@pytest.mark.parametrize("place", [None, "each", "all"])
@pytest.mark.parametrize("in_place", [False, True])
def test_rotary_of_more_batches_than_a_grid_has_room_for(
    place: str | None, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MAX_GRID_YZ", 2)
    q, k = normal(5, 7, 4, 48), normal(5, 9, 2, 48)
    shapes = {None: (), "each": ((5, 7), (5, 9)), "all": ((7,), (9,))}[place]
    at: Any = tuple(np.random.default_rng(1).integers(0, 64, shape).astype(np.int32) for shape in shapes) or None
    planned = plan_rotary(cp.asarray(q), cp.asarray(k), *cos_sin(64, 32), positions=at, in_place=in_place)
    assert [launch.grid[2] for launch in planned.compiled.launches] == [2, 2, 1]
    for name, a, got, positions in zip("qk", (q, k), planned(), at or (np.arange(7) + 2, np.arange(9)), strict=True):
        check.check(name, got, rotated(a, positions, 32, False), tolerance=4e-3)


def test_angles() -> None:
    cos, sin = cos_sin(5, 4)
    check.check("cosines", cos, np.cos(np.outer(np.arange(5), (1.0, 0.01))), tolerance=1e-7)
    check.check("sines", sin, np.sin(np.outer(np.arange(5), (1.0, 0.01))), tolerance=1e-7)
    assert cos_sin(np.int64(5), np.int32(4))[0].tolist() == cos.tolist() and cos_sin(0, 4)[0].shape == (0, 2)
    refused: list[tuple[type[Exception], str, tuple[Any, Any], dict[str, Any]]] = [
        (ValueError, "rotary_dim = 3; pairs of columns", (5, 3), {}),
        (ValueError, "rotary_dim = 0; pairs of columns", (5, 0), {}),
        (TypeError, "rotary_dim must be a whole number; got float 4.0", (5, 4.0), {}),
        (ValueError, "positions = -1; 0 or more", (-1, 4), {}),
        (TypeError, "positions must be a whole number; got float 2.5", (2.5, 4), {}),
        (ValueError, "base = 0; a number above 0", (5, 4), {"base": 0}),
        (ValueError, "base = -1; a number above 0", (5, 4), {"base": -1}),
        (ValueError, "base = nan; a finite number", (5, 4), {"base": float("nan")}),
        (TypeError, "base must be a number; got str", (5, 4), {"base": "1"}),
    ]
    for error, message, args, options in refused:
        with pytest.raises(error, match=message):
            cos_sin(*args, **options)


ROTARY_BUGS = (
    Bug("turned the other way", "x * cosine - y * sine", "x * cosine + y * sine"),
    Bug("q is turned as k", "row + params.N_kv - params.N", "row"),
    Bug("positions of the first batch", "batch * batch_positions + row", "row"),
    Bug("a pair too far", "(ROTARY_DIM / 2);", "(ROTARY_DIM / 2) + 1;", error=Exception, cpu_only=True),
    Bug(
        "k's heads counted as q's",
        "of_k ? params.kv_heads : params.heads",
        "params.heads",
        error=Exception,
        cpu_only=True,
    ),
    Bug("k's stride is q's", "of_k ? params.k : params.q,", "params.q,", error=Exception, cpu_only=True),
    Bug("the rest is not copied", "if (source == target) return;", "return;"),
    Bug("the last rows are forgotten", "head_row >= rows * heads", "head_row + 1 >= rows * heads"),
    Bug("no end", "if (head_row >= rows * heads) return;", "", error=Exception, cpu_only=True),
    Bug("all pairs of the first angle", "c[i / WIDTH][i % WIDTH]", "c[i / WIDTH][0]"),
)


def test_rotary_without_a_bug_passes() -> None:
    for interleaved in (False, True):
        check_rotary("float16", 48, 32, interleaved, kernel.source(launches.ROTARY_FILE))


@pytest.mark.parametrize("bug", ROTARY_BUGS, ids=[bug.name for bug in ROTARY_BUGS])
def test_a_bug_of_rotary_is_seen(bug: Bug, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = bug.plant(kernel.source(launches.ROTARY_FILE))
    with pytest.raises((AssertionError, engine.LaunchError, IndexError)):
        check_rotary("float16", 48, 32, False, text)


# ---- output projection


def projected(q: np.ndarray, k: np.ndarray, v: np.ndarray, w_o: np.ndarray, **options: Any) -> tuple[np.ndarray, float]:
    """Return Y in float64, and the tolerance: twice the error of NumPy attention that rounds P and O to the type."""
    wanted = check.expect(q, k, v, **options)
    exact = wanted.o.reshape(*q.shape[:-2], -1) @ w_o.astype(np.float64)
    # An error of O up to its tolerance, with random sign, moves Y by as many steps as W_O's columns are long.
    length = float(np.sqrt((w_o.astype(np.float64) ** 2).sum(axis=0)).max())
    return exact, 2 * wanted.tolerance * length


def weights(rows: int, columns: int, dtype: str) -> np.ndarray:
    return (normal(rows, columns, dtype="float32", mean=0.0) * rows**-0.5).astype(TYPES[dtype])


Shape = tuple[int, int, int, int, int, int, int]  # batch, n, n_kv, heads, kv_heads, d, columns
SHAPES: tuple[Shape, ...] = (
    (1, 1, 1, 1, 1, 64, 8),
    (2, 150, 131, 4, 2, 64, 200),
    (1, 127, 65, 3, 3, 64, 64),
    (1, 33, 70, 3, 1, 40, 104),
    (1, 130, 65, 2, 1, 128, 136),
)


def check_projection(
    form: str, dtype: str, shape: Shape, text: str | None = None, sizes: Mapping[str, int] | None = None, **options: Any
) -> None:
    batch, n, n_kv, heads, kv_heads, d, columns = shape
    q, k, v = (
        normal(batch, rows, count, d, dtype=dtype) for rows, count in ((n, heads), (n_kv, kv_heads), (n_kv, kv_heads))
    )
    v = v[::-1, ::-1].copy()  # otherwise it would be k
    w_o = weights(heads * d, columns, dtype)
    planned = plan_projection(q, k, v, w_o, form=form, source=text, sizes=sizes, **options)
    planned.result[...] = device.cp.full(planned.result.shape, cp.nan, dtype=cp.float32)
    exact, tolerance = projected(q, k, v, w_o, **options)
    for _ in range(2):  # a second launch finds the result of the first
        check.check(f"{form} {dtype} {shape} {options}", planned(), exact, tolerance=tolerance)


@pytest.mark.exhaustive(each_value=())
@needs_tensor_cores
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_projection(form: str, dtype: str) -> None:
    for shape in SHAPES if dtype == "float16" else SHAPES[1:2]:
        check_projection(form, dtype, shape)


MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (40, 9)},
    {"softmax_scale": -0.2},
    {"causal": True, "window": (30, -1), "softmax_scale": 0.3},
)


@pytest.mark.exhaustive(each_value=())
@needs_tensor_cores
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_projection_of_masked_rows(form: str, options: dict[str, Any]) -> None:
    """With more rows than keys some rows see nothing: 0."""
    for n, n_kv in ((150, 131), (200, 70)):
        check_projection(form, "float16", (2, n, n_kv, 4, 2, 64, 72), **options)


@needs_tensor_cores
@pytest.mark.parametrize("form", FORMS)
def test_projection_of_packed_sequences(form: str) -> None:
    rows, keys = (3, 130, 0, 1, 70), (20, 130, 5, 0, 70)
    cu = tuple(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (rows, keys))
    q, k = normal(sum(rows), 4, 64), normal(sum(keys), 2, 64)
    v, w_o = normal(sum(keys), 2, 64, mean=0.5), weights(256, 72, "float16")
    y = cp.asnumpy(attention_projection(q, k, v, w_o, form=form, cu_seqlens=cu, causal=True))
    for i, (first, last) in enumerate(zip(cu[0], cu[0][1:], strict=False)):
        own = slice(*cu[1][i : i + 2])
        if first == last:
            continue
        if own.start == own.stop:
            assert not y[first:last].any()
            continue
        exact, tolerance = projected(q[first:last], k[own], v[own], w_o, causal=True)
        check.check(f"{form}, sequence {i}", y[first:last], exact, tolerance=tolerance)


@needs_tensor_cores
@pytest.mark.parametrize("form", FORMS)
def test_projection_of_more_sequences_than_a_grid_has_room_for(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MAX_GRID_YZ", 4)
    check_projection(form, "float16", (5, 33, 40, 4, 2, 64, 72))
    test_projection_of_packed_sequences(form)
    cu = np.arange(10, dtype=np.int32)
    q, k = normal(9, 4, 64), normal(9, 2, 64)
    planned = plan_projection(q, k, k, weights(256, 72, "float16"), form=form, cu_seqlens=(cu, cu))
    assert [launch.grid[2] for launch in planned.compiled.launches] == [4, 4, 1]
    with pytest.raises(ValueError, match="5 heads; a launch takes 4 at most"):
        plan_projection(*(normal(1, 2, 5, 64) for _ in "qkv"), weights(320, 72, "float16"), form="atomics")


@needs_tensor_cores
@pytest.mark.parametrize("form", FORMS)
def test_projection_reads_arrays_with_gaps(form: str) -> None:
    """Columns of one array, heads before rows, and a row that does not start at a multiple of 16 bytes."""
    qkv, w_o = normal(2, 4, 70, 3 * 64), weights(256, 72, "float16")
    there = cp.asarray(qkv)
    parts = [slice(64 * i, 64 * i + 64) for i in range(3)]
    exact, tolerance = projected(*(qkv[..., part].swapaxes(1, 2) for part in parts), w_o)
    views = [there[..., part].transpose(0, 2, 1, 3) for part in parts]
    check.check("columns", attention_projection(*views, w_o, form=form), exact, tolerance=tolerance)
    odd = cp.zeros((2, 4, 70, 3 * 64 + 1), dtype=cp.float16)[..., 1:]
    odd[...] = there
    views = [odd[..., part].transpose(0, 2, 1, 3) for part in parts]
    check.check("not aligned", attention_projection(*views, w_o, form=form), exact, tolerance=tolerance)


@needs_tensor_cores
def test_projection_with_a_huge_scale() -> None:
    """One key takes all the weight, as in 07."""
    q, k = normal(1, 40, 2, 64), normal(1, 50, 2, 64)
    v, w_o = normal(1, 50, 2, 64, mean=0.5), weights(128, 64, "float16")
    for form in FORMS:
        y = attention_projection(q, k, v, w_o, form=form, softmax_scale=1e5)
        exact, _ = projected(q, k, v, w_o, softmax_scale=1e5)
        check.check(form, y, exact, tolerance=5e-3)


@needs_tensor_cores
@pytest.mark.parametrize("limit", [99, 163, 227])
def test_projection_with_the_tiles_of_other_gpus(limit: int) -> None:
    for form in FORMS:
        for d in (64, 128):
            sizes = pick_projection(d, limit * 1024)
            assert mma_shared_bytes({"HEAD_DIM": d, **sizes}) <= limit * 1024
            if sizes != pick_projection(d, limits.most_shared()):
                check_projection(form, "float16", (1, 130, 65, 2, 1, d, 136), sizes=sizes)


WRONG_PROJECTION: Mapping[str, tuple[dict[str, Any], type[Exception], str]] = {
    "form": ({"form": "fast"}, ValueError, "form is 'fast'; there are 'atomics' and 'all_heads'"),
    "float32": ({"dtype": "float32"}, TypeError, "it takes float16 or bfloat16, not float32"),
    "head_dim": ({"d": 136}, ValueError, "cannot: head_dim = 136; this stage takes 8 to 128"),
    "no multiple": ({"d": 12}, ValueError, "head_dim = 12"),
    "w_o's type": ({"w_o": np.zeros((128, 64), np.float32)}, TypeError, "w_o is float32 and q is float16"),
    "w_o's rows": ({"w_o": normal(64, 64)}, ValueError, r"w_o has shape \(64, 64\); needed is .* \(128, a multiple"),
    "w_o's columns": ({"w_o": normal(128, 60)}, ValueError, r"w_o has shape \(128, 60\)"),
    "heads": ({"kv_heads": 3}, ValueError, "kv_heads must divide heads"),
    "window": ({"window": (3,)}, TypeError, "window must be a pair"),
    "packed": ({"cu_seqlens": (np.arange(3, dtype=np.int32),) * 2}, ValueError, "3 axes are needed"),
    "causal": ({"causal": 1}, TypeError, "causal must be True or False"),
}


@needs_tensor_cores
@pytest.mark.parametrize("name", WRONG_PROJECTION)
def test_projection_errors(name: str) -> None:
    changes, error, message = WRONG_PROJECTION[name]
    options = {"d": 64, "dtype": "float16", "kv_heads": 2, **changes}
    d, dtype, kv_heads = (options.pop(key) for key in ("d", "dtype", "kv_heads"))
    q, k = normal(1, 5, 2, d, dtype=dtype), normal(1, 6, kv_heads, d, dtype=dtype)
    w_o = options.pop("w_o", weights(2 * d, 64, dtype))
    with pytest.raises(error, match=message):
        attention_projection(q, k, k, w_o, **options)


@needs_tensor_cores
def test_cu_seqlens_are_a_pair() -> None:
    q, cu = normal(5, 2, 64), np.array([0, 5], np.int32)
    for wrong, got in (((cu,), "1 of them"), ((cu,) * 3, "3 of them"), (cu, "ndarray"), (5, "int")):
        with pytest.raises(TypeError, match=rf"cu_seqlens must be a pair \(cu_seqlens_q, cu_seqlens_k\), .* got {got}"):
            attention_projection(q, q, q, weights(128, 64, "float16"), cu_seqlens=wrong)


PROJECTION_BUGS = (
    Bug(
        "W_O's rows of the next head",
        "(long long)head * HEAD_DIM * columns",
        "(long long)(head ^ 1) * HEAD_DIM * columns",
    ),
    Bug("P's sums are forgotten", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f"),
    Bug("rows that see nothing", "sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"),
    Bug("rows past the end", "if (odd ? !in_row_8 : !in_row) return;", "", error=Exception, cpu_only=True),
    Bug("columns past the end", "if (8 * n >= width) break;", "", error=Exception, cpu_only=True),
    Bug("odd lanes a row too high", "odd ? row_8 - 2 : row", "odd ? row - 2 : row"),
    Bug("the tile before the last is used", "w_lane + stage_offset", "w_lane"),
    Bug("no wait for W_O", "cp_async_wait<0>();", "", times=2, which=0, cpu_only=True),
    Bug("K of the first head", "kv_head * params.k.head", "0"),
    Bug(
        "Y's row is O's", "params.o.row, columns, q_len", "columns + 8, columns, q_len", error=Exception, cpu_only=True
    ),
)
ALL_HEADS_BUGS = (
    Bug(
        "what is past W_O's columns is read",
        "min(columns - next, HEAD_DIM)",
        "HEAD_DIM",
        error=Exception,
        cpu_only=True,
    ),
    Bug("the heads before are forgotten", "ALL_HEADS && head > 0", "false"),
    Bug("the last head is left out", "head <= last", "head < last"),
)
WITH_BUG: tuple[tuple[Shape, dict[str, Any]], ...] = (
    ((2, 150, 131, 4, 2, 64, 200), {}),
    ((1, 200, 130, 4, 2, 64, 200), {"causal": True}),
)


@pytest.mark.exhaustive(one_of_each=lambda form, bug: (form, bug.cpu_only))
@needs_tensor_cores
@pytest.mark.parametrize(
    ("form", "bug"),
    [*(("atomics", bug) for bug in PROJECTION_BUGS), *(("all_heads", bug) for bug in ALL_HEADS_BUGS)],
    ids=[bug.name for bug in (*PROJECTION_BUGS, *ALL_HEADS_BUGS)],
)
def test_a_bug_of_the_projection_is_seen(form: str, bug: Bug, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = bug.plant(kernel.source(rotary_and_projection.PROJECTION))
    with pytest.raises((AssertionError, engine.LaunchError)):
        for shape, options in WITH_BUG:
            check_projection(form, "float16", shape, text, **options)


# ---- the X-ray, and the compiler


def x_rayed(form: str, text: str | None = None, **options: Any) -> Report:
    q, k, v = (normal(2, 150, heads, 64) for heads in (4, 2, 2))
    with kernel.built_when_launched():
        planned = plan_projection(q, k, v, weights(256, 136, "float16"), form=form, source=text, **options)
    if planned.before:
        planned.before()
    return xray(*planned.launch)


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_the_xray_of_the_projection(form: str, options: dict[str, Any], cpu_engine: Any) -> None:
    report = x_rayed(form, **options)
    report.assert_clean()
    assert report.shared["dynamic shared memory"].conflicts == 0
    y, w_o = report.traffic["Y"], report.traffic["W_O"]
    of_y, of_w = 2 * 150 * 136 * 4, 256 * 136 * 2
    assert w_o.read == 2 * 2 * of_w  # two tiles of rows in each of two batches
    if form == "atomics":  # four floats each
        assert (y.read, y.written, y.atomics) == (0, 4 * of_y, 4 * of_y // 16)
    else:
        assert (y.read, y.written, y.atomics) == (3 * of_y, 4 * of_y, 0)


HAZARDS = (
    Bug("Q, K and V are replaced too early", "__syncthreads();", "", times=4, which=0),
    Bug("W_O is read too early", "__syncthreads();", "", times=4, which=1),
    Bug("the next head's Q comes too early", "if (ALL_HEADS) __syncthreads();", ""),
)


@pytest.mark.parametrize("bug", HAZARDS, ids=[bug.name for bug in HAZARDS])
def test_the_xray_finds_a_missing_barrier(bug: Bug, cpu_engine: Any) -> None:
    report = x_rayed("all_heads", bug.plant(kernel.source(rotary_and_projection.PROJECTION)))
    assert {"race", "not waited for"} & {finding.kind for finding in report.findings}


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_xray_of_rotary(interleaved: bool, in_place: bool, cpu_engine: Any) -> None:
    q, k = cpu_engine.asarray(normal(2, 33, 4, 64)), cpu_engine.asarray(normal(2, 35, 2, 64))
    angle_bytes = 2 * 2 * (33 * 4 + 35 * 2) * 32 * 4  # for each head of each batch, cosines and sines
    with kernel.built_when_launched():
        planned = plan_rotary(q, k, *cos_sin(64, 64), interleaved=interleaved, in_place=in_place)
    report = xray(*planned.launch)
    report.assert_clean()
    traffic = report.traffic.values()
    assert sum(seen.read for seen in traffic) == q.nbytes + k.nbytes + angle_bytes
    assert sum(seen.written for seen in traffic) == q.nbytes + k.nbytes
    if not in_place:  # whole sectors, each once
        assert report.traffic["Q"].sectors * 32 == report.traffic["Q_out"].sectors * 32 == q.nbytes


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiled_without_spills(arch: str) -> None:
    limit = {"sm_80": 163, "sm_90": 227}[arch] * 1024
    for d in (64, 128):
        for all_heads in (False, True):
            sizes = {"HEAD_DIM": d, **pick_projection(d, limit), "ALL_HEADS": int(all_heads)}
            report = compile_report.compile_report(
                rotary_and_projection.PROJECTION, sizes, arch, name="projection<__nv_bfloat16>"
            )
            assert report.spill_bytes == report.stack_bytes == 0, str(report)
        for interleaved in (0, 1):
            sizes = {"HEAD_DIM": d, "INTERLEAVED": interleaved}
            report = compile_report.compile_report(launches.ROTARY_FILE, sizes, arch, name="rotary<__nv_bfloat16>")
            assert report.spill_bytes == report.stack_bytes == 0 and report.registers <= 32, str(report)
