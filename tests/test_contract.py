"""The contract of a stage: several launches of several kernels with scratch, in either direction; repeated calls."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import oracle
import pytest
from cuda_files import cuda_text
from half_gradients import TYPES
from half_gradients import compare as compare_gradients
from half_gradients import inputs as gradient_inputs
from half_gradients import reference as gradient_reference

from helpers.attention import (
    calls,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    flash_attention_varlen_backward,
    flash_attention_with_kvcache,
    forget,
    kernel,
    reference,
    warm_up,
)
from helpers.attention.check import check
from helpers.attention.fp8 import quantise
from helpers.attention.ladder import FORWARD, LADDER, Launch, Stage, limits
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.extras import ROTARY_TABLES
from helpers.attention.ladder.launch import Part
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.ladder.stage import Tuning
from helpers.attention.run import Cache
from helpers.device import ON_GPU, cp

# Two kernels of one file: the gradient of sum(O * dO) with respect to V, with P in scratch memory.
GRADIENT_OF_V = cuda_text("contract_gradient_of_v")


def _scratch(call: Call, sizes: Mapping[str, int]) -> dict[str, Spec]:
    return {"P": Spec.dense((call.arrays["q"].shape[2], call.arrays["k"].shape[2]), np.float32)}


def _launches(stage: Stage, call: Call, sizes: Mapping[str, int]) -> list[Launch]:
    """Launch each kernel once per head."""
    n, n_kv = (np.int32(call.arrays[name].shape[2]) for name in "qk")
    rows, keys = ((-(-int(size) // sizes["BLOCK_M"]),) for size in (n, n_kv))
    scale = np.float32(call.softmax_scale)
    found = []
    for head in np.ndindex(call.arrays["q"].shape[:2]):
        first = (Part("q", head), Part("k", head), "P", n, n_kv, scale)
        found.append(stage.launch(rows, sizes, first, "weights"))
        found.append(stage.launch(keys, sizes, ("P", Part("do", head), Part("dv", head), n, n_kv), "gradient"))
    return found


BACKWARD = Stage(
    *(99, "gradient_of_v", GRADIENT_OF_V, "P again, then its product with dO"),
    Tuning(lambda head_dim, shared_limit: {"BLOCK_M": 32}),
    launches=_launches,
    scratch=_scratch,
    direction="backward",
)


def heads(rng: np.random.Generator, n: int) -> Any:
    return cp.asarray(rng.standard_normal((2, 3, n, 8), dtype=np.float32))


def test_a_backward_stage_of_two_kernels_with_scratch() -> None:
    rng = np.random.default_rng(5)
    arrays = {"q": heads(rng, 33), "k": heads(rng, 40), "do": heads(rng, 33)}
    arrays["dv"] = cp.full(arrays["k"].shape, cp.nan, dtype=cp.float32)
    call = Call({name: Spec.of(a) for name, a in arrays.items()}, 0.25, (-1, -1), rows=33, sequences=2, aligned=True)
    ready = CompiledPlan(BACKWARD, call, BACKWARD.defines(8))
    assert [launch.kernel for launch in ready.launches] == ["weights", "gradient"] * 6
    ready.bind(arrays)()
    q, k, do = (cp.asnumpy(arrays[name]).astype(np.float64) for name in ("q", "k", "do"))
    p = reference.softmax(0.25 * q @ k.swapaxes(-1, -2))
    check("dV", arrays["dv"], p.swapaxes(-1, -2) @ do)


def test_only_forward_stages_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 5, 2, 8), np.float32)
    last = list(FORWARD.values())[-1]
    monkeypatch.setattr(calls, "LADDER", {**LADDER, "gradient_of_v": BACKWARD})
    assert cp.asnumpy(flash_attention(q, q, q)).shape == q.shape
    with pytest.raises(ValueError, match=f"stage=99 is not in the ladder, which has: 1 naive, .*{last.name}$"):
        flash_attention(q, q, q, stage=99)


def test_a_named_stage_is_the_only_one_that_is_launched() -> None:
    """If it cannot do the call, only its own reason is reported, whatever others support."""
    names: list[str] = []
    q = np.ones((1, 5, 2, 8), np.float32)
    with kernel.launches_replaced(lambda self, *_, **__: names.append(self.name)):
        flash_attention(q, q, q, stage="naive")
    assert set(names) == {"naive"}
    with pytest.raises(ValueError, match="naive") as refused:
        flash_attention(q, q, q, causal=True, stage="naive")
    assert "online_softmax" not in str(refused.value)


# ---- repeated calls


def model_inputs(*shape: int, dtype: str = "float32", seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(cp.asarray((rng.standard_normal(shape) + 0.25).astype(dtype)) for _ in range(3))


def counted(what: str) -> Callable[[], int]:
    """A function that returns how much kernel.COUNTS has grown since now."""
    before = kernel.COUNTS[what]
    return lambda: kernel.COUNTS[what] - before


def test_a_call_is_checked_once_and_its_arrays_may_change() -> None:
    checks = counted("checked")
    for seed in range(3):
        arrays = model_inputs(2, 33, 4, 8, seed=seed)
        check(f"call {seed}", flash_attention(*arrays, causal=True), oracle.exact(*arrays, causal=True)[0])
    assert checks() == 1


OTHER_CALLS: dict[str, Any] = {
    "shape": lambda q, k, v: flash_attention(q[:, :20], k, v),
    "strides": lambda q, k, v: flash_attention(q[:, ::2], k[:, ::2], v[:, ::2]),
    "causal": lambda q, k, v: flash_attention(q, k, v, causal=True),
    "window": lambda q, k, v: flash_attention(q, k, v, window=(5, 5)),
    "another window": lambda q, k, v: flash_attention(q, k, v, window=(5, 6)),
    "scale": lambda q, k, v: flash_attention(q, k, v, softmax_scale=0.5),
    "lse": lambda q, k, v: flash_attention(q, k, v, return_lse=True),
    "stage": lambda q, k, v: flash_attention(q, k, v, stage="heads_and_masks"),
    "dtype": lambda q, k, v: flash_attention(*(a.astype("float16") for a in (q, k, v))),
    "alignment": lambda q, k, v: flash_attention(q[..., 1:5], k[..., 1:5], v[..., 1:5]),
    "aligned": lambda q, k, v: flash_attention(q[..., :4], k[..., :4], v[..., :4]),
}


def test_what_a_call_depends_on_is_in_its_key() -> None:
    """Each call differs from all others in one thing, and is checked and right the first and the second time."""
    arrays, checks = model_inputs(2, 33, 4, 8), counted("checked")
    first = {name: call(*arrays) for name, call in OTHER_CALLS.items()}
    assert checks() == len(OTHER_CALLS)
    for name, call in OTHER_CALLS.items():
        for once, again in zip(_all(first[name]), _all(call(*arrays)), strict=True):
            np.testing.assert_array_equal(cp.asnumpy(once), cp.asnumpy(again), err_msg=name)
    assert checks() == len(OTHER_CALLS)
    windowed = {name: cp.asnumpy(first[name]) for name in ("causal", "window", "another window", "scale")}
    check("another window", windowed["another window"], oracle.exact(*arrays, window=(5, 6))[0])
    assert len({a.tobytes() for a in windowed.values()}) == len(windowed)


def _all(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_equal_keys_of_other_types_are_refused_after_a_good_call_too() -> None:
    arrays = model_inputs(1, 5, 2, 8)
    flash_attention(*arrays, causal=True, window=(1, 0), softmax_scale=1.0, stage=5)
    for wrong in ({"causal": 1}, {"window": (True, 0)}, {"softmax_scale": True}, {"stage": True}):
        with pytest.raises((TypeError, ValueError)):
            flash_attention(*arrays, **{"causal": True, "window": (1, 0), "softmax_scale": 1.0, "stage": 5, **wrong})


def test_what_cannot_be_read_in_place_is_copied_at_each_call() -> None:
    """The copies are the same plan's arguments each time."""
    plans = counted("planned")
    for seed in range(2):
        q, k, v = model_inputs(1, 33, 2, 8, seed=seed)
        check("backwards", flash_attention(q[:, ::-1], k, v), oracle.exact(q, k, v)[0][:, ::-1])
    assert plans() == 1


def test_the_latest_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is not among them is planned again, and evicts the oldest."""
    monkeypatch.setattr(Cache, "most", 3)
    with kernel.launches_replaced(lambda *_, **__: None):
        for n, is_new in ((1, 1), (2, 1), (3, 1), (1, 0), (4, 1), (2, 0), (1, 1), (4, 0)):
            plans = counted("planned")
            flash_attention(*model_inputs(1, n, 2, 8))
            assert plans() == is_new, n


# ---- calls of one family: other shapes, strides and addresses


def forward_of_lengths(n: int, n_kv: int, dtype: str) -> Any:
    q, k, v = (model_inputs(1, rows, heads, 16, dtype=dtype)[0] for rows, heads in ((n, 4), (n_kv, 2), (n_kv, 2)))
    return flash_attention(q, k, v, causal=True, return_lse=True)


def backward_of_lengths(n: int, n_kv: int, dtype: str) -> Any:
    q, do = model_inputs(1, n, 4, 16, dtype=dtype)[:2]
    k, v = model_inputs(1, n_kv, 2, 16, dtype=dtype)[:2]
    o, lse = flash_attention(q, k, v, return_lse=True)
    return flash_attention_backward(do, q, k, v, o, lse)


def packed_of_lengths(n: int, n_kv: int, dtype: str) -> Any:
    q = model_inputs(1, n, 4, 16, dtype=dtype)[0][0]
    k, v = (a[0] for a in model_inputs(1, n_kv, 2, 16, dtype=dtype)[:2])
    cu_q, cu_k = (cp.asarray(np.array([0, total // 2, total], np.int32)) for total in (n, n_kv))
    return flash_attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=n, max_seqlen_k=n_kv)


def biased_of_lengths(n: int, n_kv: int, dtype: str) -> Any:
    q, (k, v) = model_inputs(1, n, 4, 16, dtype=dtype)[0], model_inputs(1, n_kv, 2, 16, dtype=dtype)[:2]
    return flash_attention(q, k, v, bias=cp.asarray(np.zeros((n, 8 * n_kv), dtype))[:, :n_kv])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("call", [forward_of_lengths, backward_of_lengths, packed_of_lengths, biased_of_lengths])
def test_a_call_of_a_known_family_plans_nothing_anew(call: Any, dtype: str) -> None:
    """An example is a token generated with a cache one longer each time."""
    chosen, loaded = counted("chosen"), counted("loaded")
    call(20, 40, dtype)
    assert chosen() and loaded()
    chosen, loaded = counted("chosen"), counted("loaded")
    longer_by = 2 if call is biased_of_lengths else 1  # two texts: two neighbours of a bias are loaded together, or not
    for longer in range(1, 5):
        call(20 + longer % 3, 40 + longer_by * longer, dtype)
    assert not chosen() and not loaded()
    forget()
    call(20, 40, dtype)
    assert chosen() and loaded()


def random_view(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Return an array of this shape inside a larger one: other strides, another order of axes, gaps."""
    order = rng.permutation(3)
    room = [shape[axis] + int(rng.integers(0, 3)) for axis in order]
    wide = cp.asarray((rng.standard_normal((*room, shape[3] + 8 * int(rng.integers(0, 3)))) + 0.25).astype(dtype))
    first = [int(rng.integers(0, have - shape[axis] + 1)) for have, axis in zip(room, order, strict=True)]
    part = tuple(slice(at, at + shape[axis]) for at, axis in zip(first, order, strict=True))
    return wide[part][..., : shape[3]].transpose([*np.argsort(order).tolist(), 3])


@pytest.mark.parametrize(("dtype", "stage"), [("float32", None), ("float16", None), ("float16", "hopper")])
def test_random_shapes_and_layouts_through_one_family(
    dtype: str, stage: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A struct's field left over from the previous call would show, because the calls differ in everything."""
    if stage is not None and LADDER[stage].why_not(head_dim=16, dtype=dtype) is not None:
        pytest.skip("not on this device")
    monkeypatch.setattr(limits, "multiprocessors", lambda: 3)  # so that blocks of 10 take several tiles
    rng, families = np.random.default_rng(3), counted("chosen")
    for number in range(16):
        batch, kv_heads, group = (int(rng.integers(1, 4)) for _ in range(3))
        n, n_kv = (int(rng.integers(1, 90)) for _ in range(2))
        q = random_view(rng, (batch, n, kv_heads * (group + 1), 16), dtype)
        k, v = (random_view(rng, (batch, n_kv, kv_heads, 16), dtype) for _ in range(2))
        options = {"causal": bool(number % 2), "softmax_scale": 0.25}
        o, lse = flash_attention(q, k, v, return_lse=True, stage=stage, **options)
        q, k, v = (cp.asnumpy(a).astype(np.float64).swapaxes(1, 2) for a in (q, k, v))
        k, v = (np.repeat(a, group + 1, axis=1) for a in (k, v))
        want = reference.attention(q, k, v, **options, return_lse=True)
        tolerance = 1e-5 if dtype == "float32" else 4e-3
        check(f"call {number}", cp.asnumpy(o).swapaxes(1, 2), want[0], tolerance=tolerance)
        check(f"lse {number}", cp.asnumpy(lse), want[1], tolerance=tolerance)
    assert families() == 2  # causal and not causal


@pytest.mark.parametrize("apart", ["one stream", "two streams", "two devices"])
def test_a_cache_that_two_threads_share(apart: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plans, launches and evicts what the other may be using."""
    if apart == "two streams" and not ON_GPU:
        pytest.skip("the CPU engine launches on no stream")
    if apart == "two devices" and not (ON_GPU and cp.cuda.runtime.getDeviceCount() > 1):
        pytest.skip("two GPUs are needed")
    with_10 = FORWARD["hopper"].why_not(head_dim=16, dtype="float16") is None
    monkeypatch.setattr(Cache, "most", 2)
    cases = []
    for n in range(20, 26):
        half = with_10 and n % 2
        arrays = [cp.asnumpy(a) for a in model_inputs(1, n, 4, 16, dtype="float16" if half else "float32", seed=n)]
        how = {"stage": "hopper", "tolerance": 2e-3} if half else {"stage": None, "tolerance": 1e-5}
        cases.append((arrays, how, oracle.exact(*arrays, causal=True)[0]))
    failures: list[BaseException] = []

    def work(first: int, where: contextlib.ExitStack) -> None:
        try:
            with where:
                if apart == "two devices":
                    where.enter_context(cp.cuda.Device(first % 2))
                if apart != "one stream":
                    where.enter_context(cp.cuda.Stream(non_blocking=True))
                for number in range(24):
                    arrays, how, want = cases[(first + number) % len(cases)]
                    o = flash_attention(*map(cp.asarray, arrays), causal=True, stage=how["stage"])
                    check(f"call {number}", cp.asnumpy(o), want, tolerance=how["tolerance"])
                    if number % 7 == 3:
                        forget()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first, contextlib.ExitStack())) for first in (0, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# ---- warming up for later calls


@pytest.mark.usefixtures("only_launched_built")
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_no_call_compiles_after_a_warm_up(packed: bool) -> None:
    count = warm_up(4, 13, kv_heads=2, dtype="float32", causal=True, gradients=True, packed=packed)
    assert count >= 2 and count == warm_up(
        4, 13, kv_heads=2, dtype="float32", causal=True, gradients=True, packed=packed
    )
    compiled = counted("compiled")
    rng = np.random.default_rng(0)
    for n, n_kv in ((1, 1), (1, 300), (40, 40), (300, 70)):
        q, do = (rng.standard_normal((1, n, 4, 13), dtype=np.float32) for _ in range(2))
        k, v = (rng.standard_normal((1, n_kv, 2, 13), dtype=np.float32) for _ in range(2))
        if packed:
            cu = tuple(np.array([0, rows], np.int32) for rows in (n, n_kv))
            o, lse = flash_attention_varlen(q[0], k[0], v[0], *cu, causal=True, return_lse=True)
            flash_attention_varlen_backward(do[0], q[0], k[0], v[0], o, lse, *cu, causal=True)
        else:
            o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
            flash_attention_backward(do, q, k, v, o, lse, causal=True)
    assert compiled() == 0


@pytest.mark.usefixtures("only_launched_built")
@pytest.mark.exhaustive(one_of_each=lambda paged: paged)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_no_decoding_call_compiles_after_a_warm_up(paged: bool) -> None:
    """Whatever the numbers of sequences and of new tokens, with appends and splits too."""
    how: dict[str, Any] = {"kv_heads": 1, "dtype": "float32", "decoding": True, "paged": paged}
    few = limits.Limits(limits.most_shared(), 3, limits.compute_capability())  # multiprocessors, for 7 sequences
    with limits.pretend_gpu(few):
        assert 3 <= warm_up(8, 64, **how) == warm_up(8, 64, **how)
        compiled = counted("compiled")
        rng = np.random.default_rng(0)
        for batch, tokens, splits in ((1, 1, 0), (2, 5, 3), (7, 1, 0), (7, 2, 1)):
            q = rng.standard_normal((batch, tokens, 8, 64), dtype=np.float32)
            caches = [np.zeros((batch, 16, 1, 64), np.float32) for _ in "kv"]
            new = [rng.standard_normal((batch, tokens, 1, 64), dtype=np.float32) for _ in "kv"]
            pages = {"block_table": np.arange(batch, dtype=np.int32)[:, None]} if paged else {}
            lengths = np.full(batch, 3, np.int32)
            more: dict[str, Any] = {"k": new[0], "v": new[1], "num_splits": splits, "return_lse": True, **pages}
            flash_attention_with_kvcache(q, *caches, cache_seqlens=lengths, **more)
        assert compiled() == 0


@pytest.mark.usefixtures("only_launched_built")
def test_no_call_with_a_cache_in_e4m3_compiles_after_a_warm_up() -> None:
    """In pages of 12, with another head_dim for V and a rotary embedding."""
    how: dict[str, Any] = {"decoding": True, "paged": True, "page_size": 12, "rotary_dim": 32}
    assert warm_up(2, 96, **how, v_head_dim=64, cache_dtype="float8_e4m3fn") >= 2
    compiled = counted("compiled")
    q, k, v = (np.ones((1, tokens, 2, d), np.float16) for tokens, d in ((2, 96), (2, 96), (2, 64)))
    caches = [np.zeros((4, 20, 2, d), np.uint8) for d in (96, 64)]
    given = {"k": k, "v": v, "cache_seqlens": np.array([7]), "block_table": np.array([[3, 1]])}
    flash_attention_with_kvcache(q, *caches, **given, **dict.fromkeys(ROTARY_TABLES, np.ones((40, 16), np.float32)))
    assert compiled() == 0


@pytest.mark.usefixtures("only_launched_built")
@pytest.mark.exhaustive
def test_no_call_with_a_tree_functions_or_a_prefix_compiles_after_a_warm_up() -> None:
    mods: dict[str, Any] = {"score_mod": "score * by[kv_head]", "mod_args": {"by": np.array([1, 2], np.float32)}}
    how: dict[str, Any] = {"kv_heads": 2, "causal": True, "decoding": True}
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 2, 12, 64), dtype=np.float32).astype(np.float16)
    caches = [rng.standard_normal((3, 40, 2, 64), dtype=np.float32).astype(np.float16) for _ in "kv"]
    shared = {f"prefix_{name}": cache[0, :20].copy() for name, cache in zip("kv", caches, strict=True)}
    lengths = np.array([40, 9, 23], np.int32)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tree": True, **mods}, {"tree": np.array([-1, -1], np.int32), **mods}),
        ({"prefix": True}, shared),  # through flash_attention
        ({"prefix": True}, {**shared, "softmax_scale": 0.1}),
        ({"prefix": True, **mods}, {**shared, **mods}),
    ]
    for warm, given in cases:
        assert warm_up(12, 64, **how, **warm) >= 2
        compiled = counted("compiled")
        for rows in (q, q[:, :1]):  # 14 reads this prefix
            tokens = {"tree": given["tree"][: rows.shape[1]]} if "tree" in given else {}
            flash_attention_with_kvcache(rows, *caches, cache_seqlens=lengths, **{**given, **tokens})
        assert compiled() == 0, warm


def test_a_warm_up_of_e4m3() -> None:
    q = quantise(np.ones((1, 5, 2, 16), np.float32))
    assert warm_up(2, 16, dtype="float8_e4m3fn") >= 1
    compiled = counted("compiled")
    flash_attention(q, q, q)
    assert compiled() == 0


def test_a_warm_up_is_refused_as_its_calls_are() -> None:
    with pytest.raises(ValueError, match="4 heads of q cannot share 3 heads"):
        warm_up(4, 16, kv_heads=3)
    with pytest.raises(ValueError, match="no stage can"):
        warm_up(4, 512)
    refused: list[tuple[type[Exception], str, tuple[Any, Any], dict[str, Any]]] = [
        (ValueError, "heads = 0; 1 or more", (0, 16), {}),
        (ValueError, "heads = -1; 1 or more", (-1, 16), {}),
        (TypeError, "heads must be a whole number; got float", (4.0, 16), {}),
        (ValueError, "head_dim = -8; 1 or more", (4, -8), {}),
        (ValueError, "kv_heads = 0; 1 or more", (4, 16), {"kv_heads": 0}),
        (ValueError, "kv_heads = -1; 1 or more", (4, 16), {"kv_heads": -1}),
        (TypeError, "dtype = 'float64'; there are float32", (4, 16), {"dtype": "float64"}),
        (TypeError, "dtype = <class", (4, 16), {"dtype": np.float16}),
        (TypeError, "gradients must be True or False", (4, 16), {"gradients": "no"}),
        (TypeError, "packed must be True or False", (4, 16), {"packed": 2}),
        (TypeError, "deterministic must be True or False", (4, 16), {"deterministic": 1}),
        (TypeError, "causal must be True or False", (4, 16), {"causal": 1}),
        (TypeError, "window must be a pair", (4, 16), {"window": (1,)}),
        (TypeError, "decoding must be True or False", (4, 64), {"decoding": 1}),
        (ValueError, "gradients=True needs decoding=False", (4, 64), {"decoding": True, "gradients": True}),
        (ValueError, "paged=True needs decoding=True", (4, 64), {"paged": True}),
        (ValueError, "q has head_dim = 12; a multiple of 8", (4, 12), {"decoding": True}),
        (ValueError, "cache_dtype=float8_e4m3fn needs decoding=True", (4, 64), {"cache_dtype": "float8_e4m3fn"}),
        (ValueError, "tree=True needs decoding=True", (4, 64), {"tree": True}),
        (TypeError, "prefix must be True or False", (4, 64), {"decoding": True, "prefix": 1}),
        (ValueError, "a tree needs causal=True", (4, 64), {"decoding": True, "tree": True}),
        (TypeError, "cache_dtype = 'float32'; float16 or", (4, 64), {"decoding": True, "cache_dtype": "float32"}),
        (ValueError, "page_size = 0", (4, 64), {"decoding": True, "paged": True, "page_size": 0}),
        (ValueError, "v_cache has head_dim = 260", (4, 64), {"decoding": True, "v_head_dim": 260}),
        (ValueError, "rotary_dim = 24, and head_dim", (4, 64), {"decoding": True, "rotary_dim": 24}),
        (TypeError, "split_kv takes float32", (4, 64), {"decoding": True, "dtype": "float8_e4m3fn"}),
        (ValueError, "stage='tiled' does not decode", (4, 64), {"decoding": True, "stage": "tiled"}),
    ]
    for error, message, args, options in refused:
        with pytest.raises(error, match=message):
            warm_up(*args, **options)


def test_who_waits_at_a_terminal_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for at_a_terminal, words in ((False, ""), (True, "compiling scale\n")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=at_a_terminal: answer)
        with kernel._print_if_slow("compiling scale", seconds=0.01):
            for thread in threading.enumerate():  # however long they take to start
                if isinstance(thread, threading.Timer):
                    thread.join()
        with kernel._print_if_slow("nothing", seconds=3600.0):
            pass
        assert capsys.readouterr().err == words


# ---- half types: head_dim that is not a multiple of 8


@pytest.mark.exhaustive(each_value=())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("d", [12, 59, 111])
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_columns_of_zeros_fill_up_a_head_dim(dtype: str, d: int, packed: bool) -> None:
    """The scale is that of d, and the added columns are not returned."""
    do, q, k, v = gradient_inputs((1, 4, 33, d), 70, 2, dtype)
    *wanted, o_wanted, lse_wanted = gradient_reference(do, q, k, v, window=(-1, 0))
    given = [a.swapaxes(1, 2) for a in (do, q, k, v)]
    if packed:
        given = [a[0] for a in given]
        cu = tuple(np.array([0, n], np.int32) for n in (33, 70))
        o, lse = flash_attention_varlen(*given[1:], *cu, causal=True, return_lse=True)
        got = flash_attention_varlen_backward(*given, o, lse, *cu, causal=True)
    else:
        o, lse = flash_attention(*given[1:], causal=True, return_lse=True)
        got = flash_attention_backward(*given, o, lse, causal=True)
    assert o.shape == given[1].shape and o.flags.c_contiguous
    assert [a.shape for a in got] == [a.shape for a in given[1:]]
    heads_first = [a.reshape(1, *a.shape[-3:]).swapaxes(1, 2) for a in (o, *got)]
    check("o", heads_first[0], o_wanted, tolerance=0.02 if dtype == "bfloat16" else 0.003)
    check("lse", lse.reshape(lse_wanted.shape), lse_wanted, tolerance=0.01)
    compare_gradients("gradients", heads_first[1:], (do, q, k, v), wanted=wanted, window=(-1, 0))


# ---- nothing to compute

EMPTY = {
    "no batch": ((0, 5), (0, 6)),
    "no query": ((2, 0), (2, 6)),
    "no key": ((2, 5), (2, 0)),
    "neither": ((2, 0), (2, 0)),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_axis(name: str, dtype: str) -> None:
    """The output is empty, or zeros where there is no key, and gradients are zero, as in PyTorch."""
    (batch, n), (_, n_kv) = EMPTY[name]
    q, do = (cp.zeros((batch, n, 4, 16), dtype) + 1 for _ in range(2))
    k, v = (cp.zeros((batch, n_kv, 2, 16), dtype) + 1 for _ in range(2))
    for _ in range(2):
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        assert o.shape == q.shape and o.dtype == q.dtype and not cp.asnumpy(o).any()
        assert lse.shape == (batch, 4, n) and (cp.asnumpy(lse) == -np.inf).all()
        gradients = flash_attention_backward(do, q, k, v, o, lse, causal=True)
        for gradient, a in zip(gradients, (q, k, v), strict=True):
            assert gradient.shape == a.shape and not cp.asnumpy(gradient).any()
    host = flash_attention(*map(cp.asnumpy, (q, k, v)))
    assert isinstance(host, np.ndarray) and host.shape == q.shape and not host.any()


@pytest.mark.parametrize("stage", [None, "flash_mma", "hopper"])
def test_packed_sequences_without_any_key(stage: str | None) -> None:
    if stage is not None and LADDER[stage].why_not(head_dim=64, dtype="float16") is not None:
        pytest.skip("not on this device")
    q, no_keys = cp.zeros((7, 2, 64), np.float16) + 1, cp.zeros((0, 2, 64), np.float16)
    cu_q, cu_k = (cp.asarray(np.array(ends, np.int32)) for ends in ([0, 7], [0, 0]))
    for most in ({}, {"max_seqlen_q": 7, "max_seqlen_k": 0}):
        arrays = (q, no_keys, no_keys, cu_q, cu_k)
        o, lse = flash_attention_varlen(*arrays, return_lse=True, stage=stage, **most)
        assert o.shape == q.shape and not cp.asnumpy(o).any() and (cp.asnumpy(lse) == -np.inf).all()
    if stage is not None:
        heads_first = (a.swapaxes(0, 1) for a in (q, no_keys, no_keys))
        launch, o = LADDER[stage].prepare(*heads_first, cu_seqlens=([0, 7], [0, 0]))
        launch()
        assert o.shape == (2, 7, 64) and not cp.asnumpy(o).any()


# ---- packed lengths without a read by the host

CU = np.array([0, 5, 5, 33], np.int32)


def packed_inputs() -> tuple[Any, ...]:
    return (*(a[0] for a in model_inputs(1, 33, 4, 8)), cp.asarray(CU), cp.asarray(CU))


@pytest.mark.parametrize("most", [28, 100])
def test_the_longest_sequence_given_by_the_caller(most: int) -> None:
    arrays, checks = packed_inputs(), counted("checked")
    expected = flash_attention_varlen(*arrays, causal=True)
    for _ in range(2):
        o = flash_attention_varlen(*arrays, causal=True, max_seqlen_q=most, max_seqlen_k=most)
        np.testing.assert_array_equal(cp.asnumpy(o), cp.asnumpy(expected))
    assert checks() == 1 + (most != 28)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "28", 2**29])
def test_a_longest_sequence_that_is_no_number_of_rows(wrong: Any) -> None:
    with pytest.raises(TypeError, match="max_seqlen_k must be a whole number of rows, or None; got"):
        flash_attention_varlen(*packed_inputs(), max_seqlen_q=28, max_seqlen_k=wrong)


@pytest.mark.skipif(ON_GPU, reason="there the numbers are not read")
def test_a_longest_sequence_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="max_seqlen_q = 27, and the longest sequence of q has 28 rows"):
        flash_attention_varlen(*packed_inputs(), max_seqlen_q=27, max_seqlen_k=28)


# ---- CUDA graphs and streams, on a GPU

on_gpu = pytest.mark.skipif(not ON_GPU, reason="the CPU engine has no graphs")


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_in_a_cupy_graph(dtype: str, packed: bool) -> None:
    arrays = model_inputs(2, 65, 4, 64, dtype=dtype)
    more: dict[str, Any] = {"causal": True}
    call = flash_attention
    if packed:
        cu = cp.asarray(np.array([0, 30, 65], np.int32))
        arrays, call = (*(a[0] for a in arrays), cu, cu), flash_attention_varlen
        more |= {"max_seqlen_q": 35, "max_seqlen_k": 35}
    expected = cp.asnumpy(call(*arrays, **more))
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call(*arrays, **more)
        stream.begin_capture()
        o = call(*arrays, **more)
        graph = stream.end_capture()
        kept, arrays[0][...] = arrays[0].copy(), 0
        graph.launch()
        stream.synchronize()
        assert not np.array_equal(cp.asnumpy(o), expected)
        arrays[0][...] = kept
        graph.launch()
        stream.synchronize()
        np.testing.assert_array_equal(cp.asnumpy(o), expected)


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_graph_of_10_after_everything_was_forgotten(library: str, packed: bool) -> None:
    """Arrays of a captured launch, including its table of tiles, are not reused while the graph may replay it."""
    if LADDER["hopper"].why_not(head_dim=128, dtype="float16") is not None:
        pytest.skip("not on this GPU")
    arrays = model_inputs(2, 2048, 8, 128, dtype="float16")
    more: dict[str, Any] = {"causal": True, "stage": "hopper"}
    call = flash_attention
    if packed:
        cu = cp.asarray(np.array([0, 700, 2048], np.int32))
        arrays, call = (*(a[0] for a in arrays), cu, cu), flash_attention_varlen
        more |= {"max_seqlen_q": 1348, "max_seqlen_k": 1348}
    if library == "torch":
        torch = pytest.importorskip("torch")
        arrays = tuple(torch.from_dlpack(a) for a in arrays)
        expected = call(*arrays, **more).cpu().numpy()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = call(*arrays, **more)
        replay, read = graph.replay, lambda: o.cpu().numpy()
    else:
        expected = cp.asnumpy(call(*arrays, **more))
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            call(*arrays, **more)
            stream.begin_capture()
            o = call(*arrays, **more)
            graph = stream.end_capture()
        replay, read = lambda: graph.launch(stream), lambda: cp.asnumpy(o)
    forget()
    for n in range(513, 560):  # other tables, at the captured one's address if it were free
        flash_attention(*model_inputs(1, n, 8, 128, dtype="float16"), causal=True, stage="hopper")
    for _ in range(3):
        o[...] = 0
        cp.cuda.Device().synchronize()
        replay()
        cp.cuda.Device().synchronize()
        np.testing.assert_array_equal(read(), expected)


@on_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_in_a_torch_graph(packed: bool) -> None:
    torch = pytest.importorskip("torch")
    arrays = [torch.randn(2, 65, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    more: dict[str, Any] = {"causal": True}
    call = flash_attention
    if packed:
        cu = torch.tensor([0, 30, 65], dtype=torch.int32, device="cuda")
        arrays, call = [*(a[0] for a in arrays), cu, cu], flash_attention_varlen
        more |= {"max_seqlen_q": 35, "max_seqlen_k": 35}
    expected = call(*arrays, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(*arrays, **more)
    o.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)


@on_gpu
def test_torch_calls_run_on_torchs_current_stream() -> None:
    torch = pytest.importorskip("torch")
    arrays = [torch.zeros(1, 65, 4, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
    values = [torch.randn_like(a) for a in arrays]
    expected = flash_attention(*values)
    flash_attention(*arrays)
    torch.cuda.synchronize()
    for _ in range(2):  # the first such call with this stream's layout, and a cached one
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for a, value in zip(arrays, values, strict=True):
                a.copy_(value)
            o = flash_attention(*arrays)
        stream.synchronize()
        assert torch.equal(o, expected)
        for a in arrays:
            a.zero_()
        torch.cuda.synchronize()
        forget()


def test_a_stage_can_be_another_ones_variant() -> None:
    """The steps of a climb are variants of one stage."""
    q, k, v = (np.random.default_rng(0).standard_normal((33, 8), dtype=np.float32) for _ in range(3))
    step = LADDER["online_softmax"].changed(tiles=lambda *_: {"BLOCK_M": 32, "BLOCK_N": 8})
    check("a step", step(q, k, v), reference.attention(q, k, v))


def test_lengths_in_a_view_with_gaps() -> None:
    """The kernel gets a pointer without strides, so such a view is copied in each call."""
    q, k, v, cu, _ = packed_inputs()
    gaps = cp.asarray(np.stack([CU, CU + 1], axis=1).ravel())[::2]
    expected = cp.asnumpy(flash_attention_varlen(q, k, v, cu, cu, causal=True))
    for more in ({}, {"max_seqlen_q": 28, "max_seqlen_k": 28}):
        for _ in range(2):
            o = flash_attention_varlen(q, k, v, gaps, gaps, causal=True, **more)
            np.testing.assert_array_equal(cp.asnumpy(o), expected)
