"""Gradients: stages, flash_attention_backward and flash_attention_varlen_backward against float64, planted bugs.

A new float32 stage of the backward pass is tested because it is in the ladder. Both stages of 08 are tested through
models' calls; test_backward_mma.py has the other tests of the one in half types.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import half_gradients
import numpy as np
import oracle
import pytest
from backends import needs_nvrtc
from half_gradients import TYPES
from planted import Bug, check_all_can_be_planted

from helpers import device, engine
from helpers.attention import (
    check,
    compile_report,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    kernel,
    reference,
)
from helpers.attention.ladder import BACKWARD, LADDER, Stage, backward, limits, tiles
from helpers.attention.ladder.stages import backward as backward_stages
from helpers.device import cp
from helpers.xray import Finding, find

STAGES = [stage for stage in BACKWARD.values() if "float32" in stage.dtypes]
every_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
BY_DTYPE = {"float32": "backward", "bfloat16": "backward_mma", "float16": "backward_mma"}
either_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
MOST_TIMES_NUMPY = 40  # on the CPU engine: 1 to 6 were measured
either_way = pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
NAMES = "dQ", "dK", "dV"
ADDS_FOUR = "atomicAdd(reinterpret_cast<float4*>(row) + c, a);"


def inputs(batch: int, heads: int, kv_heads: int, n: int, n_kv: int, d: int, seed: int = 0) -> tuple[Any, ...]:
    """Make do, q, k, v (batch, heads, rows, d) in float32 with a non-zero mean."""
    rng = np.random.default_rng([seed, n, n_kv, heads, d])
    shapes = (batch, heads, n, d), (batch, heads, n, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, d)
    return tuple(rng.standard_normal(shape, dtype=np.float32) + np.float32(0.25) for shape in shapes)


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Compute o and lse, rounded from float64 to float32."""
    share = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(a, share, axis=-3) for a in (k, v))
    o, lse = reference.attention(q, k, v, return_lse=True, **options)
    return o.astype(np.float32), lse.astype(np.float32)


def check_gradients(name: str, got: Any, expected: Any) -> None:
    oracle.check_gradients(got, expected, name=name)


def gradients(
    stage: Stage, arrays: tuple[Any, ...], *, source: str | None = None, sizes: Any = None, **how: Any
) -> Any:
    """Compute the gradients by a stage, from the float64 forward."""
    options = {name: value for name, value in how.items() if name != "deterministic"}
    run, out = backward.prepare(stage, *arrays, *forward(*arrays[1:], **options), source=source, sizes=sizes, **how)
    assert all(np.isnan(cp.asnumpy(a)).all() for a in out)
    run()
    return out


# ---- a stage: sizes, masks, heads, values


@pytest.mark.exhaustive(each_value=())
@every_stage
@either_way
@pytest.mark.parametrize("d", [1, 5, 40, 64, 128])
def test_sizes(stage: Stage, d: int, deterministic: bool) -> None:
    """Sizes around the tiles', every N with some N_kv."""
    for n, n_kv in [(1, 1), (1, 130), (63, 64), (64, 65)] + [(129, 257)] * (d == 64):
        arrays = inputs(1, 1, 1, n, n_kv, d)
        got = gradients(stage, arrays, deterministic=deterministic)
        check_gradients(f"{n} x {n_kv} x {d}", got, reference.attention_backward(*arrays))


@every_stage
@either_way
def test_one_key(stage: Stage, deterministic: bool) -> None:
    """Its weight is 1 whatever q and k are, so their gradients are 0 except for rounding in dP - D."""
    do, q, k, v = inputs(1, 1, 1, 130, 1, 64)
    got = gradients(stage, (do, q, k, v), deterministic=deterministic)
    terms = of_absolute_values(do, q, k, v, np.ones((1, 1, 130, 1)), 1 / 8)
    np.testing.assert_array_less([float(np.abs(a).max()) for a in reference.attention_backward(do, q, k, v)[:2]], 1e-12)
    for what, a, most in zip(NAMES, got[:2], terms, strict=False):
        check.check(what, a, np.zeros(a.shape), tolerance=2.0**-24 * 16 * float(most.max()))
    check.check("dV", got[2], do.sum(axis=-2, keepdims=True, dtype=float), tolerance=1e-4)


MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (0, 0)},
    {"window": (5, 3)},
    {"window": (40, -1)},
    {"window": (-1, 2)},
    {"causal": True, "window": (70, 9)},
)


@pytest.mark.exhaustive(each_value=())
@every_stage
@either_way
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(stage: Stage, mask: dict[str, Any], deterministic: bool) -> None:
    """Different numbers of rows and keys, aligned at the bottom right: some rows see no key, some keys no row."""
    for n, n_kv in (130, 65), (65, 130), (1, 200), (100, 100):
        arrays = inputs(1, 2, 1, n, n_kv, 40)
        got = gradients(stage, arrays, deterministic=deterministic, **mask)
        check_gradients(f"{n} x {n_kv}", got, reference.attention_backward(*arrays, **mask))


@every_stage
@either_way
def test_rows_and_keys_that_nobody_sees_have_zero_gradients(stage: Stage, deterministic: bool) -> None:
    arrays = inputs(1, 1, 1, 130, 30, 40)
    dq, _, _ = gradients(stage, arrays, deterministic=deterministic, causal=True)
    assert (cp.asnumpy(dq)[0, 0, :100] == 0).all()
    arrays = inputs(1, 1, 1, 30, 130, 40)
    _, dk, dv = gradients(stage, arrays, deterministic=deterministic, window=(0, 0))
    assert (cp.asnumpy(dk)[0, 0, :100] == 0).all() and (cp.asnumpy(dv)[0, 0, :100] == 0).all()


@every_stage
@pytest.mark.parametrize("scale", [1.0, 0.0, -0.3])
def test_softmax_scale(stage: Stage, scale: float) -> None:
    arrays = inputs(1, 1, 1, 65, 33, 5)
    got = gradients(stage, arrays, softmax_scale=scale, causal=True)
    check_gradients(str(scale), got, reference.attention_backward(*arrays, softmax_scale=scale, causal=True))


SLOPES = np.array([[0.5, 0.03, 2.0, 0.1], [0.0, -0.01, 1.0, 0.25]], np.float32)  # for two sequences' heads


@every_stage
@pytest.mark.parametrize("slopes", [SLOPES, SLOPES[0]], ids=["of batches", "of heads"])
def test_alibi(stage: Stage, slopes: np.ndarray) -> None:
    """Deterministic or not; heads that share keys, rows that see none, slopes of 0 and below it."""
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (40, 3)}]
    for (n, n_kv), mask in zip([(65, 130), (130, 65), (85, 170)], masks, strict=True):
        arrays = inputs(2, 4, 2, n, n_kv, 40)
        expected = reference.attention_backward(*arrays, alibi_slopes=slopes, **mask)
        for deterministic in (False, True):
            got = gradients(stage, arrays, deterministic=deterministic, alibi_slopes=slopes, **mask)
            check_gradients(f"{n} x {n_kv}", got, expected)


def of_absolute_values(do: Any, q: Any, k: Any, v: Any, p: np.ndarray, scale: float) -> tuple[np.ndarray, ...]:
    """Compute the gradients' sums with absolute values of all terms: rounding errors are proportional to these."""
    do, q, k, v = (np.abs(a.astype(np.float64)) for a in (do, q, k, v))
    dp = do @ v.swapaxes(-1, -2)
    ds = scale * p * (dp + (p * dp).sum(axis=-1, keepdims=True))
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do


@pytest.mark.exhaustive(each_value=())
@every_stage
@either_way
@pytest.mark.parametrize("largest", [100.0, 1e3, 1e4])
def test_large_logits(stage: Stage, largest: float, deterministic: bool) -> None:
    """P = exp(S - lse): an error of half an ulp in S or in lse is a relative error of P."""
    do, q, k, v = inputs(1, 1, 1, 65, 127, 64)
    grow = np.float32(np.sqrt(8 * largest / np.abs(q @ k.swapaxes(-1, -2)).max()))
    q, k = q * grow, k * grow
    p = reference.softmax(q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 8)
    got = gradients(stage, (do, q, k, v), deterministic=deterministic)
    expected = reference.attention_backward(do, q, k, v)
    of_p = 2.0**-24 * (16 + 8 * largest)
    for what, a, b, most in zip(NAMES, got, expected, of_absolute_values(do, q, k, v, p, 1 / 8), strict=True):
        check.check(f"{what}, logits to {largest:g}", a, b, tolerance=of_p * float(most.max()))


PAIRS, FEW = backward_stages._BACKWARD_PAIRS, backward_stages._BACKWARD_FEW
OTHERS = [tiles for tiles in (*PAIRS.values(), *FEW.values()) if tiles]


@pytest.mark.exhaustive(one_of_each=lambda sizes: sizes.threads)
@every_stage
@pytest.mark.parametrize("sizes", (*backward_stages._BACKWARD[64], *backward_stages._BACKWARD[128], *OTHERS), ids=str)
def test_other_tiles(stage: Stage, sizes: tiles.Tiles) -> None:
    arrays = inputs(1, 2, 1, 130, 100, 40)
    for deterministic in (False, True):
        got = gradients(stage, arrays, sizes=sizes.defines, causal=True, deterministic=deterministic)
        check_gradients(str(sizes), got, reference.attention_backward(*arrays, causal=True))


@every_stage
@pytest.mark.parametrize("defines", [{"VECTOR_ATOMICS": 0}, {"VECTOR": 0}], ids=str)
def test_other_options(stage: Stage, defines: dict[str, int]) -> None:
    """The kernel is right when compiled for a GPU before Hopper, for unaligned arrays, and for experiments."""
    arrays = inputs(1, 2, 1, 130, 100, 36)
    got = gradients(stage, arrays, sizes=defines, causal=True)
    check_gradients(str(defines), got, reference.attention_backward(*arrays, causal=True))


@every_stage
def test_the_tiles_of_a_launch_depend_on_its_blocks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has a tile of keys. On 132 multiprocessors, few blocks would leave more than half of them idle."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    monkeypatch.setattr(limits, "most_shared", lambda: 227 * 1024)

    def block(head_dim: int, keys: int, kv_heads: int, **mask: bool) -> tuple[int, int]:
        sizes = stage.defines_for(head_dim, keys, kv_heads, **mask)
        return sizes["BLOCK_M"], sizes["BLOCK_N"]

    assert block(64, 4096, 3) == (32, 128)  # 96 blocks
    assert block(64, 8448, 1) == block(64, 16384, 1, uneven=True) == (64, 64)  # 66, 128
    assert block(128, 4096, 1) == (64, 48) and block(128, 4096, 2) == (64, 96)  # 43, 86
    assert block(32, 128, 1) == (64, 64) and block(96, 128, 1) == (64, 64)
    monkeypatch.setattr(limits, "most_shared", lambda: 163 * 1024)  # no space for two of the smaller blocks
    assert block(64, 4096, 3) == (64, 128) and block(64, 4096, 1) == (64, 64)


@pytest.mark.exhaustive
@needs_nvrtc
@every_stage
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_no_register_is_spilled_on_hopper(stage: Stage, head_dim: int) -> None:
    few = backward_stages.pick_few_backward(head_dim, 227 * 1024)
    for sizes in (backward_stages.pick_backward(head_dim, 227 * 1024), *([few] if few else [])):
        for name in ("backward", "backward_dq"):
            report = compile_report.compile_report(stage.file, {"HEAD_DIM": head_dim, **sizes}, "sm_90", name=name)
            assert report.spill_bytes == 0, report


@every_stage
def test_every_head_dim_has_tiles_on_every_gpu(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in tiles.LIMITS:
        monkeypatch.setattr(limits, "most_shared", lambda limit=limit: limit)
        for d in range(1, 257 if limit >= 99 * 1024 else 129):
            assert stage.shared_bytes(stage.defines(d)) <= limit
    with pytest.raises(ValueError, match="no tile for head_dim = 256 fits"):
        backward_stages.pick_backward(256, 64 * 1024)


def test_tensor_cores_have_tiles_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = LADDER["backward_mma"]
    for limit in (size for size in tiles.LIMITS if size >= 99 * tiles.KB):
        monkeypatch.setattr(limits, "most_shared", lambda limit=limit: limit)
        for d in range(8, 257, 8):
            sizes = stage.defines(d)
            assert tiles.blocks_in_shared_memory(stage.shared_bytes(sizes), limit) >= sizes["MIN_BLOCKS"]
    with pytest.raises(ValueError, match="no tile for head_dim = 128 fits"):
        backward_stages.pick_backward_mma(128, 64 * tiles.KB)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_tensor_cores_on_a_gpu_with_less_shared_memory(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "most_shared", lambda: 99 * tiles.KB)
    given = half_gradients.inputs((1, 2, 70, d), 100, 1, "float16")
    *_, o, lse = half_gradients.reference(*given, window=(-1, 0))
    arrays = *given, o.astype(np.float16), lse.astype(np.float32)
    run, got = backward.prepare(LADDER["backward_mma"], *arrays, causal=True)
    run()
    half_gradients.compare(f"d = {d}", got, given, window=(-1, 0))


@every_stage
def test_the_same_bits_in_every_run(stage: Stage) -> None:
    arrays = inputs(1, 2, 2, 200, 130, 40)
    first, second = (gradients(stage, arrays, deterministic=True, causal=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(cp.asnumpy(a), cp.asnumpy(b))


@pytest.mark.exhaustive(each_value=())
@pytest.mark.usefixtures("only_x_rayed")
@every_stage
@either_way
@pytest.mark.parametrize("shape", [(33, 31, 5), (130, 130, 40), (65, 100, 64)], ids=str)
def test_it_is_clean(stage: Stage, shape: tuple[int, int, int], deterministic: bool, cpu_engine: Any) -> None:
    """Blocks that add to one element of dQ atomically do not race; two plain stores by different blocks would."""
    found: list[list[Finding]] = []

    def checked(self: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        found.append(find(self, grid, block, args, shared_mem))

    arrays = inputs(1, 2, 1, *shape)
    how: dict[str, Any] = {"causal": True, **({"alibi_slopes": SLOPES[0, :2]} if shape[2] == 5 else {})}
    o, lse = forward(*arrays[1:], **how)
    with kernel.launches_replaced(checked):
        run, got = backward.prepare(stage, *arrays, o, lse, deterministic=deterministic, **how)
        run()
    assert found == [[]] * (3 if deterministic else 2)
    check_gradients(str(shape), got, reference.attention_backward(*arrays, **how))


@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("stage", STAGES[:1], ids=lambda stage: stage.name)
def test_blocks_that_add_without_atomics_are_told(stage: Stage, cpu_engine: Any) -> None:
    found: list[list[Finding]] = []

    def checked(self: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        found.append(find(self, grid, block, args, shared_mem))

    text = kernel.source(stage.file)
    assert text.count(ADDS_FOUR) == 1
    sums = ", ".join(f"to.{word} + a.{word}" for word in "xyzw")
    text = text.replace(ADDS_FOUR, f"float4& to = reinterpret_cast<float4*>(row)[c]; to = make_float4({sums});")
    arrays = inputs(1, 1, 1, 33, 130, 40)
    o, lse = forward(*arrays[1:])
    with kernel.launches_replaced(checked):
        run, _ = backward.prepare(stage, *arrays, o, lse, source=text)
        run()
    assert {(finding.kind, finding.array) for finding in found[1]} == {("race", "dQ")}


@pytest.mark.skipif(device.ON_GPU, reason="of the CPU engine")
@either_dtype
@either_way
def test_it_is_quick_enough_for_a_notebook(
    dtype: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch, cpu_engine: Any
) -> None:
    """CPU time is compared with NumPy's float64 on the same machine, however slow or busy that is."""
    monkeypatch.delenv("COURSE_CPU_OPTIMISATION", raising=False)  # which `course.py test` sets
    arrays = inputs(1, 1, 1, 256, 256, 64)
    o, lse = forward(*arrays[1:])
    typed = (a.astype(TYPES.get(dtype, dtype)) for a in (*arrays, o))
    run, _ = backward.prepare(LADDER[BY_DTYPE[dtype]], *typed, lse, deterministic=deterministic)
    best, numpy = (
        min(_seconds(each) for _ in range(3)) for each in (run, lambda: reference.attention_backward(*arrays))
    )
    assert best < MOST_TIMES_NUMPY * numpy, f"{best / numpy:.0f} times NumPy"


def _seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


# ---- as models call it


def model_inputs(*shape: int, seed: int = 0, dtype: str = "float32") -> tuple[Any, ...]:
    """Make do, q, k, v (batch, seq, heads, head_dim), from (batch, heads, kv_heads, n, n_kv, d)."""
    heads_first = (a.astype(TYPES.get(dtype, dtype)) for a in inputs(*shape, seed=seed))
    return tuple(np.ascontiguousarray(a.swapaxes(1, 2)) for a in heads_first)


def expected_of(do: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, ...]:
    heads_first = (a.swapaxes(-3, -2) for a in (do, q, k, v))
    return tuple(a.swapaxes(-3, -2) for a in reference.attention_backward(*heads_first, **options))


def check_model(name: str, got: Any, given: tuple[Any, ...], *, causal: bool = False, **options: Any) -> None:
    """Check gradients in models' layout: float32 against float64, half types by the rule of two roundings.

    options: window and softmax_scale.
    """
    if given[1].dtype == np.float32:
        check_gradients(name, got, expected_of(*given, causal=causal, **options))
        return
    left, right = options.pop("window", (-1, -1))
    of_four_axes = (a.reshape((1,) * (4 - a.ndim) + a.shape).swapaxes(1, 2) for a in (*got, *given))
    *got, do, q, k, v = of_four_axes
    half_gradients.compare(name, got, (do, q, k, v), window=(left, 0 if causal else right), **options)


LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "NumPy": lambda a: a,
    "device": cp.asarray,
    "heads first": lambda a: cp.asarray(np.ascontiguousarray(a.swapaxes(1, 2))).swapaxes(1, 2),
    "rows with gaps": lambda a: cp.asarray(np.pad(a, ((0, 0), (0, 0), (0, 1), (0, 4))))[:, :, :-1, :-4],
    "odd address": lambda a: cp.asarray(np.concatenate((a.ravel()[:1], a.ravel())))[1:].reshape(a.shape),
    "backwards": lambda a: cp.asarray(a[:, ::-1].copy())[:, ::-1],
}


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("layout", LAYOUTS)
@either_dtype
@either_way
def test_layouts(layout: str, dtype: str, deterministic: bool) -> None:
    options = {"causal": True, "softmax_scale": 0.2}
    arrays = model_inputs(2, 4, 2, 65, 70, 40, dtype=dtype)
    do, q, k, v = map(LAYOUTS[layout], arrays)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    for _ in range(2):  # the second call is a cached one
        got = flash_attention_backward(do, q, k, v, o, lse, deterministic=deterministic, **options)
        assert all(isinstance(a, type(b)) and a.shape == b.shape for a, b in zip(got, (q, k, v), strict=True))
        assert all(a.dtype == arrays[0].dtype and a.flags.c_contiguous for a in got)
        check_model(layout, got, arrays, **options)


def test_the_same_bits_in_half_types() -> None:
    do, q, k, v = map(cp.asarray, model_inputs(1, 2, 2, 200, 130, 40, dtype="float16"))
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    first, second = (flash_attention_backward(do, q, k, v, o, lse, causal=True, deterministic=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(cp.asnumpy(a), cp.asnumpy(b))


def test_through_dlpack() -> None:
    torch = pytest.importorskip("torch")
    arrays = model_inputs(1, 2, 1, 33, 40, 64)
    q, k, v = (torch.from_numpy(a).requires_grad_() for a in arrays[1:])
    do = torch.from_numpy(arrays[0])
    o, lse = flash_attention(*(a.detach() for a in (q, k, v)), causal=True, return_lse=True)
    got = flash_attention_backward(do, *(a.detach() for a in (q, k, v)), o, lse, causal=True)
    assert all(isinstance(a, torch.Tensor) for a in got)
    check_gradients("PyTorch", [a.numpy() for a in got], expected_of(*arrays, causal=True))
    heads_first = (a.transpose(1, 2) for a in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    mask = torch.ones(33, 40, dtype=torch.bool).tril(40 - 33)
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask)
    own = torch.autograd.grad(theirs, (q, k, v), do.transpose(1, 2))
    check_gradients("autograd", [a.numpy() for a in got], [a.numpy().astype(float) for a in own])


LENGTHS = ((0, 5), (33, 33), (70, 0), (1, 130), (65, 20), (0, 0))


@pytest.mark.exhaustive(each_value=())
@either_way
@either_dtype
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (9, 4)}], ids=str)
def test_packed_sequences(mask: dict[str, Any], dtype: str, deterministic: bool) -> None:
    rng = np.random.default_rng(1)
    cu_q, cu_k = (np.cumsum([0, *of], dtype=np.int32) for of in zip(*LENGTHS, strict=True))
    shapes = (cu_q[-1], 4, 40), (cu_q[-1], 4, 40), (cu_k[-1], 2, 40), (cu_k[-1], 2, 40)
    given = (rng.standard_normal(shape, dtype=np.float32) + np.float32(0.25) for shape in shapes)
    do, q, k, v = (a.astype(TYPES.get(dtype, dtype)) for a in given)
    o, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **mask)
    got = flash_attention_varlen_backward(do, q, k, v, o, lse, cu_q, cu_k, deterministic=deterministic, **mask)

    def check_sequences(name: str, got: Any) -> None:
        dq, dk, dv = map(cp.asnumpy, got)
        for i, (rows, keys) in enumerate(LENGTHS):
            of_q, of_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            own = dq[of_q], dk[of_k], dv[of_k]
            if rows and keys:
                check_model(f"{name}: sequence {i}", own, (do[of_q], q[of_q], k[of_k], v[of_k]), **mask)
            else:
                assert not any(a.any() for a in own)

    check_sequences("packed", got)
    on_device = [cp.asarray(a) for a in (do, q, k, v, o, lse, cu_q, cu_k)]
    for _ in range(2):
        again = flash_attention_varlen_backward(
            *on_device, deterministic=deterministic, max_seqlen_q=70, max_seqlen_k=130, **mask
        )
        check_sequences("on the device", again)


@either_dtype
def test_alibi_as_models_have_it(dtype: str) -> None:
    """From 11's forward pass: batches, and the same sequences packed with two empty ones."""
    do, q, k, v = arrays = model_inputs(2, 4, 2, 33, 40, 40, dtype=dtype)
    o, lse = flash_attention(q, k, v, causal=True, return_lse=True, alibi_slopes=SLOPES)
    got = flash_attention_backward(do, q, k, v, o, lse, causal=True, alibi_slopes=SLOPES)
    check_model("batches", got, arrays, causal=True, alibi_slopes=SLOPES)
    do, q, k, v, o = (a.reshape(-1, *a.shape[2:]) for a in (do, q, k, v, o))
    cu_q, cu_k = np.array([0, 0, 33, 66, 66], np.int32), np.array([0, 5, 40, 80, 80], np.int32)
    slopes = np.concatenate([SLOPES[:1], SLOPES, SLOPES[:1]])
    how = {"causal": True, "alibi_slopes": slopes}
    o, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **how)
    got = flash_attention_varlen_backward(do, q, k, v, o, lse, cu_q, cu_k, **how)
    for i in (1, 2):
        rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        own, given = (got[0][rows], got[1][keys], got[2][keys]), (do[rows], q[rows], k[keys], v[keys])
        check_model(f"sequence {i}", own, given, causal=True, alibi_slopes=slopes[i])


@either_dtype
def test_packed_sequences_without_a_token(dtype: str) -> None:
    q, k = (np.ones((tokens, 2, 8), TYPES.get(dtype, dtype)) for tokens in (0, 3))
    cu_q, cu_k = np.array([0, 0], np.int32), np.array([0, 3], np.int32)
    lse = np.ones((2, 0), np.float32)
    dq, dk, dv = flash_attention_varlen_backward(q, q, k, k, q, lse, cu_q, cu_k)
    assert dq.shape == q.shape and (dk == 0).all() and (dv == 0).all()
    lse = np.full((2, 3), -np.inf, np.float32)
    dq, dk, dv = flash_attention_varlen_backward(k, k, q, q, 0 * k, lse, cu_k, cu_q)
    assert (dq == 0).all() and dk.shape == dv.shape == q.shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"do": lambda a: a[:, 1:]}, ValueError, "do has shape (1, 32, 2, 8) and q (1, 33, 2, 8)"),
        ({"o": lambda a: a.astype("f8")}, TypeError, "o is float64 and q is float32"),
        ({"lse": lambda a: a.astype("f8")}, TypeError, "lse is float64; float32 is needed"),
        ({"lse": lambda a: a.swapaxes(1, 2)}, ValueError, "lse has shape (1, 33, 2); (1, 2, 33) is needed"),
        ({"k": lambda a: a[..., :4]}, ValueError, "each key needs its value"),
        ({"do": lambda a: None}, TypeError, "do must be an array of NumPy or the device"),
        ({"causal": lambda a: 1}, TypeError, "causal must be True or False; got int 1"),
        ({"deterministic": lambda a: 1}, TypeError, "deterministic must be True or False; got int 1"),
        ({"softmax_scale": lambda a: "1"}, TypeError, "softmax_scale must be a number"),
        ({"window": lambda a: (1,)}, TypeError, "window must be a pair"),
        (
            {"alibi_slopes": lambda a: np.ones(3, "f4")},
            ValueError,
            "alibi_slopes has shape (3,); (2,) or (1, 2) is needed",
        ),
        ({"alibi_slopes": lambda a: np.ones(2)}, TypeError, "alibi_slopes is float64; float32 is needed"),
        ({"alibi_slopes": lambda a: [1, 2]}, TypeError, "alibi_slopes must be an array; got list"),
        ({"stage": lambda a: 5}, ValueError, "stage=5 is not in the ladder, which has: 8 backward"),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    do, q, k, v = model_inputs(1, 2, 2, 33, 33, 8)
    o, lse = flash_attention(q, k, v, return_lse=True)
    call: dict[str, Any] = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    for name, of in change.items():
        call[name] = of(call.get(name))
    with pytest.raises(error, match=re.escape(message)):
        flash_attention_backward(**call)


def test_a_dtype_that_no_stage_takes() -> None:
    q = np.ones((1, 5, 2, 8))
    with pytest.raises(TypeError, match=r"q is float64; the stages of gradients take .*float32"):
        flash_attention_backward(q, q, q, q, q, np.ones((1, 2, 5), np.float32))


@pytest.mark.parametrize("dtype", BY_DTYPE)
def test_stages_are_chosen_by_name_and_number(dtype: str) -> None:
    arrays = model_inputs(1, 1, 1, 5, 5, 40, dtype=dtype)
    o, lse = flash_attention(*arrays[1:], return_lse=True)
    for stage in (BY_DTYPE[dtype], 8, None):
        check_model(str(stage), flash_attention_backward(*arrays, o, lse, stage=stage), arrays)


def test_what_the_tensor_cores_cannot() -> None:
    def ask(d: int, dtype: str, stage: str | None = None) -> None:
        do, q, k, v = model_inputs(1, 1, 1, 5, 5, d, dtype=dtype)
        flash_attention_backward(do, q, k, v, q, np.zeros((1, 1, 5), np.float32), stage=stage)

    reason = LADDER["backward_mma"].why_not(head_dim=12, dtype="float16")
    assert reason == "head_dim = 12; this stage takes 8 to 256, multiples of 8"
    with pytest.raises(ValueError, match=r"hopper_backward_wide: head_dim = 264; this stage takes 8 to 256"):
        ask(264, "bfloat16")
    with pytest.raises(ValueError, match=r"stage backward_mma cannot: it takes float16 or bfloat16, not float32"):
        ask(40, "float32", "backward_mma")


# ---- planted bugs


def out_of_bounds(name: str, old: str, new: str, **more: Any) -> Bug:
    return Bug(name, old, new, error=engine.LaunchError, cpu_only=True, **more)


def no_barrier(name: str, which: int) -> Bug:
    return Bug(f"no barrier: {name}", "__syncthreads();", "", times=8, which=which, cpu_only=True)


def not_scaled(name: str, stored: str) -> Bug:
    return Bug(f"{name} not scaled", f"{stored}, scale, x)", f"{stored}, 1.0f, x)")


BUGS = (
    Bug("delta is left out", "(dp[i][j] - delta[i])", "dp[i][j]"),
    Bug("delta of the neighbours' rows", "load_rows(delta, smem.delta, y)", "load_rows(delta, smem.delta, y ^ 1)"),
    Bug("delta is added", "(dp[i][j] - delta[i])", "(dp[i][j] + delta[i])"),
    Bug("lse of the neighbours' rows", "load_rows(lse, smem.lse, y)", "load_rows(lse, smem.lse, y ^ 1)"),
    Bug("lse not in units of log2", "LOG2_E * lse[first + r]", "lse[first + r]"),
    Bug("no scale in S", "softmax_scale_log2 * s[i][j]", "s[i][j]"),
    not_scaled("dQ of the one loop", "(at.q_first + r) * params.d_q.row, dq[i]"),
    not_scaled("dK", "dk[n]"),
    not_scaled("dQ of the second loop", "(dQ + r * params.d_q.row, dq[i]"),
    Bug("P in place of dS", "dp[i][j] = p[i] * (dp[i][j] - delta[i])", "dp[i][j] = p[i]"),
    Bug("dO in place of Q", "gemm_atb(dk, smem.P, smem.Q", "gemm_atb(dk, smem.P, smem.dO"),
    Bug("dQ by the wrong keys", "= b[j][column_of(c, x)]", "= b[j ^ 1][column_of(c, x)]"),
    Bug("dQ is stored, not added", ADDS_FOUR, "reinterpret_cast<float4*>(row)[c] = a;"),
    Bug("dQ does not start at 0", "dQ[c] = 0.0f;", ";"),
    Bug("the heads of a group are not all summed", "head < (kv_head + 1) * group", "head < (kv_head + 1) * group - 1"),
    Bug("another group's head", "int head = kv_head * group;", "int head = kv_head;"),
    Bug("acc is overwritten", "acc[n][4 * c + i] += word(p[n], w)", "acc[n][4 * c + i] = word(p[n], w)"),
    Bug("no mask", "if (j * THREADS_X < low || j * THREADS_X > high) s[i][j] = 0.0f;", ";"),
    Bug("a masked P is 1", "j * THREADS_X > high) s[i][j] = 0.0f;", "j * THREADS_X > high) s[i][j] = 1.0f;"),
    Bug("one key too many before", "j * THREADS_X < low", "j * THREADS_X < low - 1"),
    Bug("one key too few", "j * THREADS_X > high", "j * THREADS_X >= high"),
    Bug("the diagonal at the top left", "kv_len - q_len + forward.window_right", "forward.window_right"),
    Bug("the border's tiles are not masked", "first_key < last_row + at.window_lo ||", ""),
    Bug("first keys forgotten", "max(first_row + at.window_lo, 0)", "max(first_row + at.window_lo + 1, 0)"),
    Bug("last words of the head forgotten", "c < D4; ++c) {\n    float4 key", "c < D4 - 1; ++c) {\n    float4 key"),
    Bug("P stored for the wrong keys", "&smem.P[x + j * THREADS_X]", "&smem.P[x * TILE_N + j]"),
    Bug("distances from the top left", "4 * y + at.kv_len - at.q_len", "4 * y", times=2, inputs="ALiBi"),
    Bug("absent rows weigh with ALiBi", "!exists || lse == NEG_INF", "lse == NEG_INF", inputs="ALiBi"),
    *(
        Bug(f"slopes of the first {what}, {where}", old, new, times=2, which=which, inputs="ALiBi")
        for what, old, new in (
            ("sequence", "HOOK_ARGUMENTS at.sequence, head,", "HOOK_ARGUMENTS 0, head,"),
            ("head", "HOOK_ARGUMENTS at.sequence, head,", "HOOK_ARGUMENTS at.sequence, 0,"),
        )
        for which, where in enumerate(("one loop", "second loop"))
    ),
    out_of_bounds(
        "one key too many written",
        "if (first_key + j >= at.kv_len) continue;",
        "if (first_key + j > at.kv_len) continue;",
    ),
    out_of_bounds("one row too many written", "if (r < at.q_len) store_row", "if (r <= at.q_len) store_row"),
    out_of_bounds("one row too many read", "in_bounds = first + j < end", "in_bounds = first + j <= end"),
    no_barrier("tiles are read too early", 0),
    no_barrier("P is read too early", 1),
    no_barrier("P is replaced while in use", 2),
    no_barrier("dS is read too early", 3),
    no_barrier("tiles are replaced while in use", 4),
    no_barrier("of dQ: tiles are read too early", 5),
    no_barrier("of dQ: dS is read too early", 6),
    no_barrier("of dQ: tiles are replaced while in use", 7),
)


SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "THREADS": 64, "THREADS_X": 8}  # for two warps


def run_check(stage: Stage, text: str, of: str = "") -> None:
    """Check another kernel text's gradients, deterministic and not, for shared heads, tails and borders."""
    arrays = inputs(2, 4, 2, 85, 70, 36)
    mask: dict[str, Any] = {"window": (30, 5)}
    if of == "ALiBi":  # with a negative slope, far keys would overflow in rows past the end
        arrays, mask = inputs(2, 4, 2, 85, 400, 36), {"alibi_slopes": np.where(SLOPES == 2, np.float32(-0.3), SLOPES)}
    expected = reference.attention_backward(*arrays, **mask)
    for deterministic in (False, True):
        got = gradients(stage, arrays, source=text, sizes=SMALL, deterministic=deterministic, **mask)
        check_gradients(stage.name, got, expected)


@pytest.mark.parametrize("engine", ["this device", *["CPU engine"] * device.ON_GPU])
def test_a_kernel_without_a_bug_passes(engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "CPU engine":
        request.getfixturevalue("cpu_engine")
    for of in ("", "ALiBi"):
        run_check(LADDER["backward"], kernel.source("08_backward.cu"), of)


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted((kernel.source("08_backward.cu"), bug) for bug in BUGS)


@pytest.mark.exhaustive(one_of_each=lambda bug: (bug.error, bug.cpu_only))
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_seen(bug: Bug, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = bug.plant(kernel.source("08_backward.cu"))
    with pytest.raises(bug.error):
        run_check(LADDER["backward"], text, bug.inputs)


def test_bugs_have_names_of_their_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
