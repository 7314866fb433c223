"""A known call: how many functions it passes through, and what it gives a GPU's driver, which is a fake here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401 - bfloat16 for NumPy
import numpy as np
import pytest

from helpers import device, engine
from helpers.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_with_kvcache,
    ring,
    rotary_and_projection,
    run,
)
from helpers.attention.calls import Attention
from helpers.attention.check import check
from helpers.attention.decoding import Decoding
from helpers.attention.kernel import COUNTS
from helpers.attention.ladder import tensor_maps
from helpers.attention.ladder.call import BackwardOptions, DecodeOptions, ForwardOptions
from helpers.attention.ladder.kinds import DeviceArrays, graph_has_its_memory
from helpers.attention.ladder.layout import address
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.reference import attention

HELPERS = str(Path(run.__file__).parents[1])
pytestmark = pytest.mark.skipif(device.ON_GPU, reason="the CPU engine stands for both here")


def inputs(*shape: int, dtype: str = "float32", seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [engine.asarray((rng.standard_normal(shape) + 0.25).astype(dtype)) for _ in range(3)]


# ---- frames


def frames(call: Callable[[], Any]) -> dict[str, int]:
    """Count the Python functions of helpers/ that a call passes through: the engine's, and others."""
    count = {"engine": 0, "others": 0}

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(HELPERS):
            count["engine" if file.startswith(f"{HELPERS}/engine") else "others"] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def decoded() -> Callable[[], Any]:
    q = inputs(2, 1, 4, 64, dtype="float16")[0]
    k, v, _ = inputs(2, 96, 2, 64, dtype="float16", seed=1)
    lengths = engine.asarray(np.array([50, 96], np.int32))
    return lambda: flash_attention_with_kvcache(q, k, v, cache_seqlens=lengths, checked=False)


def known_calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    q, k, v = inputs(1, 33, 2, 64)
    half = inputs(1, 33, 2, 60, dtype="float16")
    yield "warm", lambda: flash_attention(q, k, v), 24
    yield "q that has to be copied", lambda: flash_attention(q[:, ::-1], k, v), 36
    yield "another sign", lambda: flash_attention(q, k, v, softmax_scale=-0.1), 36
    yield "zeros for a head_dim", lambda: flash_attention(*half), 48
    yield "decoding", decoded(), 24
    tables = [engine.asarray(a) for a in rotary_and_projection.cos_sin(33, 64)]
    yield "the rotary embedding", lambda: rotary_and_projection.rotary(q, k, *tables), 24
    yield "the same in place", lambda: rotary_and_projection.rotary(q, k, *tables, in_place=True), 36
    halves = inputs(1, 33, 2, 64, dtype="float16")
    w_o = engine.asarray(np.zeros((128, 8), np.float16))
    for form in rotary_and_projection.FORMS:
        yield f"projection, {form}", partial(rotary_and_projection.attention_projection, *halves, w_o, form=form), 24


def test_a_known_call_passes_few_functions() -> None:
    """Functions of the library count, and those of the engine, which launches."""
    for name, call, most in known_calls():
        call()
        call()
        count = frames(call)
        assert count["others"] <= most and sum(count.values()) <= (120 if most < 48 else 160), (name, count)


def test_merges_of_partial_results_are_planned_and_kept_as_calls_are() -> None:
    o, part, _ = inputs(1, 8, 2, 20)
    lse, part_lse, _ = inputs(1, 2, 8)

    def merges() -> None:
        ring.merge(o, part, (0, 8), lse, part_lse)
        ring.sum_parts(o, [(part, (0, 8)), (o, (2, 10))], (0, 10))

    run.forget()
    for planned in (2, 0):
        before = COUNTS["planned"]
        merges()
        assert COUNTS["planned"] - before == planned
    assert frames(merges)["others"] <= 2 * 24


# ---- copies are steps of the plan


@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("d", [64, 60])
@pytest.mark.parametrize("stage", [None, "register_tiles", "flash_mma"])
def test_copies_of_a_plan_are_made_anew_at_each_call(scale: float, d: int, stage: str | None) -> None:
    dtype = "float16" if stage == "flash_mma" else "float32"
    for seed in range(3):
        q, k, v = inputs(1, 20, 2, d, dtype=dtype, seed=seed)
        k = engine.asarray(np.ascontiguousarray(k[:, ::-1]))[:, ::-1]  # the same numbers backwards in memory
        o = flash_attention(q, k, v, softmax_scale=scale, stage=stage)
        wide = (engine.asnumpy(a).astype(np.float64).swapaxes(1, 2) for a in (q, k, v))
        want = attention(*wide, softmax_scale=scale).swapaxes(1, 2)
        check(
            f"call {seed}", engine.asnumpy(o).astype(np.float64), want, tolerance=1e-5 if dtype == "float32" else 4e-3
        )


# ---- a GPU's driver


class OnGpu(DeviceArrays):
    """The engine's arrays posing as a GPU's: streams, captures, and what is kept for graphs."""

    def __init__(self) -> None:
        self.handle, self.captured, self.kept = 7, False, []

    def stream(self, a: Any) -> int:
        return self.handle

    def is_captured(self, stream: int) -> bool:
        return self.captured

    def keep_alive(self, arrays: Any) -> None:
        self.kept.extend(arrays)

    def pointers(self, arrays: Any) -> list[int]:
        return [a.ctypes.data for a in arrays]

    def device_id(self, a: Any) -> int:
        return 0

    def cache_keys(self, arrays: Any) -> list[tuple[Any, ...]]:
        return [(a.shape, a.strides, a.dtype, a.ctypes.data % 16, 0) for a in arrays]


class Driver:
    """Record launches: the kernel, the stream and the arguments that are addresses of arrays."""

    def __init__(self, compiled: CompiledPlan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, list[int]]] = []
        self._args = {launch.kernel: launch.args for launch in compiled.launches}
        names = list(self._args)

        def launch_kernel(function: int, *rest: Any) -> None:
            name = names[function]
            pointers = np.ctypeslib.as_array(
                (np.ctypeslib.ctypes.c_int64 * len(self._args[name])).from_address(rest[8])
            )
            self.seen.append((name, rest[7], [int(each) for each in pointers]))

        def functions(name: str) -> Any:
            return SimpleNamespace(function=SimpleNamespace(kernel=SimpleNamespace(ptr=names.index(name))))

        compiled.kernels = {name: functions(name) for name in names}
        compiled.is_compared = True
        cuda = SimpleNamespace(driver=SimpleNamespace(launchKernel=launch_kernel))
        monkeypatch.setattr(device, "ON_GPU", True)
        monkeypatch.setattr(device, "cp", SimpleNamespace(cuda=cuda, empty=engine.empty))
        monkeypatch.setattr(tensor_maps, "_driver_function", lambda: lambda *_: 0)

    def kernels(self) -> list[str]:
        """The names of the kernels launched since the last call."""
        names = [name for name, *_ in self.seen]
        self.seen.clear()
        return names


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any], OnGpu, Driver]]:
    """A function that plans a call, and returns its plan for a GPU, its arrays, their kind and the driver."""

    def plan(call: Any) -> tuple[Any, list[Any], OnGpu, Driver]:
        monkeypatch.setattr(device, "ON_GPU", False)
        monkeypatch.setattr(device, "cp", engine)
        kind, made = OnGpu(), []
        original = run.Plan

        def note(compiled: CompiledPlan, *args: Any, **more: Any) -> Any:
            made.append((compiled, args, more))
            return original(compiled, *args, **more)

        for module in ("calls", "decoding", "rotary_and_projection"):
            monkeypatch.setattr(f"helpers.attention.{module}.Plan", note)
        call.plan(dict(zip(call.arrays, map(kind.spec, kind.cache_keys([*call.arrays.values()])), strict=True)))
        compiled, args, more = made[0]
        driver = Driver(compiled, monkeypatch)
        return original(compiled, *args, **more), [*call.arrays.values()], kind, driver

    return plan


@pytest.mark.parametrize(
    ("name", "most", "launched"),
    [
        ("flash_attention", 24, ["flash_mma"]),
        ("flash_attention_backward", 28, ["backward_mma_preprocess", "backward_mma", "backward_mma_convert"]),
        ("flash_attention_with_kvcache", 24, ["split_kv"]),
        ("rotary", 24, ["rotary"]),
        ("attention_projection", 24, ["projection"]),
    ],
)
def test_a_known_call_on_a_gpu_passes_few_functions(
    name: str, most: int, launched: list[str], on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the functions of the kind of array, and two that find it and its device, too."""
    q, k, v = inputs(1, 33, 2, 64, dtype="float16")
    do, o, _ = inputs(1, 33, 2, 64, dtype="float16", seed=1)
    lse, lengths = inputs(1, 2, 33)[0], engine.asarray(np.array([20], np.int32))
    w_o, tables = (
        engine.asarray(np.zeros((128, 8), np.float16)),
        map(engine.asarray, rotary_and_projection.cos_sin(33, 64)),
    )
    arrays = {
        "flash_attention": (q, k, v),
        "flash_attention_backward": (do, q, k, v, o, lse),
        "flash_attention_with_kvcache": (q[:, :1], k, v, lengths),
        "rotary": (q, k, *tables),
        "attention_projection": (q, k, v, w_o),
    }[name]

    def decode(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return flash_attention_with_kvcache(q, k, v, cache_seqlens=lengths, checked=False)

    functions = {
        "flash_attention": flash_attention,
        "flash_attention_backward": flash_attention_backward,
        "flash_attention_with_kvcache": decode,
        "rotary": rotary_and_projection.rotary,
        "attention_projection": rotary_and_projection.attention_projection,
    }
    calls: list[Any] = []

    def stop(call: Any) -> None:
        calls.append(call)
        raise StopIteration

    with monkeypatch.context() as caught, contextlib.suppress(StopIteration):
        for module in ("calls", "decoding", "rotary_and_projection"):
            caught.setattr(f"helpers.attention.{module}.run", stop)
        functions[name](*arrays)
    (call,) = calls
    plan, given, kind, driver = on_gpu(call)
    seen: list[str] = []
    monkeypatch.setattr(run, "kind_of", lambda *_: kind)
    monkeypatch.setattr(run, "on_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(device.cp, "ndarray", engine.ndarray, raising=False)
    run._PLANS[run._find_plan(kind, call, given)[0]] = plan

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        of_kind = code.co_filename == __file__ and code.co_name in vars(OnGpu)
        if event == "call" and (code.co_filename.startswith(f"{HELPERS}/attention") or of_kind):
            seen.append(code.co_name)

    functions[name](*arrays)  # scratch is allocated
    driver.seen.clear()
    sys.setprofile(note)
    try:
        functions[name](*arrays)
    finally:
        sys.setprofile(None)
    assert [kernel.partition("<")[0] for kernel in driver.kernels()] == launched
    assert len(seen) + 2 <= most, " ".join(seen)


def test_what_was_written_once_on_a_stream_is_not_written_again(on_gpu: Any) -> None:
    """The order of hopper's tiles is written once per stream; per-thread streams have their own, and so do graphs.

    Except if a graph follows the calls before it.
    """
    q, k, v = inputs(1, 150, 2, 64, dtype="float16")
    plan, given, kind, driver = on_gpu(Attention({"q": q, "k": k, "v": v}, ForwardOptions(stage="hopper")))
    both, main = ["order_tiles", "hopper"], ["hopper"]
    for handle, captured, wanted in (
        *((7, False, both), (7, False, main), (7, False, main)),
        *((8, False, both), (8, False, main), (7, False, both)),
        *((7, True, both), (7, True, both), (7, False, main)),
        *((run.CU_STREAM_PER_THREAD, False, both), (run.CU_STREAM_PER_THREAD, False, both)),
    ):
        kind.handle, kind.captured = handle, captured
        plan(kind, given)
        assert {stream for _, stream, _ in driver.seen} == {handle}
        assert driver.kernels() == wanted, (handle, captured)
    assert len(kind.kept) == 2  # by the two captures
    kind.handle, kind.captured = 9, True
    with graph_has_its_memory():  # so it can use what is kept
        plan(kind, given)
    assert driver.kernels() == main and len(kind.kept) == 2


def test_scratch_that_is_zero_between_launches_belongs_to_a_stream(on_gpu: Any) -> None:
    """Tickets of decoding are zeroed when they are made, and used by all plans on the stream."""
    q = inputs(2, 1, 4, 64, dtype="float16")[0]
    k, v, _ = inputs(2, 96, 2, 64, dtype="float16", seed=1)
    arrays = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": engine.asarray(np.array([50, 96], np.int32))}
    run.forget()
    plan, given, kind, driver = on_gpu(Decoding(arrays, DecodeOptions()))

    def scratch() -> tuple[int, ...]:
        arrays = plan._scratch_on(kind, given[0], kind.handle)[0]
        assert not np.asarray(arrays[-1]).any()
        return tuple(map(address, arrays))

    own = scratch()
    plan(kind, given)
    assert driver.kernels() == ["split_kv"] and scratch() == own
    kind.handle = 8
    assert scratch() != own
    kind.handle, kind.captured = 7, True
    captured = plan._scratch_on(kind, given[0], 7)[0]
    assert tuple(map(address, captured)) != own and len(kind.kept) == 3
    kind.captured = False
    assert scratch() == own


def test_scratch_of_a_known_call_is_one_block(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arrays are in it one after the other, each at a multiple of 256 bytes, as from an allocator."""
    do, q, k = inputs(1, 150, 2, 64, dtype="float16")
    arrays = {"do": do, "q": q, "k": k, "v": k, "o": q, "lse": inputs(1, 2, 150)[0]}
    plan, given, kind, _ = on_gpu(Attention(arrays, BackwardOptions(stage="backward_mma")))
    blocks: list[Any] = []
    seen: list[list[int]] = []
    empty = kind.empty
    monkeypatch.setattr(kind, "empty", lambda *how: blocks.append(empty(*how)) or blocks[-1])
    plan._launches = plan._again = [lambda places, stream: seen.append(places)]
    plan(kind, given)
    (block,), (places,), scratch = blocks, seen, plan._scratch
    assert len(scratch) == 3 and len(places) == len(plan._names) + 3
    end = address(block)
    for at, (_, spec, size) in zip(places[-3:], scratch, strict=True):
        assert at >= end and not (at - address(block)) % 256
        end = at + size * spec.dtype.itemsize
    assert end <= address(block) + block.nbytes


def test_calls_on_two_devices_share_no_arguments() -> None:
    """They contain a kernel's handle, which belongs to one device."""
    q, k, v = inputs(2, 96, 2, 64, dtype="float16")
    cached = {"q": q[:, :1], "k_cache": k, "v_cache": v, "cache_seqlens": engine.asarray(np.array([50, 96], np.int32))}
    for call in (Attention({"q": q, "k": k, "v": v}, ForwardOptions()), Decoding(cached, DecodeOptions())):
        kind, made = DeviceArrays(), []
        specs = dict(zip(call.arrays, map(kind.spec, kind.cache_keys([*call.arrays.values()])), strict=True))
        for number in (0, 0, 1):
            plan = call.plan({name: spec._replace(device=number) for name, spec in specs.items()})
            made.append(plan._compiled.arguments)
        assert made[0] is made[1] and made[0] is not made[2]


def test_copies_and_wide_results_of_a_captured_call_are_kept(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 33, 2, 60, dtype="float16")
    plan, given, kind, driver = on_gpu(Attention({"q": q, "k": k, "v": v}, ForwardOptions(return_lse=True)))
    for name in ("zeros", "ascontiguousarray", "array"):
        monkeypatch.setattr(device.cp, name, getattr(engine, name), raising=False)
    o, lse = plan(kind, given)
    assert o.shape == q.shape and o.flags.c_contiguous and lse.shape == (1, 2, 33) and not kind.kept
    kind.captured = True
    plan(kind, given)
    assert driver.kernels() == ["flash_mma"] * 2
    assert [a.shape[-1] for a in kind.kept] == [64, 64, 64, 64, 33]
