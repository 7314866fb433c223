"""Calls with bias, ALiBi and rotary embedding. Values, broadcasting, errors, the X-ray, bugs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from backends import needs_nvrtc
from planted import Bug, check_all_can_be_planted

from helpers import engine
from helpers.attention import check, compile_report, flash_attention, flash_attention_varlen, kernel
from helpers.attention.ladder import LADDER, limits
from helpers.attention.ladder.steps import ROTATION_IN_LOAD
from helpers.device import cp
from helpers.lesson.shortcuts import xray_stage
from helpers.xray import xray

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STAGE_OF = {"float32": "heads_and_masks", "float16": "flash_mma", "bfloat16": "hopper"}
every_type = pytest.mark.parametrize("dtype", TYPES)
BATCH, HEADS, KV_HEADS, ROWS, KEYS, HEAD_DIM = 2, 4, 2, 150, 171, 32
POSITIONS = 200


@pytest.fixture(autouse=True)
def _where_the_stage_runs(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    dtype = callspec.params.get("dtype", "float32") if callspec else "float32"
    if reason := LADDER[STAGE_OF[dtype]].why_not(head_dim=HEAD_DIM, dtype=dtype):
        pytest.skip(reason)


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.25).astype(TYPES[dtype])


def inputs(dtype: str, n: int = ROWS, n_kv: int = KEYS, d: int = HEAD_DIM) -> list[np.ndarray]:
    """Make q, k and v, heads first."""
    shapes = (BATCH, HEADS, n, d), (BATCH, KV_HEADS, n_kv, d), (BATCH, KV_HEADS, n_kv, d)
    return [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def padded(a: np.ndarray) -> Any:
    """Copy the same values to the device, in rows that start at multiples of 16 bytes."""
    wide = np.zeros((*a.shape[:-1], -(-a.shape[-1] // 16) * 16), a.dtype)
    wide[..., : a.shape[-1]] = a
    return cp.asarray(wide)[..., : a.shape[-1]]


def tables(rotary_dim: int, dtype: str = "float32", positions: int = POSITIONS) -> dict[str, np.ndarray]:
    angles = np.arange(positions)[:, None] * 1000.0 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
    return {"rotary_cos": np.cos(angles).astype(TYPES[dtype]), "rotary_sin": np.sin(angles).astype(TYPES[dtype])}


def places(*lead: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return tuple(rng.integers(0, POSITIONS, (*lead, rows), dtype=np.int32) for rows in (ROWS, KEYS))


SLOPES = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
SEEN = np.random.default_rng(5).random((BATCH, HEADS, ROWS, KEYS)) < 0.5


def cases(dtype: str) -> dict[str, dict[str, Any]]:
    """Return options by name; bias in each of its forms and layouts."""
    bias = 2 * random(BATCH, HEADS, ROWS, KEYS, dtype=dtype, seed=7)
    hidden = bias[:, :1].copy()
    hidden[..., 5:40, :] = -np.inf
    hidden[..., 3::7] = -np.inf
    step = np.where(np.arange(KEYS) < 100, -3e4, 0).astype(np.float32)  # the maximum rises sharply, late
    return {
        "plain": {},
        "bias": {"bias": padded(bias)},
        "bias, causal": {"bias": padded(bias[:1]), "causal": True},
        "bias, window": {"bias": padded(bias[0]), "window": (39, 11)},
        "bias, odd rows": {"bias": bias},
        "bias, transposed": {"bias": np.ascontiguousarray(bias[0, 0].T).T},
        "bias of heads": {"bias": padded(bias[:1, :, :1])},
        "bias of keys": {"bias": bias[1, 1, 1]},
        "bias of rows": {"bias": bias[:, :1, :, :1]},
        "float32": {"bias": padded(bias.astype(np.float32))},
        "float32, odd rows": {"bias": bias[0, :1].astype(np.float32)},
        "a bias of one number": {"bias": np.full((), 2.5, np.float32)},
        "hidden": {"bias": padded(hidden)},
        "rising": {"bias": step},
        "falling": {"bias": step[::-1].copy()},
        "large": {"bias": padded(1000 * bias.astype(np.float32))},
        "bool": {"bias": padded(SEEN)},
        "bool, odd rows": {"bias": SEEN[0], "causal": True},
        "bool of keys": {"bias": SEEN[:, :1, :1]},
        "alibi": {"alibi_slopes": SLOPES},
        "alibi, causal": {"alibi_slopes": SLOPES, "causal": True},
        "alibi, window": {"alibi_slopes": SLOPES, "window": (40, 60)},
        "alibi of batches": {"alibi_slopes": np.stack([SLOPES, SLOPES[::-1]])},
        "alibi and bool": {"alibi_slopes": SLOPES, "bias": SEEN[0, 0]},
        "alibi and bias": {"alibi_slopes": SLOPES, "bias": padded(bias)},
        "rotary": tables(HEAD_DIM),
        "rotary, causal": {**tables(HEAD_DIM, dtype), "causal": True},
        "rotary, interleaved": {**tables(HEAD_DIM), "rotary_interleaved": True},
        "rotary of a part": tables(16, dtype),
        "rotary of a part, interleaved": {**tables(16, dtype), "rotary_interleaved": True, "causal": True},
        "rotary at positions": {**tables(HEAD_DIM), "rotary_positions": places()},
        "rotary at positions of batches": {**tables(HEAD_DIM), "rotary_positions": places(BATCH)},
        "rotary, a scale below 0": {**tables(HEAD_DIM), "softmax_scale": -0.2},
        "all": {
            **tables(HEAD_DIM, dtype),
            "rotary_positions": places(BATCH),
            "bias": padded(bias[:1]),
            "alibi_slopes": SLOPES,
            "causal": True,
        },
    }


def compare(dtype: str, got: tuple[Any, Any], want: check.Expected, *, rotated: bool = False) -> None:
    """Compare output and lse. If q and k are rounded after a rotation, float32 may round some of them the other way."""
    more = {"float32": 0.0, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype] if rotated else 0.0
    oracle.check_output(STAGE_OF[dtype], got, want, more=more)


def run(
    dtype: str, options: Mapping[str, Any], text: str | None = None, arrays: list[np.ndarray] | None = None
) -> None:
    """Run a call with another text of the kernel, and check it."""
    q, k, v = arrays or inputs(dtype)
    stage = LADDER[STAGE_OF[dtype]] if text is None else ROTATION_IN_LOAD
    launch, got = stage.prepare(q, k, v, source=text, return_lse=True, **options)
    launch()
    compare(dtype, got, oracle.expected(q, k, v, **options), rotated="rotary_cos" in options)


# ---- values


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("name", cases("float32"))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_options(dtype: str, name: str) -> None:
    """Two batches of four query heads and two KV heads; tails of rows and of keys."""
    run(dtype, cases(dtype)[name])


@pytest.mark.parametrize("name", ["bias", "rotary, interleaved", "all"])
def test_bfloat16(name: str) -> None:
    run("bfloat16", cases("bfloat16")[name])


@pytest.mark.parametrize(("dtype", "d", "rotary_dim"), [("float32", 12, 8), ("float16", 72, 64)])
def test_head_dims(dtype: str, d: int, rotary_dim: int) -> None:
    q, k, v = inputs(dtype, 33, 65, d)
    for interleaved in (False, True):
        bias = padded(random(33, 65, dtype=dtype))
        options = {**tables(rotary_dim), "rotary_interleaved": interleaved, "bias": bias, "alibi_slopes": SLOPES}
        run(dtype, options, arrays=[q, k, v])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sizes(dtype: str) -> None:
    """One row, one key, rows that see nothing; if rows outnumber keys, positions are given."""
    for n, n_kv in ((1, 1), (1, 70), (70, 1), (64, 64), (129, 65), (40, 257)):
        q, k, v = inputs(dtype, n, n_kv)
        bias = padded(random(n, n_kv, dtype=dtype))
        at = np.arange(n, dtype=np.int32) % POSITIONS, np.arange(n_kv, dtype=np.int32) % POSITIONS
        for causal in (False, True):
            options = {"bias": bias, "alibi_slopes": SLOPES, "causal": causal}
            run(dtype, {**options, **tables(HEAD_DIM), "rotary_positions": at}, arrays=[q, k, v])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-3, 1025.0])
def test_scales(dtype: str, scale: float) -> None:
    """From 1025 on the half types round scores and maxima in the same way."""
    q, k, v = (np.round(4 * a).astype(a.dtype) for a in inputs(dtype))  # their products are exact
    for options in ({"bias": padded(random(ROWS, KEYS, dtype=dtype))}, {"alibi_slopes": SLOPES}):
        run(dtype, {**options, "softmax_scale": scale}, arrays=[q, k, v])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_row_whose_biases_are_all_far_below(dtype: str) -> None:
    """With -1e9 everywhere the weights are finite, and a row is a mean. -3.4e38, as in PyTorch's masks, hides keys."""
    q, k, v = inputs(dtype, 40, 70)
    zeros = np.zeros_like(q)
    for far in (-65504.0, -1e9, -1e30):
        bias = np.full((40, 70), far, np.float32)
        launch, got = LADDER[STAGE_OF[dtype]].prepare(zeros, k, v, bias=bias, return_lse=True)
        launch()
        mean = v.astype(np.float64).mean(axis=2, keepdims=True).repeat(2, 1)
        check.check(f"{far}", got[0], np.broadcast_to(mean, q.shape), tolerance=1e-5 if dtype == "float32" else 0.02)
    if dtype == "bfloat16":  # maxima are rounded up in q's type, so some such rows are 0
        for far in (-1e9, -1e30):
            o = LADDER["flash_mma"](zeros, k, v, bias=np.full((40, 70), far, q.dtype))
            rows = cp.asnumpy(o).astype(np.float64)
            assert not rows.any() or np.abs(rows - mean).max() < 0.02, far
    bias = np.full((40, 70), np.finfo(np.float32).min, np.float32)
    bias[:20, 3] = 0
    launch, (o, lse) = LADDER[STAGE_OF[dtype]].prepare(q, k, v, bias=bias, return_lse=True)
    launch()
    o, lse = cp.asnumpy(o).astype(np.float64), cp.asnumpy(lse)
    assert not o[:, :, 20:].any() and np.isneginf(lse[:, :, 20:]).all()
    only = v[:, :, 3:4].astype(np.float64).repeat(2, 1)
    check.check("one key", o[:, :, :20], np.broadcast_to(only, o[:, :, :20].shape), tolerance=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_maxima_a_last_bit_apart(dtype: str) -> None:
    """Around -1.4e8, in units of log2, floats are 16 apart: a later maximum may be worth 2^16 more, and no less."""
    q, k, v = inputs(dtype, 64, 150)
    for lowest in (1, 4, 7):
        bias = np.full((64, 150), -1e8 + 8 * lowest, np.float32)
        bias[:, 140:] += 8
        options = {"bias": bias, "softmax_scale": 1.0}
        launch, (o, _) = LADDER[STAGE_OF[dtype]].prepare(np.zeros_like(q), k, v, return_lse=True, **options)
        launch()
        later = v[:, :, 140:].astype(np.float64).mean(axis=2, keepdims=True).repeat(2, 1)
        check.check("the later keys", o, np.broadcast_to(later, q.shape), tolerance=0.05)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_largest_bias_of_float16(dtype: str) -> None:
    bias = np.where(np.random.default_rng(0).random((ROWS, KEYS)) < 0.5, -65504, 65504).astype(TYPES[dtype])
    q, k, v = inputs(dtype)
    q[...] = 0  # next to such numbers, scores vanish in float32
    run(dtype, {"bias": padded(bias)}, arrays=[q, k, v])


# ---- as models call it


def heads_last(*arrays: np.ndarray) -> list[Any]:
    return [cp.asarray(np.ascontiguousarray(a.swapaxes(1, 2))) for a in arrays]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_stage_that_can_gets_them(dtype: str) -> None:
    """None has its own stage; a rotation is a launch before it."""
    names: list[str] = []
    q, k, v = heads_last(*inputs(dtype))
    with kernel.launches_replaced(lambda self, *_, **__: names.append(self.name.partition("<")[0])):
        for name in ("bias", "bool", "alibi", "rotary"):
            flash_attention(q, k, v, **cases(dtype)[name])
    assert names == [*[STAGE_OF[dtype]] * 3, "rotary", STAGE_OF[dtype]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_calls_made_again(dtype: str) -> None:
    """New values at other addresses; other forms; and checks that run only once."""
    before = kernel.COUNTS["planned"]
    for seed in range(3):
        q, k, v = (random(*a.shape, dtype=dtype, seed=10 * seed + i) for i, a in enumerate(inputs(dtype)))
        options = dict(cases(dtype)["all"])
        options["alibi_slopes"] = SLOPES * (seed + 1)
        wide = random(HEADS, ROWS, 176, dtype=dtype, seed=seed)
        on_device = {
            name: tuple(map(cp.asarray, a)) if isinstance(a, tuple) else cp.asarray(a) if hasattr(a, "shape") else a
            for name, a in options.items()
        }
        options["bias"], on_device["bias"] = wide[..., :KEYS], cp.asarray(wide)[..., :KEYS]
        o, lse = flash_attention(*heads_last(q, k, v), return_lse=True, **on_device)
        compare(dtype, (cp.asnumpy(o).swapaxes(1, 2), lse), oracle.expected(q, k, v, **options), rotated=True)
    assert kernel.COUNTS["planned"] == before + 1
    on_device["rotary_interleaved"] = True
    o = flash_attention(*heads_last(q, k, v), **on_device)
    want = oracle.expected(q, k, v, **options, rotary_interleaved=True)
    compare(dtype, (cp.asnumpy(o).swapaxes(1, 2), want.lse.astype(np.float32)), want, rotated=True)
    assert kernel.COUNTS["planned"] == before + 2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("given", [False, True])
def test_packed_lengths(dtype: str, given: bool) -> None:
    """ALiBi and rotary positions are relative to each sequence."""
    rows, keys = (3, 70, 0, 64, 1), (100, 70, 5, 80, 70)
    cu = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (rows, keys)]
    q = random(sum(rows), HEADS, HEAD_DIM, dtype=dtype)
    k, v = (random(sum(keys), KV_HEADS, HEAD_DIM, dtype=dtype, seed=i) for i in (1, 2))
    slopes = np.stack([SLOPES * (i + 1) for i in range(len(rows))])
    rng = np.random.default_rng(1)
    at = tuple(rng.integers(0, POSITIONS, sum(lengths), dtype=np.int32) for lengths in (rows, keys))
    options = {
        **tables(HEAD_DIM),
        "alibi_slopes": slopes,
        "causal": True,
        **({"rotary_positions": at} if given else {}),
    }
    o, lse = flash_attention_varlen(q, k, v, *cu, return_lse=True, **options)
    for i in range(len(rows)):
        own, its = (slice(ends[i], ends[i + 1]) for ends in cu)
        if rows[i]:
            one = [a[part].swapaxes(0, 1)[None] for a, part in ((q, own), (k, its), (v, its))]
            options["alibi_slopes"] = slopes[i]
            if given:
                options["rotary_positions"] = at[0][own], at[1][its]
            want = oracle.expected(*one, **options)
            compare(dtype, (o[own].swapaxes(0, 1)[None], lse[None, :, own]), want, rotated=True)


def test_arrays_of_numpy() -> None:
    q, k, v = (np.ascontiguousarray(a.swapaxes(1, 2)) for a in inputs("float32"))
    options = cases("float32")["all"]
    o = flash_attention(q, k, v, **options)
    assert type(o) is np.ndarray
    options = {name: cp.asnumpy(a) if isinstance(a, cp.ndarray) else a for name, a in options.items()}
    check.check("NumPy", o, check.expect(q, k, v, **options).o)


# ---- what it refuses

REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "bias of another shape": (
        ValueError,
        r"bias has shape \(150, 3\); \(batch, heads, N, N_kv\) = \(2, 4, 150, 171\)",
        {"bias": np.zeros((150, 3), np.float32)},
    ),
    "five axes": (ValueError, "leading axes may be left out", {"bias": np.zeros((1, 1, 1, 150, 171), np.float32)}),
    "bias of float64": (
        TypeError,
        r"bias is float64; float32 \(added.*bias.astype\('float32'\)",
        {"bias": np.zeros((150, 171))},
    ),
    "no array": (TypeError, "bias must be an array; got float 1.0", {"bias": 1.0}),
    "slopes of another shape": (
        ValueError,
        r"alibi_slopes has shape \(3,\); \(4,\) or \(2, 4\) is needed",
        {"alibi_slopes": np.ones(3, np.float32)},
    ),
    "slopes of float16": (
        TypeError,
        "alibi_slopes is float16; float32 is needed",
        {"alibi_slopes": np.ones(4, np.float16)},
    ),
    "cos alone": (ValueError, "rotary_cos is given without rotary_sin", {"rotary_cos": np.ones((200, 4), np.float32)}),
    "sin alone": (ValueError, "rotary_sin is given without rotary_cos", {"rotary_sin": np.ones((200, 4), np.float32)}),
    "two shapes": (
        ValueError,
        "one shape and one dtype for both",
        {"rotary_cos": np.ones((200, 4), np.float32), "rotary_sin": np.ones((200, 8), np.float32)},
    ),
    "too wide": (ValueError, "rotary_dim from 2 to head_dim = 32", tables(40)),
    "too short": (
        ValueError,
        r"rotary_cos has 170 positions, and k has 171 keys: longer tables",
        tables(32, positions=170),
    ),
    "tables of float64": (
        TypeError,
        "rotary_cos is float64; float32 is needed",
        {name: a.astype(np.float64) for name, a in tables(32).items()},
    ),
    "no tables": (ValueError, "rotary_positions is given without rotary_cos", {"rotary_positions": places()}),
    "interleaved alone": (ValueError, "rotary_interleaved is given without rotary_cos", {"rotary_interleaved": True}),
    "interleaved=1": (
        TypeError,
        "rotary_interleaved must be True or False; got int 1",
        {**tables(32), "rotary_interleaved": 1},
    ),
    "one of positions": (
        TypeError,
        r"rotary_positions must be a pair \(q_positions, k_positions\)",
        {**tables(32), "rotary_positions": places()[0]},
    ),
    "positions and None": (TypeError, "an array and a None", {**tables(32), "rotary_positions": (places()[0], None)}),
    "positions of int64": (
        TypeError,
        r"rotary_positions\[1\] is int64; int32 is needed",
        {**tables(32), "rotary_positions": (places()[0], places()[1].astype(np.int64))},
    ),
    "positions of another shape": (
        ValueError,
        r"rotary_positions\[0\] has shape \(171,\); \(150,\) or \(2, 150\) is needed",
        {**tables(32), "rotary_positions": places()[::-1]},
    ),
    "positions beyond": (
        ValueError,
        r"rotary_positions\[0\] has positions from \d+ to 9\d\d, and rotary_cos has 200",
        {**tables(32), "rotary_positions": (places()[0] + 800, places()[1])},
    ),
    "positions below 0": (
        ValueError,
        "has positions from -",
        {**tables(32), "rotary_positions": (places()[0], places()[1] - 100)},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_is_wrong(name: str) -> None:
    error, message, options = REFUSED[name]
    q, k, v = (a.swapaxes(1, 2) for a in inputs("float32"))
    with pytest.raises(error, match=message):
        flash_attention(q, k, v, **options)


def test_more_that_is_refused() -> None:
    q, k, v = (a.swapaxes(1, 2) for a in inputs("float32"))
    cu = np.array([0, ROWS], np.int32), np.array([0, KEYS], np.int32)
    with pytest.raises(ValueError, match=r"bias: sequences that are packed have no common \(N, N_kv\)"):
        flash_attention_varlen(q[0], k[0], v[0], *cu, bias=SEEN)
    with pytest.raises(ValueError, match=r"rotary_cos has 100 positions, and the longest sequence has 171 keys"):
        flash_attention_varlen(q[0], k[0], v[0], *cu, **tables(32, positions=100))
    with pytest.raises(ValueError, match=r"N = 171 rows and N_kv = 150 keys: row i would be at i \+ N_kv - N"):
        flash_attention(k[:, :, :1], q[:, :, :1], q[:, :, :1], **tables(32))
    half = [a.astype(np.float16) for a in (q, k, v)]
    with pytest.raises(
        ValueError, match="rotary_dim = 24, and head_dim = 32; in float16 rotary_dim is a multiple of 16"
    ):
        flash_attention(*half, **tables(24))
    for options in ({"bias": SEEN}, {"alibi_slopes": SLOPES}):
        with pytest.raises(
            ValueError, match=f"stage flash_wmma cannot: it has no {next(iter(options))}. Stages that can: "
        ):
            flash_attention(*half, **options, stage=6)
    with pytest.raises(TypeError, match="bias is bfloat16; float16 or float32"):
        flash_attention(*half, bias=np.zeros((1, KEYS), ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="stage flash_mma got an unexpected keyword argument 'slopes'"):
        LADDER["flash_mma"](*inputs("float32"), slopes=SLOPES)


# ---- what it is compiled with


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_rotation_compiles_without_spills(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiles of an H200, in bfloat16."""
    monkeypatch.setattr(limits, "most_shared", lambda: 227 * 1024)
    sizes = ROTATION_IN_LOAD.defines(head_dim)
    name = ROTATION_IN_LOAD.kernel_name("bfloat16")
    report = compile_report.compile_report(ROTATION_IN_LOAD.file, sizes, "sm_90", name=name)
    assert (report.spill_bytes, report.stack_bytes) == (0, 0), str(report)


# ---- the X-ray


def of_one_head(dtype: str, name: str) -> tuple[Any, ...]:
    """Return q, k, v for `look`, and a case's options, all for its last head, which ends its memory."""
    options = dict(cases(dtype)[name])
    if "bias" in options:
        options["bias"] = options["bias"][(-1,) * (options["bias"].ndim - 2)]
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"][:1]
    if "rotary_positions" in options:
        options["rotary_positions"] = places()
    return *(a[:1, :1].swapaxes(1, 2) for a in inputs(dtype)), options


CLEAN = [
    *(("float32", name) for name in ("bias, odd rows", "alibi")),
    *(("float16", name) for name in ("bias", "bias, odd rows", "float32", "bool", "alibi, causal")),
]


@pytest.mark.parametrize(("dtype", "name"), CLEAN)
def test_the_x_ray_finds_nothing(dtype: str, name: str) -> None:
    """One head of two tiles of rows: no race, no unwritten element, nothing out of bounds."""
    q, k, v, options = of_one_head(dtype, name)
    report = xray_stage(STAGE_OF[dtype], q, k, v, **options)
    assert not report.findings, str(report)


# ---- planted bugs


def changed(name: str, old: str, new: str, inputs: str, **more: Any) -> Bug:
    return Bug(name, old, new, inputs=inputs, **more)


BUGS = (
    changed("rotated the other way", "a.x * c[0] - b.x * s[0]", "a.x * c[0] + b.x * s[0]", "rotary"),
    changed("the second half of the row", "pair + PAIRS", "pair", "rotary"),
    changed("the first angles for all", "rotary_cos + pos * (ROTARY_DIM / 2) + 8 * pair", "rotary_cos", "rotary"),
    changed("rows of the first warp", "STEP + threadIdx.x / 32 * OF_WARP", "STEP", "rotary"),
    changed("rows from the top left", "q_positions, first_pos,", "q_positions, first_row,", "rotary"),
    changed("positions of the first tile", "k_positions + first", "k_positions", "rotary at positions"),
    changed(
        "positions of the first batch",
        "block.sequence * rotation.k_positions_batch",
        "0",
        "rotary at positions of batches",
    ),
    changed("the first half of K_smem", "(K_smem - Q_smem) + stage_offset", "(K_smem - Q_smem)", "rotary"),
)


def test_rotation_in_the_load() -> None:
    for name in ("rotary", "rotary at positions of batches", "rotary, a scale below 0"):
        run("float16", cases("float16")[name], kernel.source(ROTATION_IN_LOAD.file))


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.inputs)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_seen(bug: Bug, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = bug.plant(kernel.source(ROTATION_IN_LOAD.file))
    with pytest.raises(bug.error):
        run("float16", cases("float16")[bug.inputs], text)


# What values alone do not show reliably: reads out of bounds, races, addresses that a GPU refuses.
UNDER_X_RAYS = (
    changed(
        "Q is rotated before its copies have arrived",
        "    cp_async_wait<0>();\n    __syncwarp();",
        "",
        "rotary",
        times=2,
    ),
    changed("no barrier after the rotation", "    __syncthreads();", "", "rotary"),
    changed(
        "positions past the tables",
        "min(max(positions ? positions[r] : first_pos + r, 0), params.positions - 1)",
        "positions[r] + 500",
        "rotary at positions",
    ),
)


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source(ROTATION_IN_LOAD.file), bug) for bug in (*BUGS, *UNDER_X_RAYS))


@pytest.mark.parametrize("bug", UNDER_X_RAYS, ids=lambda bug: bug.name)
def test_the_x_ray_finds(bug: Bug) -> None:
    q, k, v, options = of_one_head("float16", bug.inputs)
    heads_first = [a.swapaxes(1, 2) for a in (q, k, v)]
    ready, arrays, _ = ROTATION_IN_LOAD.plan(
        *heads_first, source=bug.plant(kernel.source(ROTATION_IN_LOAD.file)), **options
    )
    ((launch, compiled, args),) = ready.resolve_arguments(arrays)
    try:
        report = xray(compiled, launch.grid, launch.block, args, shared_mem=launch.shared_bytes)
    except engine.LaunchError:
        return
    assert report.findings
