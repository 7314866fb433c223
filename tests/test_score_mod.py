"""Functions of scores: values and gradients against float64, lists of tiles, the X-ray, messages, planted bugs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import oracle
import pytest
from backends import needs_nvrtc
from planted import ALL, Bug, check_all_can_be_planted

from helpers.attention import (
    check,
    compile_report,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    kernel,
    make_block_mask,
)
from helpers.attention.ladder import BACKWARD, LADDER, backward, launches, score_mod
from helpers.attention.score_mods import relative_bias, soft_cap
from helpers.bench.frozen import machine_code
from helpers.device import ON_GPU, cp
from helpers.engine import LaunchError
from helpers.engine.cuda_source.source import line_table
from helpers.lesson.shortcuts import xray_stage
from helpers.xray import xray

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STAGE_OF = {"float32": "heads_and_masks", "float16": "flash_mma", "bfloat16": "hopper"}
OTHERS = "tf32", "fp16x3"  # these take float32 as well
BACKWARD_OF = {"float32": "backward", "float16": "backward_mma", "bfloat16": "hopper_backward"}
SIZES = {  # small ones, so that a few rows and keys are several tiles
    "heads_and_masks": {"BLOCK_M": 64, "BLOCK_N": 32},
    "tf32": {"BLOCK_M": 32, "BLOCK_N": 32, "WARPS": 2, "MIN_BLOCKS": 1},
    "fp16x3": {"BLOCK_M": 128, "BLOCK_N": 48},
    "flash_mma": {"BLOCK_M": 64, "BLOCK_N": 32},
    "hopper": {"BLOCK_M": 128, "BLOCK_N": 48},
    "backward": {"BLOCK_N": 64},
    "backward_mma": {"BLOCK_N": 64},
    "hopper_backward": {"BLOCK_M": 64},
    "hopper_backward_wide": {},
}
BATCH, HEADS, KV_HEADS, ROWS, KEYS, HEAD_DIM = 2, 4, 2, 150, 172, 32
every_type = pytest.mark.parametrize("dtype", TYPES)


@pytest.fixture(autouse=True)
def _where_the_stage_runs(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    dtype = callspec.params.get("dtype", "float32") if callspec else "float32"
    if reason := LADDER[STAGE_OF[dtype]].why_not(head_dim=HEAD_DIM, dtype=dtype):
        pytest.skip(reason)


# ---- options, and the same in NumPy


class Case(NamedTuple):
    """Options of a call, and score_mod, its derivative and mask_mod in NumPy.

    score(s, x), slope(s, y, x) and seen(x): x has batch, head, kv_head, i, j, q_len and kv_len, arrays of four axes.
    """

    options: Mapping[str, Any]
    score: Callable[..., Any] = lambda s, x: s
    slope: Callable[..., Any] = lambda s, y, x: 1.0
    seen: Callable[..., Any] = lambda x: True


class Truth(NamedTuple):
    """The results in float64. tolerance: for o from a kernel that rounds P and O to q's type; gradients: dq, dk, dv."""

    o: np.ndarray
    lse: np.ndarray
    tolerance: float
    gradients: tuple[np.ndarray, ...]


def truth(q: Any, k: Any, v: Any, case: Case, *, do: Any = None, first_batch: int = 0) -> Truth:
    """Compute attention of arrays (batch, heads, N, d). first_batch: the number of the first sequence."""
    dtype, group, options = q.dtype, q.shape[1] // k.shape[1], case.options
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    (batch, heads, n, d), n_kv = q.shape, k.shape[2]
    scale = options.get("softmax_scale", d**-0.5)
    index = np.ogrid[first_batch : first_batch + batch, :heads, n_kv - n : n_kv, :n_kv]
    named = dict(zip(("batch", "head", "i", "j"), index, strict=True))
    x = SimpleNamespace(**named, kv_head=index[1] // group, q_len=n, kv_len=n_kv)
    s = scale * q @ k.swapaxes(-1, -2)
    y = np.broadcast_to(case.score(s, x), s.shape).astype(np.float64)
    slope = case.slope(s, y, x)
    if (bias := options.get("bias")) is not None:
        bias = cp.asnumpy(bias) if isinstance(bias, cp.ndarray) else bias
        y = np.where(bias, y, -np.inf) if bias.dtype == np.bool_ else y + bias.astype(np.float64)
    if (slopes := options.get("alibi_slopes")) is not None:
        y = y - np.asarray(slopes, np.float64)[..., None, None] * abs(x.i - x.j)
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("causal") else right
    seen = case.seen(x) & ((left < 0) | (x.j >= x.i - left)) & ((right < 0) | (x.j <= x.i + right))
    y = np.where(seen, y, -np.inf)
    sinks = np.asarray(options.get("sinks", np.full(heads, -np.inf)), np.float64)[:, None, None]
    largest = np.maximum(y.max(-1, keepdims=True, initial=-np.inf), sinks)
    largest = np.where(np.isfinite(largest), largest, 0)
    p = np.exp(y - largest)
    total = p.sum(-1, keepdims=True) + np.exp(sinks - largest)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    rounded = (p.astype(dtype).astype(np.float64) @ v / np.where(total > 0, total, 1)).astype(dtype)
    p /= np.where(total > 0, total, 1)
    o = p @ v
    step = float(ml_dtypes.finfo(dtype).eps) * np.abs(o).max(initial=0)
    large = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    tolerance = max(2 * float(np.abs(rounded - o).max(initial=0)), step, 1e-5, 8 * float(np.spacing(np.float32(large))))
    gradients: tuple[np.ndarray, ...] = ()
    if do is not None:
        do = do.astype(np.float64)
        ds = np.where(p > 0, p * (do @ v.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True)) * slope, 0)
        dk, dv = scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
        dk, dv = (a.reshape(batch, -1, group, n_kv, d).sum(2) for a in (dk, dv))
        gradients = scale * ds @ k, dk, dv
    return Truth(o, lse, tolerance, gradients)


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.25).astype(TYPES[dtype])


def inputs(dtype: str, n: int = ROWS, n_kv: int = KEYS) -> list[np.ndarray]:
    """Make q, k and v, heads first."""
    shapes = (BATCH, HEADS, n, HEAD_DIM), (BATCH, KV_HEADS, n_kv, HEAD_DIM), (BATCH, KV_HEADS, n_kv, HEAD_DIM)
    return [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def run(
    dtype: str, case: Case, *, stage: str = "", n: int = ROWS, n_kv: int = KEYS, plant: Callable[[str], str] = str
) -> None:
    """Call a stage with small tiles, and check it; without a name, each stage for the type. plant: edits its text."""
    q, k, v = inputs(dtype, n, n_kv)
    want = truth(q, k, v, case)
    others = OTHERS if dtype == "float32" and plant is str else ()
    here = [name for name in others if LADDER[name].why_not(head_dim=HEAD_DIM) is None]
    for name in (stage,) if stage else (STAGE_OF[dtype], *here):
        source = plant(kernel.source(LADDER[name].file))
        how = {"sizes": SIZES[name], "return_lse": True, "source": source}
        launch, got = LADDER[name].prepare(q, k, v, **how, **case.options)
        launch()
        oracle.check_output(name, got, want)


SLOPES = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
GAIN = random(HEADS, KEYS, seed=3)
PLACES = np.random.default_rng(4).integers(0, 3, (BATCH, KEYS)).astype(np.int16)
SEEN = np.random.default_rng(5).random((BATCH, HEADS, ROWS, KEYS)) < 0.5

EVERY_NAME = Case(
    {
        "score_mod": "score * gain[head * kv_len + kv_idx] + (head - 2 * kv_head) * 0.25f "
        "- distance * float(by) / q_len + batch",
        "mod_args": {"gain": GAIN, "by": np.float16(4)},
    },
    lambda s, x: s * GAIN[x.head, x.j] + (x.head - 2 * x.kv_head) / 4 - (x.i - x.j) * 4 / x.q_len + x.batch,
)
PREFIX = Case({"mask_mod": "kv_idx < 20 || q_idx >= kv_idx"}, seen=lambda x: (x.j < 20) | (x.i >= x.j))
# Full, partial and empty tiles, which differ between heads and batches.
OF_HEADS = Case(
    {"mask_mod": "(kv_idx / 40 + head + kv_head + batch + q_idx / 70) % 3 != step", "mod_args": {"step": 1}},
    seen=lambda x: (x.j // 40 + x.head + x.kv_head + x.batch + x.i // 70) % 3 != 1,
)
OF_PLACES = Case(
    {"mask_mod": "place[batch * kv_len + q_idx] == place[batch * kv_len + kv_idx]", "mod_args": {"place": PLACES}},
    seen=lambda x: PLACES[x.batch, x.i] == PLACES[x.batch, x.j],
)
FEW_ROWS = Case({"mask_mod": "q_idx % 3 == 0 && kv_idx < 100"}, seen=lambda x: (x.i % 3 == 0) & (x.j < 100))
NOTHING = Case({"mask_mod": "false"}, seen=lambda x: np.False_)


def with_options(case: Case, **more: Any) -> Case:
    """Return a case with more options."""
    return case._replace(options={**case.options, **more})


def both(score: Case, mask: Case, **more: Any) -> Case:
    """Combine the score_mod of one and the mask_mod of the other."""
    args = {**score.options.get("mod_args", {}), **mask.options.get("mod_args", {})}
    options = {**score.options, **mask.options, **more, **({"mod_args": args} if args else {})}
    return Case(options, score.score, score.slope, mask.seen)


CASES = {
    "score_mod": EVERY_NAME,
    "score_mod, window": with_options(EVERY_NAME, window=(50, 20)),
    "mask_mod": PREFIX,
    "mask of heads": OF_HEADS,
    "mask of heads, causal": with_options(OF_HEADS, causal=True),
    "mask of heads, window": with_options(OF_HEADS, window=(40, 30)),
    "mask of an array": OF_PLACES,
    "both": both(EVERY_NAME, OF_HEADS),
    "both, causal": both(EVERY_NAME, OF_HEADS, causal=True),
    "rows that see nothing": FEW_ROWS,
    "nothing is seen": NOTHING,
    "a scale below 0": both(EVERY_NAME, OF_HEADS, softmax_scale=-0.3),
    "a scale of 0": both(EVERY_NAME, OF_HEADS, softmax_scale=0.0),
    "mask, a scale of 0": with_options(OF_HEADS, softmax_scale=0.0),
    "scores of 10,000": Case({"score_mod": "rintf(score) * 2048"}, lambda s, x: np.rint(np.float32(s)) * 2048),
    "soft cap": Case(soft_cap(2), lambda s, x: 2 * np.tanh(s / 2)),
    "sinks": Case({"sinks": np.array([-np.inf, 0.5, 3, 1e4], np.float32)}),
    "sinks, rows that see nothing": with_options(FEW_ROWS, sinks=np.array([-np.inf, -2, 3, 1e4], np.float32)),
    "sinks, large scores": Case(
        {"score_mod": "score + 10000", "sinks": np.array([-1e4, 9999, 1e4, 1e5], np.float32)}, lambda s, x: s + 1e4
    ),
}


def padded(a: np.ndarray) -> Any:
    """Copy the same values to the device, in rows that start at multiples of 16 bytes."""
    wide = np.zeros((*a.shape[:-1], -(-a.shape[-1] // 16) * 16), a.dtype)
    wide[..., : a.shape[-1]] = a
    return cp.asarray(wide)[..., : a.shape[-1]]


def of_arrays(dtype: str) -> dict[str, Case]:
    """Return bias whose neighbours may or may not be loaded together; test_fused.py tests bias and ALiBi alone."""
    bias = 2 * random(BATCH, HEADS, ROWS, KEYS, dtype=dtype, seed=7)
    hidden = bias[:, :1].copy()
    hidden[..., 5:40, :] = -np.inf
    hidden[..., 3::7] = -np.inf
    wide = random(ROWS, KEYS + 1, dtype=dtype, seed=8)
    every = both(EVERY_NAME, OF_HEADS, bias=padded(bias[:1]), alibi_slopes=SLOPES, sinks=SLOPES, causal=True)
    return {
        "bias": Case({"bias": padded(bias)}),
        "bias, a window from odd keys": Case({"bias": padded(bias), "window": (39, 11)}),
        "bias, rows of an odd length": Case({"bias": wide[:, :-1]}),
        "bias from an odd column": Case({"bias": cp.asarray(wide)[:, 1:]}),
        "bias of float32": Case({"bias": bias.astype(np.float32)}),
        "bias of -inf": Case({"bias": padded(hidden)}),
        "bool": Case({"bias": padded(SEEN)}),
        "bool, soft cap": Case({"bias": SEEN[0, 0], **soft_cap(2)}, lambda s, x: 2 * np.tanh(s / 2)),
        "alibi, window": Case({"alibi_slopes": SLOPES, "window": (40, 60)}),
        "all together": every,
    }


# ---- values


# Every case meets the stage with the simplest text; other stages meet the cases that their own code can get wrong:
# masks and windows, maxima, rows that see nothing. An expression becomes the same text in all.
IN_EACH_STAGE = ("score_mod, window", "mask of heads, window", "both, causal", "nothing is seen", "scores of 10,000")
IN_EACH_STAGE += tuple(name for name in CASES if "sink" in name or "scale" in name)
EACH_STAGE = [*(("float32", stage) for stage in OTHERS), ("float16", "flash_mma"), ("bfloat16", "hopper")]
VALUES = [
    *(("float32", STAGE_OF["float32"], name) for name in CASES),
    *((dtype, stage, name) for dtype, stage in EACH_STAGE for name in IN_EACH_STAGE),
]
# The fast run has every case with the stage with the simplest text, and these cases with each stage.
WITH_EACH_STAGE = "both, causal", "sinks, rows that see nothing", "all together"


def runs(stage: str, dtype: str) -> None:
    """Skip where the stage does not run on this device."""
    if reason := LADDER[stage].why_not(head_dim=HEAD_DIM, dtype=dtype):
        pytest.skip(reason)


@pytest.mark.exhaustive(one_of_each=lambda stage, name: (name, stage if name in WITH_EACH_STAGE else ""))
@pytest.mark.parametrize(("dtype", "stage", "name"), VALUES)
def test_values(dtype: str, stage: str, name: str) -> None:
    """Two batches of four query heads and two KV heads; incomplete tiles; the last query at the last key."""
    runs(stage, dtype)
    run(dtype, CASES[name], stage=stage)


BIAS_IN_EACH_STAGE = ("bias", "bias, a window from odd keys", "bias, rows of an odd length", "bool", "all together")
BIAS = [
    *(("float32", STAGE_OF["float32"], name) for name in of_arrays("float32")),
    *((dtype, stage, name) for dtype, stage in EACH_STAGE for name in BIAS_IN_EACH_STAGE),
]


@pytest.mark.exhaustive(one_of_each=lambda stage, name: (name, stage if name in WITH_EACH_STAGE else ""))
@pytest.mark.parametrize(("dtype", "stage", "name"), BIAS)
def test_bias_and_slopes(dtype: str, stage: str, name: str) -> None:
    runs(stage, dtype)
    run(dtype, of_arrays(dtype)[name], stage=stage)


@every_type
def test_sizes(dtype: str) -> None:
    """One row, one key, an odd number of keys; more rows than keys, so that the first rows have q_idx below 0."""
    mask = Case({"mask_mod": "q_idx + 100 >= kv_idx"}, seen=lambda x: x.i + 100 >= x.j)
    score = Case({"score_mod": "score - 0.01f * abs(q_idx - kv_idx)"}, lambda s, x: s - 0.01 * abs(x.i - x.j))
    for n, n_kv in ((1, 1), (1, 171), (150, 1), (150, 41), (64, 65)):
        for causal in (False, True):
            run(dtype, both(score, mask, causal=causal), n=n, n_kv=n_kv)


def test_arguments_of_each_type() -> None:
    """An array and a number of each: pointers and values of 1, 2, 4 and 8 bytes in sequence."""
    kinds_of = ["int8", "uint8", "uint16", "int64", "uint32", "bool", "float16", "bfloat16"]
    dtypes = [np.dtype(TYPES.get(kind, kind)) for kind in kinds_of]
    arrays = {f"array_{i}": (np.arange(KEYS) % (i + 2) == 0).astype(dtype) for i, dtype in enumerate(dtypes)}
    values = {f"value_{i}": dtype.type(i) for i, dtype in enumerate(dtypes)}
    terms = [f"float(array_{i}[kv_idx]) * float(value_{i})" for i in range(len(dtypes))]
    case = Case(
        {"score_mod": " + ".join(["score", *terms]), "mod_args": {**arrays, **values}},
        lambda s, x: s + sum((x.j % (i + 2) == 0) * float(value) for i, value in enumerate(values.values())),
    )
    run("float32", case)


# ---- packed sequences

UNEVEN = (3, 70, 0, 64, 1), (100, 70, 5, 0, 130)


def packed(dtype: str, lengths: tuple[Any, Any], heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[np.ndarray]:
    """Make q, k, v and do of tokens, and the offsets of the sequences."""
    rows, keys = map(sum, lengths)
    shapes = (rows, heads, HEAD_DIM), (keys, kv_heads, HEAD_DIM), (keys, kv_heads, HEAD_DIM), (rows, heads, HEAD_DIM)
    tokens = [random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    return [*tokens, *(np.cumsum([0, *each], dtype=np.int32) for each in lengths)]


def of_sequence(i: int, tokens: np.ndarray, cu: np.ndarray) -> np.ndarray:
    """Return a sequence's tokens, as (1, heads, rows, head_dim)."""
    return tokens[cu[i] : cu[i + 1]].swapaxes(0, 1)[None]


# batch is the sequence's number; each has a table of 130 keys.
GAIN_OF_SEQUENCES = random(5, 130, seed=6)
PACKED = Case(
    {
        "score_mod": "score * gain[batch * 130 + kv_idx]",
        "mask_mod": "(kv_idx / 40 + head + batch) % 3 != 1",
        "mod_args": {"gain": GAIN_OF_SEQUENCES},
        "alibi_slopes": np.stack([SLOPES * (i + 1) for i in range(5)]),
        "sinks": SLOPES,
    },
    lambda s, x: s * GAIN_OF_SEQUENCES[x.batch, x.j],
    lambda s, y, x: GAIN_OF_SEQUENCES[x.batch, x.j],
    lambda x: (x.j // 40 + x.head + x.batch) % 3 != 1,
)
PACKED_GRAD = {"score_mod_grad": "gain[batch * 130 + kv_idx]"}


def sequence_case(case: Case, i: int) -> Case:
    """Return the case with the slopes of one sequence."""
    slopes = case.options.get("alibi_slopes")
    return case if slopes is None else with_options(case, alibi_slopes=slopes[i])


@every_type
def test_packed_lengths(dtype: str) -> None:
    """Sequences without rows and without keys."""
    q, k, v, _, *cu = packed(dtype, UNEVEN)
    for causal in (False, True):
        case = with_options(PACKED, causal=causal)
        o, lse = flash_attention_varlen(q, k, v, *cu, return_lse=True, stage=STAGE_OF[dtype], **case.options)
        check_sequences(case, q, k, v, cu, o.swapaxes(0, 1), lse)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packed_lengths_in_slots(dtype: str) -> None:
    """One long sequence and many with one row: a block for each tile, and a few more."""
    rows, keys = (300, *[1] * 39), (170, *[3] * 39)
    stage, (q, k, v, _, *cu) = LADDER[STAGE_OF[dtype]], packed(dtype, (rows, keys))
    mask = "((q_idx + 400) / 40 + kv_idx + batch) % 3 != 0"
    case = Case({"mask_mod": mask}, seen=lambda x: ((x.i + 400) // 40 + x.j + x.batch) % 3 != 0)
    given = [np.ascontiguousarray(a.swapaxes(0, 1)) for a in (q, k, v)]
    sizes = {**SIZES[stage.name], "SLOTS": 1}
    ready, arrays, (o, lse) = stage.plan(*given, cu_seqlens=tuple(cu), return_lse=True, sizes=sizes, **case.options)
    assert ready.launches[-1].grid == (339 // 64 + 40, HEADS, 1)
    ready.bind(arrays)()
    check_sequences(case, q, k, v, cu, o, lse)


def check_sequences(case: Case, q: Any, k: Any, v: Any, cu: Any, o: Any, lse: Any) -> None:
    """Check o (heads, tokens, d) and lse of every sequence."""
    for i in range(len(cu[0]) - 1):
        rows = slice(cu[0][i], cu[0][i + 1])
        if rows.start < rows.stop:
            parts = (of_sequence(i, a, each) for a, each in ((q, cu[0]), (k, cu[1]), (v, cu[1])))
            want = truth(*parts, sequence_case(case, i), first_batch=i)
            oracle.check_output(f"sequence {i}", (o[None, :, rows], lse[None, :, rows]), want)


# ---- gradients

CAP = Case(
    {"score_mod": "cap * tanhf(score / cap)", "mod_args": {"cap": np.float32(2)}},
    lambda s, x: 2 * np.tanh(s / 2),
    lambda s, y, x: 1 - (y / 2) ** 2,
)
CAP_GRAD = "1 - (y / cap) * (y / cap)"
HIDDEN = np.where(SEEN[:, :1], 0, -np.inf).astype(np.float32)
HIDDEN[..., 5:20, :] = -np.inf
GRADIENTS = {
    "score_mod": (CAP, CAP_GRAD),
    "mask of heads": (OF_HEADS, None),
    "mask of an array": (OF_PLACES, None),
    "rows that see nothing": (FEW_ROWS, None),
    "nothing is seen": (NOTHING, None),
    "both, causal": (both(CAP, OF_HEADS, causal=True), CAP_GRAD),
    "sinks": (with_options(FEW_ROWS, sinks=np.array([-np.inf, -2, 3, 1e4], np.float32)), None),
    "bias, -inf": (Case({"bias": HIDDEN}), None),
    "all together": (
        both(CAP, OF_HEADS, bias=random(ROWS, KEYS), alibi_slopes=SLOPES, sinks=SLOPES, window=(90, 20)),
        CAP_GRAD,
    ),
    "infinite at 0": (
        both(Case({"score_mod": "fabsf(score)"}, lambda s, x: abs(s), lambda s, y, x: np.sign(s)), OF_HEADS),
        "score / y",
    ),
}
each_gradient_type = pytest.mark.parametrize("dtype", BACKWARD_OF)


def check_gradients(dtype: str, got: Any, want: Truth) -> None:
    relative = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    oracle.check_gradients(got, want.gradients, relative=relative, least=1e-3)


def run_gradients(
    dtype: str, case: Case, grad: str | None, *, plant: Callable[[str], str] = str, stage: str = "", **more: Any
) -> tuple[Any, ...]:
    """Check a stage's gradients; without a name, those of the stage for the type. o and lse are NumPy's, rounded."""
    q, k, v = inputs(dtype)
    do = random(*q.shape, dtype=dtype, seed=8)
    want = truth(q, k, v, case, do=do)
    of = BACKWARD[stage or BACKWARD_OF[dtype]]
    saved = want.o.astype(q.dtype), want.lse.astype(np.float32)
    more = {"source": plant(kernel.source(of.file)), "sizes": SIZES[of.name], **more}
    options = {**case.options, "score_mod_grad": grad}
    launch, got = backward.prepare(of, do, q, k, v, *saved, **options, **more)
    launch()
    check_gradients(dtype, got, want)
    return got


IN_ORDER = ("mask of heads", "sinks", "all together")
BACKWARDS = [*((name, False) for name in GRADIENTS), *((name, True) for name in IN_ORDER)]
IN_EACH_TYPE = ("all together",)  # in the fast run, which has all cases in float32


@pytest.mark.exhaustive(
    one_of_each=lambda dtype, name, deterministic: (name, deterministic, dtype * (name in IN_EACH_TYPE))
)
@pytest.mark.parametrize(("name", "deterministic"), BACKWARDS)
@each_gradient_type
def test_gradients(dtype: str, name: str, deterministic: bool) -> None:
    case, grad = GRADIENTS[name]
    run_gradients(dtype, case, grad, deterministic=deterministic)


LONG_ROWS = [("score_mod", True), ("mask of heads", False), ("all together", False), ("infinite at 0", False)]


@pytest.mark.exhaustive(one_of_each=lambda name, deterministic: deterministic)
@pytest.mark.parametrize(("name", "deterministic"), LONG_ROWS)
def test_gradients_of_long_rows(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One consumer has P times the derivative; the other, which has dP, reads it from dS's place."""
    if reason := BACKWARD["hopper_backward_wide"].why_not(head_dim=136, dtype="bfloat16"):
        pytest.skip(reason)
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", 136)
    run_gradients("bfloat16", *GRADIENTS[name], stage="hopper_backward_wide", deterministic=deterministic)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "old, new",
    [("(SCORE_GRAD ? dS_lane : P_lane)", "P_lane"), ("hook_gradients(fragments(S), grad);", "")],
    ids=["P without its derivative", "P in place of its derivative"],
)
def test_a_derivative_that_long_rows_lack_is_seen(
    old: str, new: str, cpu_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", 136)
    how = {"plant": Bug("", old, new).plant, "stage": "hopper_backward_wide"}
    with pytest.raises((AssertionError, check.CheckFailed)):
        run_gradients("bfloat16", *GRADIENTS["score_mod"], **how)


def test_gradients_by_warps_with_32_keys() -> None:
    """A warp of backward_mma has two fragments of keys at 128 keys per block, but one in other tests' small tiles."""
    run_gradients("float16", *GRADIENTS["all together"], sizes={"BLOCK_N": 128})


@each_gradient_type
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_packed_lengths(dtype: str, deterministic: bool) -> None:
    q, k, v, do, *cu = packed(dtype, UNEVEN)
    options = {**PACKED.options, **PACKED_GRAD, "causal": True}
    o, lse = flash_attention_varlen(q, k, v, *cu, return_lse=True, **options)
    got = flash_attention_varlen_backward(do, q, k, v, o, lse, *cu, deterministic=deterministic, **options)
    for i in range(5):
        case = with_options(sequence_case(PACKED, i), causal=True)
        if UNEVEN[0][i] and UNEVEN[1][i]:
            given = [of_sequence(i, a, each) for a, each in ((q, cu[0]), (k, cu[1]), (v, cu[1]), (do, cu[0]))]
            want = truth(*given[:3], case, do=given[3], first_batch=i)
            ends = cu[0], cu[1], cu[1]
            check_gradients(dtype, [of_sequence(i, a, each) for a, each in zip(got, ends, strict=True)], want)
    assert not got[1][cu[1][2] : cu[1][3]].any(), "keys of a sequence without rows"
    if not deterministic:
        heads_first = [np.ascontiguousarray(a.swapaxes(0, 1)) for a in (do, q, k, v, o)]
        stage, how = BACKWARD[BACKWARD_OF[dtype]], {"cu_seqlens": tuple(cu), "sizes": {"SLOTS": 1}}
        launch, slots = backward.prepare(stage, *heads_first, lse, **options, **how)
        launch()
        for a, b in zip(got, slots, strict=True):
            check.check("in slots", cp.asnumpy(b).swapaxes(0, 1), a, tolerance=2e-3 * float(np.abs(a).max()))


def test_gradients_need_the_derivative() -> None:
    q, k, v = (a.swapaxes(1, 2) for a in inputs("float32"))
    o, lse = flash_attention(q, k, v, return_lse=True, **CAP.options)
    with pytest.raises(ValueError, match="gradients with a score_mod need score_mod_grad, its derivative by score"):
        flash_attention_backward(o, q, k, v, o, lse, **CAP.options)
    with pytest.raises(ValueError, match="score_mod_grad is given without score_mod: there is nothing to diff"):
        flash_attention_backward(o, q, k, v, o, lse, **PREFIX.options, score_mod_grad="1")


# ---- lists of tiles

EMPTY, FULL, PARTIAL = 0, 1, 2


def kinds(seen: np.ndarray, counts: np.ndarray, block_m: int, block_n: int) -> np.ndarray:
    """Classify each tile of (N, N_kv). counts: pairs in the window; pairs outside do not count."""
    n, n_kv = seen.shape
    result = np.zeros((-(-n // block_m), -(-n_kv // block_n)), int)
    for m, n in np.ndindex(*result.shape):
        tile = np.s_[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
        of_tile = seen[tile][counts[tile]]
        result[m, n] = EMPTY if not of_tile.any() else FULL if of_tile.all() else PARTIAL
    return result


def check_entries(
    stage: str, case: Case, block_m: int, block_n: int, *, plant: Callable[[str], str] = str
) -> tuple[int, ...]:
    """Check the output of the launch before a stage's own, for (batch, heads). plant: its text, edited."""
    q, k, v = inputs("float32")
    sizes = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    with kernel.built_when_launched():
        if stage == "backward":
            given = q, q, k, v, q, np.zeros(q.shape[:3], np.float32)
            ready, arrays, _ = backward.plan(BACKWARD[stage], *given, sizes=sizes, **case.options)
        else:
            ready, arrays, _ = LADDER[stage].plan(q, k, v, sizes=sizes, **case.options)
        launch, compiled, args = ready.resolve_arguments(arrays)[0]
        compiled = kernel.load(plant(compiled.code), launch.kernel, defines=dict(launch.sizes))
    compiled(launch.grid, launch.block, args)
    got = cp.asnumpy(args[0]).reshape(ready.scratch["block_mask"].shape)
    batch, head, i, j = np.ogrid[: got.shape[0], : got.shape[1], KEYS - ROWS : KEYS, :KEYS]
    x = SimpleNamespace(batch=batch, head=head, kv_head=head // (HEADS // KV_HEADS), i=i, j=j, q_len=ROWS, kv_len=KEYS)
    seen = np.broadcast_to(case.seen(x), (*got.shape[:2], ROWS, KEYS))
    left, right = case.options.get("window", (KEYS, KEYS))
    counts = ((j >= i - left) & (j <= i + right))[0, 0]
    for of_head in np.ndindex(*got.shape[:2]):
        want = kinds(seen[of_head], counts, block_m, block_n)
        for tile, row in enumerate(want.T if stage == "backward" else want):
            listed = [2 * other + (kind == PARTIAL) for other, kind in enumerate(row) if kind != EMPTY] or [1]
            assert got[of_head][tile, : 1 + len(listed)].tolist() == [len(listed), *listed], (of_head, tile)
    return got.shape[:2]


LISTED = {
    "mask of heads": (OF_HEADS, (BATCH, HEADS)),
    "window": (with_options(OF_HEADS, window=(30, 11)), (BATCH, HEADS)),
    "prefix": (PREFIX, (1, 1)),
    "of an array": (OF_PLACES, (BATCH, 1)),
    "nothing": (NOTHING, (1, 1)),
    "few rows": (FEW_ROWS, (1, 1)),
    # Visible to a single pair, in the last row and key; hidden from a single pair.
    "one pair": (Case({"mask_mod": "q_idx + kv_idx == 342"}, seen=lambda x: x.i + x.j == 342), (1, 1)),
    "all but one": (Case({"mask_mod": "q_idx + kv_idx != 342"}, seen=lambda x: x.i + x.j != 342), (1, 1)),
}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("stage", ["heads_and_masks", "backward"])
def test_lists_of_tiles(stage: str, name: str) -> None:
    """Empty tiles are left out, full ones are known, as NumPy finds; one list serves all heads if they are alike."""
    case, shape = LISTED[name]
    for block_m, block_n in ((64, 32), (128, 48)) if stage == "heads_and_masks" else ((64, 64),):
        assert check_entries(stage, case, block_m, block_n) == shape


def test_a_block_mask_is_one_mask_for_all_shapes() -> None:
    place = cp.asarray(np.arange(KEYS, dtype=np.int32) // 50)
    mask = make_block_mask("place[q_idx] == place[kv_idx]", {"place": place})
    case = Case({"mask_mod": mask}, seen=lambda x: x.i // 50 == x.j // 50)
    for n, n_kv in ((150, 172), (70, 90), (150, 172)):
        q, k, v = (np.ascontiguousarray(a.swapaxes(1, 2)) for a in inputs("float32", n, n_kv))
        o, lse = flash_attention(*map(cp.asarray, (q, k, v)), mask_mod=mask, return_lse=True)
        oracle.check_output("block mask", (o.swapaxes(1, 2), lse), truth(*(a.swapaxes(1, 2) for a in (q, k, v)), case))
    ready, _, _ = LADDER["heads_and_masks"].plan(*inputs("float32"), mask_mod=mask)
    of_text, _, _ = LADDER["heads_and_masks"].plan(*inputs("float32"), **OF_PLACES.options)
    assert ready.launches[0].once and not of_text.launches[0].once
    other = {"place": cp.asarray(np.zeros(KEYS, np.int32))}
    with pytest.raises(ValueError, match=r"mod_args\['place'\] is not the one that the block mask was made with"):
        flash_attention(q, k, v, mask_mod=mask, mod_args=other)


def test_arrays_of_a_text_may_change_between_two_calls() -> None:
    q, k, v = inputs("float32")
    place = cp.asarray(PLACES.copy())
    options = {**OF_PLACES.options, "mod_args": {"place": place}, "return_lse": True}
    given = [cp.asarray(np.ascontiguousarray(a.swapaxes(1, 2))) for a in (q, k, v)]
    for places in (PLACES, np.roll(PLACES, 40, axis=1)):
        place[...] = cp.asarray(places)
        case = Case({}, seen=lambda x, places=places: places[x.batch, x.i] == places[x.batch, x.j])
        o, lse = flash_attention(*given, **options)
        oracle.check_output("changed", (o.swapaxes(1, 2), lse), truth(q, k, v, case))


@pytest.mark.parametrize("dtype", ["float16"])
def test_a_bias_of_another_form_is_another_function(dtype: str) -> None:
    """Consecutive calls that differ only in the axes of bias."""
    q, k, v = inputs(dtype)
    bias = random(BATCH, HEADS, ROWS, KEYS, dtype=dtype, seed=7)
    for form in (bias[0, 0], bias, bias[:1, :, :1]):
        o, lse = flash_attention(*(a.swapaxes(1, 2) for a in (q, k, v)), bias=form, return_lse=True)
        got = cp.asnumpy(o).swapaxes(1, 2), lse
        oracle.check_output("bias", got, truth(q, k, v, Case({"bias": form})))


# ---- the X-ray


def of_one_head(dtype: str = "float32") -> list[np.ndarray]:
    return [random(1, rows, HEAD_DIM, dtype=dtype, seed=seed) for seed, rows in enumerate((ROWS, KEYS, KEYS))]


@every_type
def test_the_x_ray_finds_nothing(dtype: str) -> None:
    """A table and a mask, incomplete tiles on both sides; arrays have the caller's names, after mod_."""
    q, k, v = of_one_head(dtype)
    table = random(1, 2 * KEYS + 1, seed=3)
    options = {**relative_bias(table), "mask_mod": "kv_idx < 20 || q_idx / 40 == kv_idx / 40"}
    report = xray_stage(STAGE_OF[dtype], q[:, :100], k[:, :150], v[:, :150], sizes=SIZES[STAGE_OF[dtype]], **options)
    assert not report.findings, str(report)
    assert report.traffic["mod_table"].read and report.traffic["block_mask"].read


@pytest.mark.parametrize("case", [OF_PLACES, with_options(OF_HEADS, window=(30, 11))], ids=["array", "window"])
def test_the_x_ray_of_the_launch_that_makes_lists(case: Case) -> None:
    ready, arrays, _ = LADDER["heads_and_masks"].plan(*inputs("float32"), **case.options)
    launch, compiled, args = ready.resolve_arguments(arrays)[0]
    report = xray(compiled, launch.grid, launch.block, args)
    assert {finding.kind for finding in report.findings} <= {"never written"}, str(report)  # short lists


def test_tiles_that_are_hidden_are_not_read() -> None:
    q, k, v = of_one_head()
    sizes, mask_mod = SIZES["heads_and_masks"], "kv_idx < 60 || kv_idx >= 160"
    few = xray_stage("heads_and_masks", q, k, v, sizes=sizes, mask_mod=mask_mod)
    row_tiles, row_bytes = 3, 4 * HEAD_DIM
    for name in "KV":
        assert few.traffic[name].read == row_tiles * row_bytes * (64 + KEYS - 160)  # tiles of 32 keys: 2, and the last
    fetched = few.fetches["K"].reshape(KEYS, -1)[[0, 63, 64, 159, 160], 0] > 0
    assert fetched.tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("stage", STAGE_OF.values())
def test_full_tiles_do_not_ask_the_mask(stage: str) -> None:
    """The launch that makes the list reads place, and the stage's own launch only in partial tiles."""
    q, k, v = of_one_head({name: dtype for dtype, name in STAGE_OF.items()}[stage])
    place = np.zeros(KEYS, np.int32)
    options = {"mask_mod": "place[kv_idx] == 0", "mod_args": {"place": place}, "sizes": SIZES[stage]}
    assert not xray_stage(stage, q, k, v, **options).traffic["mod_place"].read
    place[170] = 1
    assert xray_stage(stage, q, k, v, **options).traffic["mod_place"].read


def test_a_read_out_of_bounds_is_told_with_its_text() -> None:
    q, k, v = of_one_head()
    table = {"mod_args": {"table": np.zeros(60, np.float32)}}
    report = xray_stage("heads_and_masks", q, k, v, score_mod="score + table[kv_idx]", **table)
    (finding,) = report.findings
    assert (finding.file, finding.line, finding.array) == ("score_mod", 1, "mod_table")
    assert ", which has 60 elements" in finding.message
    assert "score + table[kv_idx]" in line_table(report.code, "kernel.cu")[finding.file, finding.line]


@pytest.mark.skipif(ON_GPU, reason="a GPU does not check")
def test_a_list_that_reads_out_of_bounds_is_stopped_with_the_text() -> None:
    q, k, v = of_one_head()
    table = {"mod_args": {"table": np.zeros(60, np.float32)}}
    told = r"read of mod_table\[\d+\], which has 60 elements at mask_mod:1 .*\n.*table\[kv_idx\] == 0"
    with pytest.raises(LaunchError, match=told):
        xray_stage("heads_and_masks", q, k, v, mask_mod="table[kv_idx] == 0", **table)


# ---- what is refused

REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "an unknown name": (
        ValueError,
        "score_mod does not compile: .*caps.*\n    score \\+ caps",
        {"score_mod": "score + caps"},
    ),
    "a double": (
        ValueError,
        "score_mod does not compile: a score is a float: write 0.5f .*\n    score \\* 0.5",
        {"score_mod": "score * 0.5"},
    ),
    "a float as an index": (
        ValueError,
        r"score_mod does not compile: .*\n    score \+ t\[distance\]",
        {"score_mod": "score + t[distance]", "mod_args": {"t": SLOPES}},
    ),
    "a float of a mask": (
        ValueError,
        "mask_mod does not compile: mask_mod says true or false: a bool, or an int\n    1.0f",
        {"mask_mod": "1.0f"},
    ),
    "a score in a mask": (ValueError, "mask_mod does not compile: .*score.*\n    score > 0", {"mask_mod": "score > 0"}),
    "half a text": (ValueError, "score_mod does not compile: .*\n    score\\)\\)", {"score_mod": "score))"}),
    "no text": (TypeError, "score_mod must be an expression in CUDA", {"score_mod": lambda score: score}),
    "a name of ours": (
        ValueError,
        "mod_args has 'score': a name in C",
        {"score_mod": "score", "mod_args": {"score": 1}},
    ),
    "a name of the struct's": (ValueError, "mod_args has 'loaded'", {"score_mod": "loaded", "mod_args": {"loaded": 1}}),
    "a name of C++'s": (
        ValueError,
        "mod_args does not compile: .*\n    int",
        {"score_mod": "score", "mod_args": {"int": 1}},
    ),
    "a macro": (ValueError, "kernels have macros in capitals", {"score_mod": "score", "mod_args": {"BLOCK_M": 1}}),
    "a string": (
        TypeError,
        r"mod_args\['a'\] must be a NumPy number or an array",
        {"score_mod": "a", "mod_args": {"a": "x"}},
    ),
    "float64": (TypeError, r"mod_args\['a'\] is float64; write", {"score_mod": "a", "mod_args": {"a": np.float64(1)}}),
    "arrays of float64": (
        TypeError,
        r"mod_args\['a'\] is float64; one of",
        {"score_mod": "a", "mod_args": {"a": np.ones(1)}},
    ),
    "a large int": (ValueError, "= 1099511627776 is no int32", {"score_mod": "a", "mod_args": {"a": 2**40}}),
    "a list": (TypeError, "mod_args must be a dict", {"score_mod": "a", "mod_args": [1]}),
    "arguments of nothing": (ValueError, "mod_args is given without score_mod or mask_mod", {"mod_args": {"a": 1}}),
    "sinks of another shape": (ValueError, r"sinks is float32 \(3,\); float32 \(4,\) is needed", {"sinks": SLOPES[:3]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_is_wrong(name: str) -> None:
    error, message, options = REFUSED[name]
    q, k, v = (a.swapaxes(1, 2) for a in inputs("float32"))
    with pytest.raises(error, match=message):
        flash_attention(q, k, v, **options)


def test_stages_that_cannot() -> None:
    q, k, v = (a.swapaxes(1, 2) for a in inputs("float32"))
    half = [a.astype(np.float16) for a in (q, k, v)]
    for options in ({"score_mod": "score"}, {"bias": SEEN}):
        with pytest.raises(ValueError, match="stage flash_wmma cannot: it has no "):
            flash_attention(*half, **options, stage=6)


@needs_nvrtc
@pytest.mark.parametrize("name", [name for name, (_, text, _) in REFUSED.items() if "does not compile" in text])
def test_nvrtc_says_it_too(name: str) -> None:
    """Its messages have another form than g++'s, but show the caller's text in the same way."""
    _, message, options = REFUSED[name]
    text, mod = text_of(LADDER["heads_and_masks"].file, options)
    with (
        pytest.raises(ValueError, match=message.replace(".*caps.*", 'identifier "caps" is undefined')),
        mod.compile_errors_as_value_errors(),
    ):
        machine_code(text, kernel.options(), "sm_80")


# ---- what is compiled


def text_of(file: str, options: Mapping[str, Any], **how: Any) -> tuple[str, score_mod.ScoreMod]:
    """Return a kernel's text after the functions of a call, and these functions."""
    given = {name: a for name, a in options.items() if name in ("score_mod", "mask_mod", "mod_args", "score_mod_grad")}
    mod, arrays = score_mod.parse_score_mod(**given)
    mod = score_mod.bind_to_call(mod, {name: launches.Spec.of(a) for name, a in arrays.items()})
    return mod.text(**how) + kernel.source(file), mod


def test_without_a_function_texts_are_as_they_were() -> None:
    with kernel.built_when_launched():
        for dtype, stage in STAGE_OF.items():
            ready, _, _ = LADDER[stage].plan(*inputs(dtype))
            assert ready.kernels[stage].code == kernel.source(LADDER[stage].file)
            assert ready.scratch.keys() <= {"schedule"}
        ready, _, _ = LADDER["hopper"].plan(*inputs("bfloat16"), **PREFIX.options)
    assert ready.kernels["order_tiles"].code == kernel.source("10_order.cu")  # it has no place for functions


COMPILED = [
    *(("sm_80", name) for name in ("heads_and_masks", "flash_mma", "backward", "backward_mma", "")),
    *(("sm_90a", name) for name in ("flash_mma", "hopper", "backward_mma")),
]


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize(("arch", "name"), COMPILED)
def test_nvrtc_compiles_them(arch: str, name: str) -> None:
    """With every name, arguments by value and by pointer; "" is the launch that makes a list of tiles."""
    options = {**both(EVERY_NAME, OF_PLACES).options, "score_mod_grad": "gain[head * kv_len + kv_idx]"}
    if not name:
        text, _ = text_of(launches.BLOCK_MASK, options)
        assert compile_report.compile_report(text, {}, arch).spill_bytes == 0
        return
    stage = LADDER[name]
    text, _ = text_of(stage.file, options, backward=name in BACKWARD, pairs="float32" not in stage.dtypes)
    report = compile_report.compile_report(text, stage.defines(64), arch, name=stage.kernel_name(stage.dtypes[-1]))
    assert report.registers <= 255


# ---- planted bugs

SeenBy = tuple[str, Callable[[Callable[[str], str]], object]]  # the text's file, and the check that finds the bug in it


def forward(name: str, dtype: str = "float32") -> SeenBy:
    case = {**CASES, **of_arrays(dtype)}[name]
    return LADDER[STAGE_OF[dtype]].file, lambda plant: run(dtype, case, plant=plant)


def gradients(name: str, dtype: str = "float32") -> SeenBy:
    return BACKWARD[BACKWARD_OF[dtype]].file, lambda plant: run_gradients(dtype, *GRADIENTS[name], plant=plant)


def lists(name: str, stage: str = "heads_and_masks") -> SeenBy:
    return launches.BLOCK_MASK, lambda plant: check_entries(stage, LISTED[name][0], 64, 64, plant=plant)


def bug(name: str, seen_by: SeenBy, old: str, new: str, **more: Any) -> Any:
    return pytest.param(Bug(name, old, new, **more), seen_by, id=name)


WRONG_LIST = {"error": AssertionError}
BUGS = [
    bug("scores without log2(e)", forward("score_mod"), "return unit * hooks", "return hooks"),
    bug("a distance's sign", forward("alibi, window"), "- (kv_idx(j) - kv_idx(0))", "+ (kv_idx(j) - kv_idx(0))"),
    bug(
        "keys past the end",
        forward("score_mod"),
        "CUT ? min(kv_idx(j), hooks.kv_len - 1)",
        "CUT ? kv_idx(j)",
        error=LaunchError,
        cpu_only=True,
    ),
    bug("the first of two neighbours for both", forward("bias", "float16"), "loaded.y);", "loaded.x);"),
    bug(
        "pairs from odd keys",
        forward("bias, a window from odd keys", "float16"),
        "Tiles(const Hooks&, int, int begin, int limit)\n      : begin(BIAS_BYTES ? begin / 2 * 2 : begin)",
        "Tiles(const Hooks&, int, int begin, int limit)\n      : begin(begin)",
        cpu_only=True,
    ),
    bug("no tile is partial", forward("mask_mod"), "(tile == first() ? upcoming : current) % 2", "false"),
    bug(
        "up where it is down",
        forward("mask of heads", "bfloat16"),
        "upcoming / 2 * (STEP > 0 ?",
        "upcoming / 2 * (true ?",
        error=LaunchError,
        cpu_only=True,
    ),
    bug("a step of one tile", forward("mask of heads", "float16"), "upcoming = later;", "upcoming = current + 2;"),
    bug(
        "a list without its last tile",
        forward("mask of heads"),
        "return left > 0 ? upcoming",
        "return left > 1 ? upcoming",
    ),
    bug("a sink in each thread", forward("sinks"), "l_i[i], hooks, x == 0);", "l_i[i], hooks, true);"),
    bug("a sink of weight 0", forward("sinks", "float16"), "? 1.0f + 0.0f * sink : 0.0f", "? 0.0f : 0.0f"),
    bug("a sink of -inf", forward("sinks, rows that see nothing"), " && sink != NEG_INF", ""),
    bug("no derivative", gradients("score_mod"), "ds[i][j] *= *grad.of(i, j)", "ds[i][j] *= 1.0f"),
    bug(
        "no derivative in half",
        gradients("score_mod", "float16"),
        "*= *grad.of(i / 4 / N, i / 4 % N, i % 4)",
        "*= 1.0f",
    ),
    bug("an infinite derivative", gradients("infinite at 0"), "SCORE_GRAD && ds[i][j] != 0.0f", "SCORE_GRAD"),
    bug(
        "an infinite derivative in half",
        gradients("infinite at 0", "float16"),
        "if (SCORE_GRAD && P[m][n][i] == 0.0f)",
        "if (false)",
    ),
    bug(
        "tiles of the first head",
        gradients("mask of heads", "float16"),
        "entry = hooks_of(head)",
        "entry = hooks_of(0)",
    ),
    bug(
        "no tile of rows is partial",
        gradients("mask of heads", "float16"),
        "= *entry % 2;",
        "= false;",
        times=2,
        which=ALL,
    ),
    bug("full where it is partial", lists("prefix"), "(kinds[i] == PARTIAL)", "(kinds[i] == FULL)", **WRONG_LIST),
    bug(
        "the last key does not count",
        lists("one pair"),
        "BLOCK_N, hooks.kv_len);\n",
        "BLOCK_N, hooks.kv_len - 1);\n",
        **WRONG_LIST,
    ),
    bug("the last row does not count", lists("one pair"), "hooks.q_len) - 1;", "hooks.q_len) - 2;", **WRONG_LIST),
    bug("pairs past the window", lists("window"), " && distance <= params.window_right", "", **WRONG_LIST),
    bug("an empty list", lists("nothing"), "if (count == 0)", "if (false)", **WRONG_LIST),
    bug(
        "rows for keys",
        lists("mask of heads", "backward"),
        "row_tile * BLOCK_M, key_tile * BLOCK_N, hooks",
        "key_tile * BLOCK_M, row_tile * BLOCK_N, hooks",
        **WRONG_LIST,
    ),
]


@pytest.mark.exhaustive(one_of_each=lambda planted, seen_by: (seen_by[0], planted.error))
@pytest.mark.parametrize(("planted", "seen_by"), BUGS)
def test_bug_is_seen(planted: Bug, seen_by: SeenBy) -> None:
    if planted.cpu_only and ON_GPU:
        pytest.skip("the CPU engine finds it")
    with pytest.raises(planted.error):
        seen_by[1](planted.plant)


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source(case.values[1][0]), case.values[0]) for case in BUGS)
