"""run, xray_stage and expect: notebooks' shortcuts for kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from helpers.attention import kernel, reference
from helpers.attention.check import TOLERANCE, check, expect, make_inputs
from helpers.attention.ladder import BACKWARD, FORWARD, LADDER
from helpers.attention.ladder.steps import by_number
from helpers.lesson.shortcuts import (
    expect_gradients,
    fetched_keys,
    first_finding,
    gradients,
    launch_params,
    run,
    stage_of,
    tensor_map,
    writers,
    xray_gradients,
    xray_stage,
)

HALF = next(
    name
    for name, s in reversed(FORWARD.items())
    if s.why_not(head_dim=16, dtype="float16") is None and not s.slow_to_compile
)


def model(heads: int, kv_heads: int, n: int, n_kv: int, dtype: type) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    shapes = (2, n, heads, 16), (2, n_kv, kv_heads, 16), (2, n_kv, kv_heads, 16)
    return tuple((rng.standard_normal(shape) + 0.25).astype(dtype) for shape in shapes)


SLOW_BUILDS = ("fp16x3", "tf32")  # the X-ray's builds take seconds each
ONE_HEAD = [
    pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SLOW_BUILDS))
    for name, stage in FORWARD.items()
    if "float32" in stage.dtypes
]


@pytest.mark.parametrize("name", ONE_HEAD)
def test_one_head(name: str) -> None:
    q, k, v = make_inputs(33, 40, 16)
    check(name, run(name, q, k, v), expect(q, k, v).o)
    report = xray_stage(name, q, k, v)
    report.assert_clean()
    assert report.traffic["O"].written == 4 * q.size


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (9, 3), "softmax_scale": 0.5}], ids=str)
def test_arrays_of_a_model(dtype: type, mask: dict) -> None:
    arrays = model(4, 2, 33, 20, dtype)
    expected = expect(*arrays, **mask)
    assert expected.o.shape == arrays[0].shape and expected.lse.shape == (2, 4, 33)
    assert (expected.tolerance == TOLERANCE) == (dtype is np.float32)
    name = "heads_and_masks" if dtype is np.float32 else HALF
    check(name, run(name, *arrays, **mask), expected.o, tolerance=expected.tolerance)


def test_the_tolerance_of_half_types_is_that_of_rounding() -> None:
    """An error of four roundings of P is refused, and so is one of a thousandth of the largest output."""
    q, k, v = model(1, 1, 40, 40, np.float16)
    expected = expect(q, k, v)
    eps = float(np.finfo(np.float16).eps)
    assert eps * np.abs(expected.o).max() <= expected.tolerance < 4 * eps * np.abs(v).max()
    off = expected.o + 2 * expected.tolerance
    assert not check("off", off, expected.o, tolerance=expected.tolerance, must_pass=False)


def test_rows_that_see_nothing() -> None:
    q, k, v = model(2, 2, 40, 20, np.float16)
    expected = expect(q, k, v, causal=True)
    assert np.isneginf(expected.lse[:, :, :20]).all() and not expected.o[:, :20].any()
    check("some rows see no key", run(HALF, q, k, v, causal=True), expected.o, tolerance=expected.tolerance)


def test_another_text_and_other_sizes() -> None:
    q, k, v = make_inputs(33, 40, 16)
    code = kernel.source("03_online_softmax.cu").replace("acc[c] / l_i", "2.0f * acc[c] / l_i")
    check("doubled", run("online_softmax", q, k, v, code=code), 2 * reference.attention(q, k, v))
    small = {"BLOCK_M": 32, "BLOCK_N": 8}
    report = xray_stage("online_softmax", q, k, v, sizes=small)
    assert report.traffic["K"].read == 2 * 4 * k.size, "two blocks of 32 rows"


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="no stage 'fast'; there are: naive, tiled"):
        stage_of("fast")
    heads = (np.stack([a] * 2) for a in make_inputs(5, 5, 8))
    with pytest.raises(ValueError, match="2 launches, and only one can be X-rayed"):
        xray_stage("tiled", *heads)
    assert stage_of(LADDER["tiled"]) is LADDER["tiled"]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 3)])
def test_fetched_keys_are_those_that_a_row_of_the_block_sees(window: tuple[int, int]) -> None:
    sizes = {"BLOCK_M": 64, "BLOCK_N": 32, "THREADS": 128, "THREADS_X": 8}
    fetched = fetched_keys("heads_and_masks", *make_inputs(100, 130, 8), sizes=sizes, window=window)
    seen = reference.visible(100, 130, window=window)
    for rows in (slice(0, 64), slice(64, 100)):
        assert (fetched[rows] == seen[rows].any(axis=0)).all()


def test_fetched_keys_of_several_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="a single head"):
        fetched_keys("heads_and_masks", *model(2, 2, 8, 8, np.float32), sizes={"BLOCK_M": 64})


# ---- gradients

TINY = {"BLOCK_M": 32, "BLOCK_N": 16, "THREADS": 64, "THREADS_X": 8}


def one_head(n: int = 64, d: int = 16) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal((n, d), dtype=np.float32) + np.float32(0.25) for _ in range(4)]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 3), "softmax_scale": 0.5}], ids=str)
def test_gradients_of_a_model(dtype: type, options: dict) -> None:
    q, k, v = model(4, 2, 33, 20, dtype)
    do, _, _ = model(4, 2, 33, 20, dtype)
    name = next(name for name, stage in BACKWARD.items() if np.dtype(dtype).name in stage.dtypes)
    expected = expect_gradients(do, q, k, v, **options)
    outputs = gradients(name, do, q, k, v, deterministic=True, **options)
    for a, b, tolerance in zip(outputs, expected, expected.tolerance, strict=False):
        assert a.dtype == dtype and a.shape == b.shape
        check(name, a, b, tolerance=tolerance)
        assert not check("off", b + 2 * tolerance, b, tolerance=tolerance, must_pass=False)
    zeros = expect_gradients(0 * do, q, k, v, **options)
    assert all((a == 0).all() for a in zeros[:3])


def test_the_x_ray_of_gradients() -> None:
    given = one_head()
    for deterministic, kernels in ((False, 2), (True, 3)):
        reports = xray_gradients("backward", *given, sizes=TINY, deterministic=deterministic)
        assert len(reports) == kernels and all(report.clean for report in reports.values())
    text = kernel.source("08_backward.cu").replace("(dp[i][j] - delta[i])", "dp[i][j]")
    dq, dk, dv = gradients("backward", *given, sizes=TINY, code=text)
    expected = expect_gradients(*given)
    off = [np.abs(a - b).max() > t for a, b, t in zip((dq, dk, dv), expected, expected.tolerance, strict=False)]
    assert off == [True, True, False]


def test_the_first_finding_names_what_it_is_given_names_for(cpu_engine: None) -> None:
    step, sizes = by_number("hopper")[9], {"HEAD_DIM": 16, "BLOCK_M": 128, "BLOCK_N": 16, "STAGES": 2}
    rings = [f"{ring}_{state}[{i}]" for ring in "kv" for state in ("full", "empty") for i in range(2)]
    given = [a.astype(np.float16) for a in make_inputs(128, 80, 16)]
    release = "if (leader) k_ring.release(k_stage);\n      mask"
    few = (release, release.replace("leader", "leader && consumer"))
    kind, text = first_finding(step, *given, few, sizes=sizes, mbarriers=["q_full[0]", "q_full[1]", *rings])
    assert kind == "deadlock" and text.endswith("of k_empty[1]. It expects 1 more arrival"), text


def test_the_struct_of_a_launch() -> None:
    q, k, v = model(4, 2, 20, 24, np.float16)
    do = q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)  # heads first in memory
    forward = launch_params(q, k, v, q, window=(7, 0))[0]
    assert forward["q"].tolist() == (20 * 64, 64, 16) and forward["k"].tolist() == (24 * 32, 32, 16)
    assert [int(forward[name]) for name in ("N", "N_kv", "heads", "kv_heads")] == [20, 24, 4, 2]
    assert [int(forward[f"window_{side}"]) for side in ("left", "right")] == [7, 0] and forward["softmax_scale"] == 0.25
    both = launch_params(q, k, v, q, do, q, k, v, window=(7, 0))[0]
    assert both["forward"] == forward and both["d_o"].tolist() == (20 * 64, 16, 320)
    assert both["d_k"].tolist() == (24 * 32, 32, 16)


def test_a_tensor_map_of_a_matrix(cpu_engine: None) -> None:
    from helpers import engine

    a = engine.zeros((20, 128), np.float16)
    described = engine.tensor_map.described(tensor_map(a, 16))
    assert described is not None and described.address == a.ctypes.data
    assert (described.dims, described.strides, described.box) == ((128, 20, 1, 1), (256, 256, 256), (64, 16, 1, 1))


def test_who_writes_which_tile() -> None:
    given = one_head()
    diagonal = np.eye(4, dtype=int)
    one_loop = writers(*given, sizes=TINY)
    assert list(one_loop) == ["backward: dQ", "backward: dK", "backward: dV"]
    np.testing.assert_array_equal(one_loop["backward: dQ"], np.full((2, 4), 2))
    np.testing.assert_array_equal(one_loop["backward: dK"], diagonal)
    np.testing.assert_array_equal(one_loop["backward: dV"], diagonal)
    causal = writers(*given, sizes=TINY, causal=True)
    np.testing.assert_array_equal(causal["backward: dQ"], [[2, 2, 0, 0], [2, 2, 2, 2]])
    two_loops = writers(*given, sizes=TINY, deterministic=True)
    assert list(two_loops) == ["backward: dK", "backward: dV", "backward_dq: dQ"]
    np.testing.assert_array_equal(two_loops["backward_dq: dQ"], np.eye(2, dtype=int))
