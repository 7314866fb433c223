"""Wrong numbers that were once returned without an error, found by random calls against float64."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import oracle
import pytest

from helpers.attention import flash_attention, flash_attention_varlen, flash_attention_with_kvcache, make_block_mask
from helpers.attention import run as calls
from helpers.attention.check import check
from helpers.attention.ladder import launch
from helpers.attention.ladder.kinds import without_gradients
from helpers.attention.ladder.score_mod import parse_score_mod
from helpers.attention.rotary_and_projection import cos_sin
from helpers.device import ON_GPU, cp

LAUNCH = launch.DirectLaunch if ON_GPU else launch.EngineLaunch


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def decode(seed: int, **more: Any) -> np.ndarray:
    """Decode a token with the same cache, and new q, k and v for each seed."""
    q, k, v = (cp.asarray(random(1, 1, 2, 64, seed=4 * seed + i)) for i in range(3))
    cache = (cp.asarray(random(1, 400, 2, 64, seed=i)) for i in range(2))
    lengths = cp.asarray(np.array([390], np.int32))
    return cp.asnumpy(flash_attention_with_kvcache(q, *cache, cache_seqlens=lengths, k=k, v=v, num_splits=3, **more))


def test_threads_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the launches of one thread's call, another's would overwrite the rotated q in the shared scratch."""
    tables = dict(zip(("rotary_cos", "rotary_sin"), map(cp.asarray, cos_sin(400, 64)), strict=True))
    expected = [decode(seed, **tables) for seed in range(2)]
    found: list[bool] = []
    at_once = LAUNCH.__call__

    def slowly(self: Any, *args: Any) -> None:
        at_once(self, *args)
        time.sleep(0.01)

    monkeypatch.setattr(LAUNCH, "__call__", slowly)

    def work(seed: int) -> None:
        found.extend(np.array_equal(decode(seed, **tables), expected[seed]) for _ in range(4))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted launch has drawn tickets, which must be 0 before the next."""
    expected = decode(1)
    decode(2)
    with monkeypatch.context() as patched:

        def interrupted(self: Any, *args: Any) -> None:
            for scratch in calls._SCRATCH.values():
                scratch["tickets"][...] = 1
            raise KeyboardInterrupt

        patched.setattr(LAUNCH, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decode(3)
    np.testing.assert_array_equal(decode(1), expected)


def test_sinks_without_any_key() -> None:
    """A sink has the same weight as with keys that no query sees, and a prefix is merged with it."""
    q, none, sinks = random(1, 2, 2, 64), random(1, 0, 2, 64), np.array([0.5, -1], np.float32)
    cu, no_length = np.array([0, 2], np.int32), np.zeros(1, np.int32)
    cu_none, how = np.zeros(2, np.int32), {"sinks": sinks, "return_lse": True}
    for name, (o, lse) in {
        "batches": flash_attention(q, none, none, **how),
        "packed": flash_attention_varlen(q[0], none[0], none[0], cu, cu_none, **how),
        "a cache": flash_attention_with_kvcache(q, none, none, cache_seqlens=no_length, **how),
    }.items():
        assert not o.any(), name
        assert np.array_equal(lse.reshape(2, 2), sinks[:, None].repeat(2, axis=1)), name
    prefix = random(3, 2, 64, seed=1)
    o = flash_attention_with_kvcache(
        q, none, none, cache_seqlens=no_length, prefix_k=prefix, prefix_v=prefix, sinks=sinks
    )
    check("a prefix", o, oracle.exact(q, prefix[None], prefix[None], sinks=sinks)[0], tolerance=1e-5)


def test_a_number_that_differs_in_its_sign_alone() -> None:
    q = random(1, 4, 1, 64)
    of_sign = {"score_mod": "score + copysignf(1.0f, x) * float(kv_idx)"}
    results = [flash_attention(q, q, q, **of_sign, mod_args={"x": np.float32(x)}) for x in (0.0, -0.0)]
    assert not np.allclose(*results)


def test_a_block_mask_that_reads_arguments_of_the_call() -> None:
    """They may differ in each call, so its tiles are computed in each."""
    q, mask = cp.asarray(random(1, 200, 1, 64)), make_block_mask("document[q_idx] == document[kv_idx]")
    results = []
    for at in (64, 128, 64):
        args = {"document": cp.asarray((np.arange(200) < at).astype(np.int32))}
        results.append(cp.asnumpy(flash_attention(q, q, q, mask_mod=mask, mod_args=args)))
    assert not np.allclose(*results[:2])
    np.testing.assert_array_equal(results[2], results[0])
    mod, _ = parse_score_mod(mask_mod=mask, mod_args=args)
    assert mod is not None and mod.mask_changes  # the CPU engine recomputes them in each call of any mask
    mod, _ = parse_score_mod(mask_mod=make_block_mask(mask.mask_mod, args))
    assert mod is not None and not mod.mask_changes


def test_the_negative_of_a_tensor_in_e4m3() -> None:
    """A negative scale negates q: the sign of each byte, which for PyTorch is a number."""
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(random(3, 16)).to(torch.float8_e4m3fn)
    for given in (values, values.view(torch.uint8), values[:, ::2]):
        got = without_gradients().negative(given)
        assert got.dtype == given.dtype and got.is_contiguous()
        assert torch.equal(got.view(torch.float8_e4m3fn).float(), -given.view(torch.float8_e4m3fn).float())


@pytest.mark.skipif(not ON_GPU, reason="the CPU engine has no graphs")
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_graph_of_a_call_with_a_prefix(library: str) -> None:
    """Each replay writes what the call passes from one launch to the next, in memory that no later call may get."""
    torch = pytest.importorskip("torch") if library == "torch" else None
    kind = (lambda a: cp.asarray(a)) if torch is None else (lambda a: torch.from_dlpack(cp.asarray(a)))
    shapes = {"q": (2, 1, 8, 64), "k_cache": (2, 400, 8, 64), "v_cache": (2, 400, 8, 64)}
    shapes |= {"prefix_k": (512, 8, 64), "prefix_v": (512, 8, 64)}
    of_seed = [
        {n: random(*s, seed=10 * seed + i, dtype=np.float16) for i, (n, s) in enumerate(shapes.items())}
        for seed in range(2)
    ]
    lengths = kind(np.array([390, 17], np.int32))
    expected, there = [], []
    for arrays in of_seed:
        there.append({name: kind(a) for name, a in arrays.items()})
        keys, values = (np.concatenate([np.stack([arrays[f"prefix_{n}"]] * 2), arrays[f"{n}_cache"]], 1) for n in "kv")
        one = [
            oracle.exact(arrays["q"][i : i + 1], keys[i : i + 1, : 512 + n], values[i : i + 1, : 512 + n])[0]
            for i, n in enumerate((390, 17))
        ]
        expected.append(np.concatenate(one))

    def call(arrays: dict[str, Any]) -> Any:
        return flash_attention_with_kvcache(**arrays, cache_seqlens=lengths)

    stream = cp.cuda.Stream(non_blocking=True)
    static = {name: kind(a) for name, a in of_seed[0].items()}
    cp.cuda.Device().synchronize()
    with (
        stream,
        contextlib.nullcontext() if torch is None else torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)),
    ):
        call(there[1])
        cp.cuda.Device().synchronize()
        if torch is None:
            stream.begin_capture()
            o = call(static)
            graph = stream.end_capture()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                o = call(static)
        later = [call(there[i % 2]) for i in range(6)]
        graph.launch(stream) if torch is None else graph.replay()
        cp.cuda.Device().synchronize()
    for name, got, i in [("the graph", o, 0), *((f"call {i} behind it", a, i % 2) for i, a in enumerate(later))]:
        check(name, cp.asnumpy(cp.from_dlpack(got)), expected[i], tolerance=2e-3)
