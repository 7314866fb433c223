"""Gradients of terms added to the scores: a bias in each broadcast, slopes, sinks, a table of distances.

They are compared with the float64 reference, whose gradients test_reference.py compares with finite differences.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from planted import Bug, check_all_can_be_planted

from helpers import device, engine
from helpers.attention import (
    calls,
    check,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    forget,
    kernel,
    reference,
)
from helpers.attention.ladder.call import BackwardOptions, Call
from helpers.attention.ladder.layout import Spec, dense
from helpers.attention.ladder.plan import CompiledPlan, plan_arrays
from helpers.attention.ladder.score_mod import parse_score_mod
from helpers.attention.ladder.stages import bias_gradient
from helpers.attention.score_mods import relative_bias, soft_cap
from helpers.device import cp
from helpers.xray import xray

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Two tiles of rows, three of keys; with a causal mask or a window, some tiles see nothing. A bias that batches or heads
# share is split: its sum takes a block for every four numbers, so it stays small.
BATCH, HEADS, KV_HEADS, ROWS, KEYS, HEAD_DIM = 2, 4, 2, 70, 134, 59
NAMES = ("bias", "alibi_slopes", "sinks")
# float32 sums of float32 products; in half types o, from which delta comes, is rounded as well.
RELATIVE = {"float32": check.TOLERANCE, "float16": 4e-3, "bfloat16": 3e-2}


def random(*shape: int, dtype: str = "float32", seed: int = 0, mean: float = 0.2) -> np.ndarray:
    return np.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape) + mean).astype(TYPES[dtype])


def inputs(dtype: str = "float32", n: int = ROWS, n_kv: int = KEYS, d: int = HEAD_DIM) -> list[np.ndarray]:
    """Make do, q, k and v in models' layout."""
    of_q, of_k = (BATCH, n, HEADS, d), (BATCH, n_kv, KV_HEADS, d)
    return [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate((of_q, of_q, of_k, of_k))]


SLOPES = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
SINKS = np.array([-np.inf, 0.5, 3, -2], np.float32)


def truth(arrays: list[Any], wrt: tuple[str, ...], **options: Any) -> list[np.ndarray]:
    heads_first = (np.asarray(a, np.float64).swapaxes(-3, -2) for a in arrays)
    return list(reference.attention_backward(*heads_first, wrt=wrt, **options)[3:])


def compare(name: str, got: Any, want: np.ndarray, dtype: str = "float32", *, terms: float = 1.0) -> None:
    assert got.shape == want.shape
    near = RELATIVE[dtype] * max(1.0, float(np.abs(want).max(initial=0))) * terms
    check.check(name, cp.asnumpy(got).astype(np.float64), want, tolerance=near)


def gradients_of(arrays: list[Any], wrt: tuple[str, ...], *, again: bool = False, **options: Any) -> tuple[Any, ...]:
    """Compute the gradients of `wrt`, from the forward's o and lse. again: repeat with new plans, for the same bits.

    Options that the reference lacks go to the public functions, with their dq, dk and dv.
    """
    do, *qkv = arrays
    if options.keys() <= {*NAMES, "causal", "window"}:
        wide = [np.asarray(a, np.float64).swapaxes(1, 2) for a in qkv]
        wide[1:] = (a.repeat(HEADS // KV_HEADS, 1) for a in wide[1:])
        o, lse = reference.attention(*wide, return_lse=True, **options)
        o, lse = o.swapaxes(1, 2).astype(qkv[0].dtype), lse.astype(np.float32)
        given = dict(zip(("do", "q", "k", "v", "o", "lse"), (*arrays, o, lse), strict=True))
        given |= {name: options[name] for name in NAMES if name in options}
        how = BackwardOptions(options.get("window"), options.get("causal", False))
        gradients = calls.gradients_of_extras(calls.Attention(given, how), wrt)
    else:
        forward = {name: value for name, value in options.items() if name != "score_mod_grad"}
        o, lse = flash_attention(*qkv, return_lse=True, **forward)

        def gradients() -> Any:
            return flash_attention_backward(do, *qkv, o, lse, wrt=wrt, **options)[3:]

    first = gradients()
    if again:
        forget()
        for a, b in zip(first, gradients(), strict=True):
            assert cp.asnumpy(a).tobytes() == cp.asnumpy(b).tobytes()
    return tuple(first)


# ---- a bias

MASKS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (30, 5)}]
# What a sum is over: for one number per key, per row, per score, or for all; every kind under every mask.
SHAPES: list[tuple[Any, ...]] = [
    *((4, 1, KEYS), (2, 1, 1, KEYS), (KEYS,)),
    *((2, 4, 1, 1), (4, 1, 1), ()),
    *((ROWS, 1), (2, 4, ROWS, 1), (ROWS, 1)),
    *((2, 4, ROWS, KEYS), (1, 4, ROWS, KEYS), (ROWS, KEYS), (2, 1, ROWS, KEYS)),
]


@pytest.mark.parametrize("shape, mask", [(shape, MASKS[i % 3]) for i, shape in enumerate(SHAPES)], ids=str)
def test_a_bias_of_each_broadcast(shape: tuple[int, ...], mask: dict[str, Any]) -> None:
    """With sinks, because without them a bias that is the same for all keys has no gradient; heads share keys."""
    arrays, options = inputs(), {"bias": random(*shape, seed=7), "sinks": SINKS, **mask}
    (got,) = gradients_of(arrays, ("bias",), again=True, **options)
    assert got.dtype == np.float32
    (want,) = truth(arrays, ("bias",), **options)
    assert np.abs(want).max() > 0.01
    compare("dBias", got, want)


@pytest.mark.parametrize(
    "dtype, of_bias", [("bfloat16", "float32"), ("float16", "its own"), ("bfloat16", "its own")], ids=str
)
@pytest.mark.exhaustive(one_of_each=lambda of_bias: of_bias)
def test_half_types(dtype: str, of_bias: str) -> None:
    """The gradient has the bias's type. 111 elements a row are not a multiple of what other kernels load at a time."""
    arrays = inputs(dtype, 70, 90, d=111)
    bias = random(4, 70, 90, seed=7, dtype="float32" if of_bias == "float32" else dtype)
    options = {"bias": bias, "alibi_slopes": SLOPES, "sinks": SINKS, "causal": True}
    o, lse = flash_attention(*arrays[1:], return_lse=True, **options)
    got = flash_attention_backward(*arrays, o, lse, wrt=NAMES, **options)[3:]
    assert [a.dtype for a in got] == [bias.dtype, np.float32, np.float32]
    for name, a, b in zip(NAMES, got, truth(arrays, NAMES, **options), strict=True):
        compare(f"{name}, {dtype}", a, b, dtype)


@pytest.mark.parametrize("n, n_kv", [(1, 1), (1, 200), (64, 64), (65, 1), (200, 64), (129, 191)])
@pytest.mark.exhaustive(each_value=())
def test_lengths(n: int, n_kv: int) -> None:
    arrays = inputs(n=n, n_kv=n_kv, d=16)
    for shape in ((2, 4, n, n_kv), (4, 1, n_kv)):
        options = {"bias": random(*shape, seed=7), "sinks": SINKS, "alibi_slopes": SLOPES}
        for name, a, b in zip(
            NAMES, gradients_of(arrays, NAMES, **options), truth(arrays, NAMES, **options), strict=True
        ):
            compare(f"{name} at {n}, {n_kv}", a, b)


def test_rows_and_keys_that_see_nothing_have_no_gradient() -> None:
    """More rows than keys with a causal mask; a row that the bias hides entirely; keys outside every window."""
    arrays = inputs(n=150, n_kv=70)
    bias = random(BATCH, HEADS, 150, 70, seed=7)
    bias[:, :, 100] = -np.inf
    bias[:, 1, 120:, 3] = -np.inf
    for mask in ({"causal": True}, {"window": (3, 0)}):
        (got,) = gradients_of(arrays, ("bias",), bias=bias, **mask)
        seen = reference.visible(150, 70, **mask)
        assert (got[..., ~seen] == 0).all() and (got[:, :, 100] == 0).all() and (got[:, 1, 120:, 3] == 0).all()
        (want,) = truth(arrays, ("bias",), bias=bias, **mask)
        compare(f"{mask}", got, want)


def test_what_lies_beside_the_rows_is_not_read() -> None:
    """Views of arrays that are NaN everywhere else; hidden keys may be NaN as well."""
    arrays = inputs(d=20)
    views = []
    for a in arrays:
        wide = np.full((a.shape[0], a.shape[1] + 3, a.shape[2], a.shape[3] + 7), np.nan, a.dtype)
        wide[:, 2:-1, :, 3:-4] = a
        views.append(cp.asarray(wide)[:, 2:-1, :, 3:-4])
    bias = random(4, 1, KEYS, seed=7)
    do, q, k, v = views
    o, lse = (cp.asarray(a) for a in flash_attention(*arrays[1:], bias=bias, alibi_slopes=SLOPES, return_lse=True))
    extras = {"bias": cp.asarray(bias), "alibi_slopes": cp.asarray(SLOPES)}
    names = NAMES[:2]
    got = flash_attention_backward(do, q, k, v, o, lse, wrt=names, **extras)[3:]
    for name, a, b in zip(names, got, truth(arrays, names, bias=bias, alibi_slopes=SLOPES), strict=True):
        compare(name, a, b)


def test_a_bias_in_other_strides() -> None:
    arrays = inputs(d=16)
    bias = random(BATCH, HEADS, KEYS, ROWS, seed=7).swapaxes(2, 3)
    for turned in (bias, np.broadcast_to(bias[:1, :1, :, :1], bias.shape)):
        (got,) = gradients_of(arrays, ("bias",), bias=turned)
        compare("dBias", got, truth(arrays, ("bias",), bias=turned)[0])
        assert got.flags.c_contiguous


# ---- slopes, sinks, a table of distances


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.exhaustive(each_value=())
def test_slopes_and_sinks(mask: dict[str, Any]) -> None:
    arrays = inputs()
    for slopes in (SLOPES, np.stack([SLOPES, SLOPES[::-1]])):
        options = {"alibi_slopes": slopes, "sinks": SINKS, **mask}
        names = ("sinks", "alibi_slopes")
        for name, a, b in zip(
            names, gradients_of(arrays, names, again=True, **options), truth(arrays, names, **options), strict=True
        ):
            compare(f"{name}, {mask}", a, b)
    assert cp.asnumpy(gradients_of(arrays, ("sinks",), sinks=SINKS)[0])[0] == 0  # for a sink of -inf


def table_truth(arrays: list[Any], table: np.ndarray, **options: Any) -> np.ndarray:
    n, n_kv = arrays[1].shape[-3], arrays[2].shape[-3]
    bias = reference.distance_bias(table, n, n_kv)
    (dbias,) = truth(arrays, ("bias",), bias=bias, **options)
    return reference.distance_bias_gradient(dbias, table.shape[1])


@pytest.mark.parametrize(
    "n, n_kv, reach", [(ROWS, KEYS, 20), (ROWS, KEYS, 200), (130, 64, 5), (70, 200, 64), (1, 1, 0), (64, 128, 127)]
)
@pytest.mark.exhaustive(each_value=())
def test_a_table_of_distances(n: int, n_kv: int, reach: int) -> None:
    """Distances beyond the table's ends add to its last number; also combined with other terms."""
    arrays, table = inputs(n=n, n_kv=n_kv), random(HEADS, 2 * reach + 1, seed=7)
    for more in ({}, {"causal": True}, {"window": (40, 9), "alibi_slopes": SLOPES, "sinks": SINKS}):
        again = bool(more) and n == ROWS
        (got,) = gradients_of(arrays, ("table",), again=again, **relative_bias(cp.asarray(table)), **more)
        compare(f"{more}", got, table_truth(arrays, table, **more))


def test_a_table_that_reaches_everywhere_is_read_within_its_ends() -> None:
    """The text has no range checks, because of `longest`; tiles along a diagonal begin before the first key."""
    arrays, table = inputs(n=100, n_kv=80, d=16), random(HEADS, 2 * 110 + 1, seed=7)
    (got,) = gradients_of(arrays, ("table",), **relative_bias(cp.asarray(table), longest=100))
    compare("dTable", got, table_truth(arrays, table))


def test_a_soft_cap_before_a_bias_does_not_change_its_gradient_by_a_factor() -> None:
    """A term added after a function of scores has the gradient before that function's derivative."""
    arrays, cap, bias = inputs(d=16), 1.5, random(KEYS, seed=7)
    (got,) = gradients_of(arrays, ("bias",), bias=bias, **soft_cap(cap))
    do, q, k, v = (np.asarray(a, np.float64).swapaxes(1, 2) for a in arrays)
    k, v = (np.repeat(a, 2, axis=1) for a in (k, v))
    y = cap * np.tanh(q @ k.swapaxes(2, 3) / 4 / cap) + bias
    p = np.exp(y) / np.exp(y).sum(-1, keepdims=True)
    dp = do @ v.swapaxes(2, 3)
    compare("dBias", got, (p * (dp - (p * dp).sum(-1, keepdims=True))).sum((0, 1, 2)))


def test_a_mask_of_the_caller() -> None:
    arrays, bias = inputs(d=16), random(HEADS, 1, KEYS, seed=7)
    options = {"bias": bias, "mask_mod": "(q_idx + kv_idx + head) % 3 != 0"}
    (got,) = gradients_of(arrays, ("bias",), **options)
    head, row, key = np.ogrid[:HEADS, :ROWS, :KEYS]
    seen = (row + KEYS - ROWS + key + head) % 3 != 0
    (want,) = truth(arrays, ("bias",), bias=np.where(seen, bias, -np.inf))
    compare("dBias", got, want.sum(axis=1, keepdims=True))


# ---- packed sequences

CU_Q, CU_K = np.array([0, 70, 70, 83, 150], np.int32), np.array([0, 40, 60, 171, 171], np.int32)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.exhaustive(each_value=())
def test_packed_lengths(mask: dict[str, Any]) -> None:
    """One sequence has no rows, one no keys, one more rows than keys: each must equal a call of its own."""
    do, q, k, v = (a[0] for a in inputs(n=150, n_kv=171, d=20))
    table = random(HEADS, 61, seed=7)
    of_all = {"alibi_slopes": SLOPES, "sinks": SINKS, **mask}
    kinds = {"alibi_slopes": of_all, "sinks": of_all, "table": {**of_all, **relative_bias(cp.asarray(table))}}
    each = np.stack([SLOPES, SLOPES[::-1], SLOPES, SLOPES])
    kinds |= {"slopes of sequences": {**of_all, "alibi_slopes": each}}
    for name, options in kinds.items():
        wrt = "alibi_slopes" if name.startswith("slopes") else name
        forward = {key: value for key, value in options.items() if key != "score_mod_grad"}
        o, lse = flash_attention_varlen(q, k, v, CU_Q, CU_K, return_lse=True, **forward)
        args = do, q, k, v, o, lse, CU_Q, CU_K
        got = flash_attention_varlen_backward(*args, wrt=[wrt], **options)[3]
        again = flash_attention_varlen_backward(*args, wrt=[wrt], **options)[3]
        assert cp.asnumpy(got).tobytes() == cp.asnumpy(again).tobytes()
        want = np.zeros(got.shape)
        for i in range(len(CU_Q) - 1):
            rows, keys = slice(*CU_Q[i : i + 2]), slice(*CU_K[i : i + 2])
            if rows.start == rows.stop or keys.start == keys.stop:
                continue
            own = [a[None, part] for a, part in zip((do, q, k, v), (rows, rows, keys, keys), strict=True)]
            more = {**of_all, "alibi_slopes": each[i] if name.startswith("slopes") else SLOPES}
            if name == "table":
                want += table_truth(own, table, **more)
            elif name.startswith("slopes"):
                want[i] = truth(own, (wrt,), **more)[0]
            else:
                want += truth(own, (wrt,), **more)[0]
        compare(f"{name}, {mask}", got, want)


def test_without_a_row_or_a_key() -> None:
    do, q, k, v = (a[:, :0] for a in inputs(d=16))
    o, lse = flash_attention(q, k, v, return_lse=True)
    bias = np.zeros((HEADS, 1, 1), np.float32)
    assert (flash_attention_backward(do, q, k, v, o, lse, bias=bias, wrt=["bias"])[3] == np.zeros((4, 1, 1))).all()


# ---- how blocks divide the work


def test_memory_stays_bounded() -> None:
    """There are partial sums for MOST_BLOCKS tiles at most, and none for a bias of full size."""
    for n, shape in (
        (4096, (1, 16, 1, 4096)),
        (4096, (1, 1, 4096, 4096)),
        (16384, (1, 16, 1, 1)),
        (512, (1, 16, 512, 512)),
    ):
        ready = planned("bias", n=n, bias_shape=shape)
        partial = ready.scratch.get("partial")
        assert partial is None or partial.size * 4 <= bias_gradient.MOST_BLOCKS * bias_gradient.BLOCK**2 * 4
        assert ready.launches[1].grid[0] <= max(bias_gradient.MOST_BLOCKS, (n // 64) ** 2)
    assert "partial" not in planned("bias", n=512, bias_shape=(4, 16, 512, 512)).scratch


def planned(wrt: str, *, n: int, bias_shape: tuple[int, ...]) -> Any:
    """Return the plan of a call without reading its arrays."""
    rows = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (4, 16, n, 64), (0, 0, 0, 4))
    number = np.zeros(1, np.float32)
    arrays = dict.fromkeys(("do", "q", "k", "v", "o"), rows)
    arrays["lse"] = np.lib.stride_tricks.as_strided(number, (4, 16, n), (0, 0, 0))
    arrays["bias"] = np.lib.stride_tricks.as_strided(number, bias_shape, (0,) * 4)
    specs = {name: Spec(a.shape, a.strides, a.dtype) for name, a in arrays.items()} | {
        "dbias": dense(bias_shape, np.float32)
    }
    call = Call.of(specs, BackwardOptions().checked(64))
    stage = bias_gradient.BIAS_GRADIENT
    return CompiledPlan(stage, call, stage.sizes_for(call))


def test_launches_without_checks_find_partial_sums_where_there_are_some(
    cpu_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 a long call, which has none, shares its kernel with a short one: each has its own addresses."""
    seen: list[list[int]] = []

    def launch_kernel(function: int, *rest: Any) -> None:
        args = ready.launches[len(seen)].args
        pointers = np.frombuffer(ctypes.string_at(rest[8], 8 * len(args)), np.int64)
        seen.append([int(np.frombuffer(ctypes.string_at(int(each), 8), np.int64)[0]) for each in pointers])

    driver = SimpleNamespace(cuda=SimpleNamespace(driver=SimpleNamespace(launchKernel=launch_kernel)))
    known: dict[Any, Any] = {}
    for n in (256, 2112, 256):
        ready = planned("bias", n=n, bias_shape=(1, 16, n, n))
        assert ("partial" in ready.scratch) == (n == 256)
        function = SimpleNamespace(kernel=SimpleNamespace(ptr=0))
        ready.kernels = {launch.kernel: SimpleNamespace(function=function) for launch in ready.launches}
        ready.arguments = known
        names = ("do", "q", "k", "v", "o", "lse", "bias", "dbias", *ready.scratch)
        places = {name: 1000 + i for i, name in enumerate(names)}
        with monkeypatch.context() as patched:
            patched.setattr(device, "cp", driver)
            direct = ready.direct(names)
        seen.clear()
        for launch in direct:
            launch([*places.values()], 0)
        for launch, got in zip(ready.launches, seen, strict=True):
            assert got[: len(launch.args)] == [
                places[arg] if isinstance(arg, str) else at for arg, at in zip(launch.args, got, strict=True)
            ]


# ---- the X-ray, and planted bugs


def launches_of(wrt: str, arrays: list[Any], source: str | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return (launches with their kernels and arguments, the function that launches, the array that they write)."""
    names = ("score_mod", "mask_mod", "mod_args", "score_mod_grad")
    mod, of_mod = parse_score_mod(*(options.get(name) for name in names), backward=True)
    do, q, k, v = arrays
    forward = {name: value for name, value in options.items() if name != "score_mod_grad"}
    o, lse = flash_attention(q, k, v, return_lse=True, **forward)
    given = {"do": do, "q": q, "k": k, "v": v, "o": o}
    given = {name: device.cp.asarray(a).swapaxes(1, 2) for name, a in given.items()}
    given |= {
        "lse": device.cp.asarray(lse),
        **{name: device.cp.asarray(options[name]) for name in NAMES if name in options},
    }
    given |= {name: device.cp.asarray(a) for name, a in of_mod.items()}
    like = options["mod_args"]["table"] if wrt == "table" else options[wrt]
    result = given["d" + wrt] = device.cp.full(like.shape, device.cp.nan, dtype=like.dtype)
    if wrt == "bias":
        given["dbias"] = result.reshape((1,) * (4 - result.ndim) + result.shape)
    if wrt == "alibi_slopes":
        given["dalibi_slopes"] = result.reshape((1,) * (2 - result.ndim) + result.shape)
    how = BackwardOptions(options.get("window"), options.get("causal", False), mod=mod).checked(q.shape[-1])
    ready, ready_arrays = plan_arrays(bias_gradient.stage_of(q.dtype.name, wrt), given, {}, how, None, source=source)
    every = {
        name: device.cp.full(spec.shape, device.cp.nan, spec.dtype) for name, spec in ready.scratch.items()
    } | ready_arrays
    return ready.resolve_arguments(every), ready.bind(every), result


def of_form(form: str, dtype: str = "float32") -> tuple[str, list[Any], dict[str, Any]]:
    """Return a call of each form: sizes that tiles do not divide, several steps per block."""
    arrays = inputs(dtype, d=24)
    bias = {"keys": (HEADS, 1, KEYS), "rows": (ROWS, 1), "all": (HEADS, 1, 1), "full": (HEADS, ROWS, KEYS)}
    if form in bias:
        return "bias", arrays, {"bias": random(*bias[form], seed=7), "sinks": SINKS, "window": (70, 20)}
    if form == "table":
        return "table", arrays, {**relative_bias(random(HEADS, 51, seed=7)), "causal": True}
    return form, arrays, {"alibi_slopes": SLOPES, "sinks": SINKS, "causal": True}


FORMS = ("keys", "rows", "all", "full", "table", "alibi_slopes", "sinks")


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each block several tiles of scores."""
    monkeypatch.setattr(bias_gradient, "MOST_BLOCKS", 24)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.exhaustive(one_of_each=lambda form, dtype: (form in ("keys", "table"), dtype))
def test_it_is_right_and_the_x_ray_finds_nothing(form: str, dtype: str, few_blocks: None) -> None:
    wrt, arrays, options = of_form(form, dtype)
    launches, launch, result = launches_of(wrt, arrays, **options)
    for each, compiled, args in launches:
        report = xray(compiled, each.grid, each.block, args, each.shared_bytes)
        report.assert_clean()
    launch()
    compare(form, result, expected(form, dtype), dtype)


def expected(form: str, dtype: str) -> np.ndarray:
    wrt, arrays, options = of_form(form, dtype)
    if wrt == "table":
        return table_truth(arrays, options["mod_args"]["table"], causal=True)
    return truth(arrays, (wrt,), **options)[0]


WITHIN = "key >= max(row + tile.window_lo, 0)"
BUGS: tuple[tuple[str, Bug], ...] = (
    ("keys", Bug("another head's rows", "d_o =\n        dO + sequence * params.d_o.batch", "d_o =\n        dO")),
    ("keys", Bug("delta is forgotten", "(dp[i][j] - row_delta)", "dp[i][j]")),
    ("keys", Bug("the window's left side", WITHIN, "key >= 0")),
    ("keys", Bug("the window's right side", "min(row + tile.window_hi, tile.kv_len - 1)", "(tile.kv_len - 1)")),
    ("keys", Bug("a tile too few", "first_key <= last_row + window_hi", "first_key <= first_row + window_hi")),
    (
        "keys",
        Bug(
            "one split is left out",
            "for (int split = lane; split < params.splits;",
            "for (int split = lane + 1; split < params.splits;",
        ),
    ),
    ("keys", Bug("rows are not added", "? sums[i][n] : sums[n][i]", "? sums[i][n] : (n == 0 ? sums[n][i] : 0.0f)")),
    ("rows", Bug("keys and rows exchanged", "sum += bias.sum_keys ? sums[i][n] : sums[n][i]", "sum += sums[n][i]")),
    ("all", Bug("one row alone", "for (int n = 0; i == 0 && n < BLOCK; ++n)", "for (int n = 0; i == 0 && n < 1; ++n)")),
    ("all", Bug("heads that are one step too many", "begin / key_steps / row_steps / head_steps", "0")),
    ("full", Bug("rows past the end", "row < params.rows && key", "key", error=Exception, cpu_only=True)),
    ("table", Bug("the other diagonal", "if (above % BLOCK != 0)", "if (false)")),
    ("table", Bug("the ends", "column == 0 ? least :", "")),
    (
        "table",
        Bug("a diagonal off", "(bias.tile - params.key_tiles) * BLOCK", "(bias.tile - params.key_tiles + 1) * BLOCK"),
    ),
    ("table", Bug("signs", "sums[r][r + i - BLOCK]", "sums[r + i - BLOCK][r]")),
    ("alibi_slopes", Bug("positive distances", "? -fabsf(", "? fabsf(")),
    ("alibi_slopes", Bug("positions are not shifted", "-fabsf(row + tile.shift - key)", "-fabsf(row - key)")),
    ("sinks", Bug("the sign", "sum -= exp2f", "sum += exp2f")),
    ("sinks", Bug("one batch", "batch < batches", "batch < 1")),
)


# The same bugs on tensor cores, where a tile has 64 or 128 rows and keys.
SCORES, GRADIENTS = (f"{name}(next, new_rows, new_keys)" for name in ("load_scores", "load_gradients"))
BUGS_MMA: tuple[tuple[str, Bug], ...] = (
    ("keys", Bug("delta is forgotten", "= minus_delta;", "= 0.0f;")),
    ("keys", Bug("no mask", "if (MASK_MOD || tile.first_key", "if (false) if (MASK_MOD || tile.first_key")),
    ("keys", Bug("Q of the tile before", SCORES, SCORES.replace("new_rows", "false"))),
    ("full", Bug("K of the tile before", SCORES, SCORES.replace("new_keys", "false"))),
    ("rows", Bug("V of the tile before", GRADIENTS, GRADIENTS.replace("new_keys", "false"))),
    ("keys", Bug("dO of the tile before", GRADIENTS, GRADIENTS.replace("new_rows", "false"))),
    ("full", Bug("rows of another sequence stay", "|| next.sequence != tile.sequence;", ";")),
    ("keys", Bug("rows and keys exchanged", "S, Q_smem + rows_lane, K_smem", "S, K_smem + rows_lane, Q_smem")),
    ("alibi_slopes", Bug("positive distances", "p *= -fabsf(", "p *= fabsf(")),
)
ALL_BUGS = [("float32", *each) for each in BUGS] + [("float16", *each) for each in BUGS_MMA]


@pytest.mark.parametrize(
    "dtype, form, bug", ALL_BUGS, ids=[f"{dtype} {form}: {bug.name}" for dtype, form, bug in ALL_BUGS]
)
@pytest.mark.exhaustive(one_of_each=lambda dtype, form: (dtype, form))
def test_a_bug_is_seen(dtype: str, form: str, bug: Bug, few_blocks: None, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    wrt, arrays, options = of_form(form, dtype)
    text = bug.plant(kernel.source(bias_gradient.stage_of(dtype, form).file))
    with pytest.raises((check.CheckFailed, engine.LaunchError, IndexError, AssertionError)):
        _, launch, result = launches_of(wrt, arrays, text, **options)
        launch()
        compare(form, result, expected(form, dtype), dtype)


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted(
        (kernel.source(bias_gradient.stage_of(dtype, form).file), bug) for dtype, form, bug in ALL_BUGS
    )


BARRIERS = (
    ("float32", "keys", "columns, lse and delta could be overwritten"),
    ("float32", "keys", "columns could be read before"),
    ("float32", "keys", "columns could be overwritten while another"),
    ("float32", "keys", "sums could be read before another thread has written its part"),
    ("float32", "all", "row 0 could be overwritten"),
    ("float32", "all", "the sums of rows could be read before"),
    ("float32", "sinks", "sums could be read before another thread has written them"),
    ("float16", "keys", "Q, K, lse or delta could be read before"),
    ("float16", "keys", "Q and K could be overwritten"),
    ("float16", "keys", "dO and V could be read before"),
    ("float16", "keys", "dO, V, lse or delta could be overwritten"),
)


def test_every_barrier_is_left_out_once() -> None:
    """For the tensor-core kernel these are its own file's barriers; the header's are left out in the other kernel."""
    for dtype, file in (("float32", "11_bias_gradient.cu"), ("float16", "11_bias_gradient_mma.cu")):
        of_header = kernel.source("bias_gradient.cuh").count("__syncthreads();  // hazard: ")
        count = kernel.source(file).count("__syncthreads();  // hazard: ") - (of_header if dtype == "float16" else 0)
        # The last barrier on tensor cores follows another one after the last read: no checked run needs it.
        assert count == sum(each[0] == dtype for each in BARRIERS) + (dtype == "float16")


@pytest.mark.parametrize("dtype, form, words", BARRIERS)
@pytest.mark.exhaustive(one_of_each=lambda dtype, form: (dtype, form))
def test_the_x_ray_sees_a_barrier_that_is_left_out(
    dtype: str, form: str, words: str, few_blocks: None, cpu_engine: None
) -> None:
    lines = kernel.source(bias_gradient.stage_of(dtype, form).file).split("\n")
    (line,) = (line for line in lines if f"__syncthreads();  // hazard: {words}" in line)
    wrt, arrays, options = of_form(form, dtype)
    launches, *_ = launches_of(wrt, arrays, "\n".join(other for other in lines if other is not line), **options)
    reports = [xray(compiled, each.grid, each.block, args, each.shared_bytes) for each, compiled, args in launches[1:]]
    kinds = {finding.kind for report in reports for finding in report.findings}
    assert kinds & {"race", "not waited for"}, "\n".join(map(str, reports))


# ---- what it refuses

BOOL = np.ones((ROWS, KEYS), bool)
TABLE = np.zeros((HEADS, 5), np.float32)
REFUSED: Mapping[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no bias": (ValueError, r"wrt has 'bias', and the call has no bias=", {"wrt": ["bias"]}),
    "a mask": (TypeError, "wrt has 'bias', which is bool: a mask has no gradient", {"wrt": ["bias"], "bias": BOOL}),
    "another name": (
        ValueError,
        r"wrt has 'softmax_scale'; gradients are those of bias, alibi",
        {"wrt": ["softmax_scale"]},
    ),
    "twice": (ValueError, "wrt has a name twice", {"wrt": ["sinks", "sinks"], "sinks": SINKS}),
    "a string": (
        TypeError,
        r"wrt must be a sequence of names, such as \['bias'\]; got 'sinks'",
        {"wrt": "sinks", "sinks": SINKS},
    ),
    "no table": (
        ValueError,
        "wrt has 'table', and the call has no score_mods.relative_bias",
        {
            "wrt": ["table"],
            "score_mod": "score + table[kv_idx]",
            "score_mod_grad": "1",
            "mod_args": {"table": np.zeros(KEYS, np.float32)},
        },
    ),
    "a table of more heads": (
        ValueError,
        "table has 5 heads, and q 4",
        {"wrt": ["table"], **relative_bias(np.zeros((HEADS + 1, 5), np.float32))},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_says_what_is_wrong(case: str) -> None:
    error, message, options = REFUSED[case]
    do, q, k, v = inputs(d=8)
    lse = np.zeros((BATCH, HEADS, ROWS), np.float32)
    with pytest.raises(error, match=message):
        flash_attention_backward(do, q, k, v, q, lse, **options)
