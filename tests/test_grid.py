"""Calls whose grid is not (tiles, heads, sequences): too many of them for a grid, and packed sequences in slots.

All other tests check the kernels with one grid per call: here the same kernels must write the same bits.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from planted import Bug, check_all_can_be_planted

from helpers import device, engine
from helpers.attention import kernel
from helpers.attention.ladder import LADDER, Stage, backward, launches
from helpers.attention.ladder.call import Call, Spec
from helpers.attention.ladder.launch import Launch, Part
from helpers.attention.ladder.layout import address
from helpers.attention.ladder.plan import CompiledPlan
from helpers.attention.ladder.steps import BASES, CLIMBS
from helpers.xray import xray

HEAD_DIM = 16
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
GRIDS = [
    "register_tiles",
    "heads_and_masks",
    "flash_wmma",
    "flash_mma",
    pytest.param("flash_cute", marks=pytest.mark.exhaustive),
]
GRADIENTS = [("backward", False), ("backward", True), ("backward_mma", False), ("backward_mma", True)]
Arrays = tuple[Any, ...]


def stage_of(name: str) -> Stage:
    stage = LADDER[name]
    if reason := stage.why_not(head_dim=HEAD_DIM, dtype=stage.dtypes[0]):
        pytest.skip(reason)
    return stage


def random(stage: Stage, *shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(7)
    dtype = TYPES[stage.dtypes[0]]
    return tuple(device.cp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(dtype)) for shape in shapes)


def qkv(stage: Stage, lead: tuple[int, ...], kv_heads: int, n: int, n_kv: int) -> Arrays:
    """Make q, k and v: (..., heads, rows, HEAD_DIM), with heads = lead[-1]."""
    keys = (*lead[:-1], kv_heads, n_kv, HEAD_DIM)
    return random(stage, (*lead, n, HEAD_DIM), keys, keys)


def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MAX_GRID_YZ", 65535)


def forward(stage: Stage, *arrays: Any, **options: Any) -> tuple[CompiledPlan, list[np.ndarray]]:
    """Return the plan, and o and lse from its launches."""
    ready, named, result = stage.plan(*arrays, return_lse="lse" in stage.features, **options)
    ready.bind(named)()
    return ready, [device.cp.asnumpy(a) for a in (result if isinstance(result, tuple) else (result,))]


def gradients(stage: Stage, do: Any, q: Any, k: Any, v: Any, **options: Any) -> tuple[CompiledPlan, list[np.ndarray]]:
    """Return the plan, and dq, dk and dv; o and lse come from a forward pass in one grid."""
    of_forward = LADDER["heads_and_masks" if q.dtype == np.float32 else "flash_mma"]
    mine = {name: option for name, option in options.items() if name in ("causal", "cu_seqlens")}
    with pytest.MonkeyPatch.context() as patched:
        unlimited(patched)
        run, saved = of_forward.prepare(q, k, v, return_lse=True, **mine)
    run()
    ready, named, result = backward.plan(stage, do, q, k, v, *saved, **options)
    ready.bind(named)()
    return ready, [device.cp.asnumpy(a) for a in result]


def assert_same(got: Sequence[np.ndarray], want: Sequence[np.ndarray], *, exactly: bool = True) -> None:
    """Check for the same bits, or equal sums in another order."""
    for mine, other in zip(got, want, strict=True):
        assert not np.isnan(other.astype(np.float32)).any()
        if exactly:
            np.testing.assert_array_equal(mine, other)
        else:
            error = 1e-5 if other.dtype == np.float32 else 4e-3
            np.testing.assert_allclose(mine.astype(float), other.astype(float), rtol=error, atol=error)


# ---- more heads and sequences than a grid has room for


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the ladder plan for a GPU whose grid has space for only this many heads and sequences."""
    monkeypatch.setattr(launches, "MAX_GRID_YZ", 3)
    return 3


def several(ready: CompiledPlan, most: int) -> Sequence[Launch]:
    """Return the launches, and check that each fits the grid."""
    assert all(max(launch.grid[1:]) <= most for launch in ready.launches)
    return ready.launches


HEADS = {  # (batch, heads, kv_heads)
    "batches": (7, 2, 2),
    "heads": (2, 7, 7),
    "both": (4, 5, 5),
    "groups": (1, 8, 4),
    "batches and groups": (4, 6, 3),
    "a large group": (2, 8, 2),
    "one head of k": (1, 7, 1),
}


@pytest.mark.exhaustive(each_value=("name",))
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_a_forward(
    name: str, heads: str, causal: bool, small_grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, (batch, of_q, of_k) = stage_of(name), HEADS[heads]
    if "gqa" not in stage.features:
        causal, of_k = False, of_q
    arrays = qkv(stage, (batch, of_q), of_k, 33, 40)
    ready, got = forward(stage, *arrays, causal=causal)
    assert len(several(ready, small_grid)) > 1
    assert sum(int(np.prod(launch.grid[1:])) for launch in ready.launches) == batch * of_q
    unlimited(monkeypatch)
    whole, want = forward(stage, *arrays, causal=causal)
    assert len(whole.launches) == 1
    assert_same(got, want)


def test_parts_of_arrays_as_models_have_them(small_grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides in any order; all batches share k and v."""
    stage = LADDER["heads_and_masks"]
    q, k, v = (
        device.cp.asarray(device.cp.asnumpy(a).swapaxes(1, 2).copy()).swapaxes(1, 2)
        for a in qkv(stage, (5, 4), 2, 20, 33)
    )
    k, v = (np.broadcast_to(a[:1], a.shape) if a is k else a[:, :, ::-1] for a in (k, v))
    ready, got = forward(stage, q, k, v)
    assert len(several(ready, small_grid)) == 4
    unlimited(monkeypatch)
    assert_same(got, forward(stage, q, k, v)[1])


EXTRAS = ("bias", "bias of heads", "bias of batches", "alibi", "alibi of batches", "positions", "positions of batches")


@pytest.mark.exhaustive(each_value=("name",))
@pytest.mark.parametrize("name", ["heads_and_masks", "flash_mma"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_parts_of_what_a_call_has_beside(
    name: str, extra: str, small_grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, rng, (batch, heads, n, n_kv) = stage_of(name), np.random.default_rng(1), (4, 6, 33, 40)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def positions(*lead: int) -> dict[str, Any]:
        tables = {"rotary_cos": normal(50, HEAD_DIM // 2), "rotary_sin": normal(50, HEAD_DIM // 2)}
        rows = (rng.integers(0, 50, (*lead, size), dtype=np.int32) for size in (n, n_kv))
        return {**tables, "rotary_positions": tuple(rows)}

    dtype = TYPES[stage.dtypes[0]]
    options: dict[str, Any] = {
        "bias": lambda: {"bias": normal(batch, heads, n, n_kv).astype(dtype)},
        "bias of heads": lambda: {"bias": normal(heads, 1, n_kv)},
        "bias of batches": lambda: {"bias": normal(batch, 1, n, n_kv) > 0},
        "alibi": lambda: {"alibi_slopes": abs(normal(heads))},
        "alibi of batches": lambda: {"alibi_slopes": abs(normal(batch, heads))},
        "positions": positions,
        "positions of batches": lambda: positions(batch),
    }[extra]()
    arrays = qkv(stage, (batch, heads), 3, n, n_kv)
    ready, got = forward(stage, *arrays, causal=True, **options)
    launches = [launch for launch in several(ready, small_grid) if not launch.file]  # except for the pass that rotates
    assert len(launches) == 2 * 3
    unlimited(monkeypatch)
    assert_same(got, forward(stage, *arrays, causal=True, **options)[1])


LENGTHS = ((3, 5), (70, 40), (0, 9), (1, 1), (33, 90), (5, 0), (130, 140))


def packed(lengths: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    cu_q, cu_k = (np.cumsum([0, *of], dtype=np.int32) for of in zip(*lengths, strict=True))
    return cu_q, cu_k


@pytest.mark.exhaustive(each_value=("name",))
@pytest.mark.parametrize("name", GRIDS[1:])
@pytest.mark.parametrize("causal", [False, True])
def test_more_packed_sequences_than_a_grid_has_room_for(
    name: str, causal: bool, small_grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get slots, and their heads several launches; slopes belong to sequences."""
    stage, cu_seqlens = stage_of(name), packed(LENGTHS)
    q, k, v = qkv(stage, (8,), 4, int(cu_seqlens[0][-1]), int(cu_seqlens[1][-1]))
    slopes = np.linspace(0, 1, 8 * len(LENGTHS), dtype=np.float32).reshape(-1, 8)
    options: dict[str, Any] = {"alibi_slopes": slopes} if "alibi" in stage.features else {}
    ready, got = forward(stage, q, k, v, cu_seqlens=cu_seqlens, causal=causal, **options)
    assert [launch.grid[1:] for launch in several(ready, small_grid)] == [(2, 1)] * 4
    own = [arg.index for arg in ready.launches[1].args if isinstance(arg, Part) and arg.name == "alibi_slopes"]
    assert own in ([], [(slice(len(LENGTHS)), slice(2, 4))]), "those of all sequences"
    unlimited(monkeypatch)
    whole, want = forward(stage, q, k, v, cu_seqlens=cu_seqlens, causal=causal, **options)
    assert [launch.grid[1:] for launch in whole.launches] == [(8, len(LENGTHS))]
    assert_same(got, want)


@pytest.mark.exhaustive(each_value=("name",))
@pytest.mark.parametrize(("name", "deterministic"), GRADIENTS)
@pytest.mark.parametrize("heads", HEADS)
def test_parts_of_gradients(
    name: str, deterministic: bool, heads: str, small_grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, (batch, of_q, of_k) = LADDER[name], HEADS[heads]
    do, q, k, v = *random(stage, (batch, of_q, 40, HEAD_DIM)), *qkv(stage, (batch, of_q), of_k, 40, 50)
    options = {"causal": batch > 1, "deterministic": deterministic}
    if batch > 1:
        options["alibi_slopes"] = np.linspace(0, 1, batch * of_q, dtype=np.float32).reshape(batch, of_q)
    if name == "backward_mma" and of_q // of_k > small_grid:
        with pytest.raises(ValueError, match=r"\d heads of q share one of k and v; gradients take 3 at most"):
            gradients(stage, do, q, k, v, **options)
        return
    ready, got = gradients(stage, do, q, k, v, **options)
    assert len(several(ready, small_grid)) > 3
    unlimited(monkeypatch)
    whole, want = gradients(stage, do, q, k, v, **options)
    assert len(whole.launches) == 2 + (name == "backward_mma" or deterministic)
    assert_same(got, want, exactly=deterministic)


@pytest.mark.parametrize(("name", "deterministic"), GRADIENTS)
def test_gradients_of_more_packed_sequences_than_a_grid_has_room_for(
    name: str, deterministic: bool, small_grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, (cu_q, cu_k) = LADDER[name], packed(LENGTHS)
    arrays = *random(stage, (8, int(cu_q[-1]), HEAD_DIM)), *qkv(stage, (8,), 4, int(cu_q[-1]), int(cu_k[-1]))
    options = {"causal": True, "deterministic": deterministic, "cu_seqlens": (cu_q, cu_k)}
    ready, got = gradients(stage, *arrays, **options)
    assert len(several(ready, small_grid)) > 3
    unlimited(monkeypatch)
    assert_same(got, gradients(stage, *arrays, **options)[1], exactly=deterministic)


def test_a_step_with_tensor_maps_says_that_the_grid_is_too_small(small_grid: int) -> None:
    """Its maps describe whole arrays."""
    (stage,) = (step for step in CLIMBS["hopper"] if step.file.endswith("10_03_by_wgmma.cu"))
    if reason := stage.why_not(head_dim=64, dtype="float16"):
        pytest.skip(reason)
    q, k, v = random(stage, *((1, 4, 64, 64),) * 3)
    with pytest.raises(ValueError, match="4 heads, 1 sequences; a grid takes 3 at most"):
        stage.plan(q, k, v)


@pytest.mark.usefixtures("small_grid")
def test_a_launch_without_checks_finds_the_parts(cpu_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with few batches and one with many share a kernel; the driver gets the addresses of each one's arrays."""
    stage, seen, known = LADDER["heads_and_masks"], [], None
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=77))

    def launch_kernel(function: int, *rest: Any) -> None:
        pointers = np.frombuffer(ctypes.string_at(rest[8], 8 * 5), np.int64).tolist()
        seen.append([int(np.frombuffer(ctypes.string_at(each, 8), np.int64)[0]) for each in pointers])

    for batch, count in ((2, 1), (7, 3), (2, 1)):
        ready, arrays, _ = stage.plan(*qkv(stage, (batch, 2), 1, 9, 9), return_lse=True)
        ready.arguments = known = ready.arguments if known is None else known
        ready.kernels = {"heads_and_masks": SimpleNamespace(function=function)}
        with monkeypatch.context() as patched:
            driver = SimpleNamespace(driver=SimpleNamespace(launchKernel=launch_kernel))
            patched.setattr(device, "cp", SimpleNamespace(cuda=driver))
            direct = ready.direct(tuple(arrays))
        seen.clear()
        for launch in direct:
            launch([address(a) for a in arrays.values()], 0)
        q_k_v_o_lse = [launch.args[:5] for launch in ready.launches]
        wanted = [
            [address(arrays[arg.name][arg.index] if isinstance(arg, Part) else arrays[arg]) for arg in args]
            for args in q_k_v_o_lse
        ]
        assert seen == wanted and len(seen) == count


# ---- packed sequences in slots

FIND_TILE = """
#include "packed_tiles.cuh"
extern "C" __global__ void tiles_of_slots(int* found, const int* cu_seqlens, int sequences, int block) {
  int tile = blockIdx.x, sequence = blockIdx.z;
  find_tile(tile, sequence, block, sequences, cu_seqlens);
  found[2 * (blockIdx.x * blockDim.x + threadIdx.x)] = sequence;
  found[2 * (blockIdx.x * blockDim.x + threadIdx.x) + 1] = tile;
}
"""
rng = np.random.default_rng(11)
BATCHES = {
    "several": (3, 70, 1, 33, 129),
    "empty ones": (0, 7, 0, 0, 66, 0, 5, 0),
    "one": (65,),
    "whole tiles": (64, 16, 0, 32, 128, 16),
    "a long one first": (900, *(5,) * 40),
    "a long one last": (*(5,) * 40, 900),
    "33": (*(1,) * 32, 50),
    "1,100": (*rng.integers(0, 3, 1000), 700, *rng.integers(0, 90, 99)),
    "nothing": (0,) * 70,
}
SLOTS_BUGS = (
    Bug("one slot too early", "tile -= sequences;", "tile -= sequences - 1;"),
    Bug("one slot too late", "if (tile < 0) {", "if (tile <= 0) {"),
    Bug("the tile before", "(tile + 1) * block", "tile * block"),
    Bug("the sequence that begins there", "[sequence + lane] < end", "[sequence + lane] <= end"),
    Bug("the sequence after", "before)) - 1) * step", "before))) * step"),
    Bug("too few rounds", "left > 1;", "left > 32;"),
    Bug("the first tile twice", "tile += 1 - cu", "tile -= cu"),
    Bug("slots of the sequence before", "cu_seqlens[sequence] / block;", "cu_seqlens[max(sequence - 1, 0)] / block;"),
)


def check_find_tile(lengths: Sequence[int], block: int, text: str) -> None:
    """Check that every tile has one slot: first those that begin a sequence, then the others in order."""
    compiled = kernel.load(text, "tiles_of_slots")
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
    slots = int(cu_seqlens[-1]) // block + len(lengths)
    found = device.cp.full((slots, 64, 2), -1, dtype=np.int32)
    compiled((slots,), (64,), (found, device.cp.asarray(cu_seqlens), np.int32(len(lengths)), np.int32(block)))
    threads = device.cp.asnumpy(found)
    assert (threads == threads[:, :1]).all()
    first, others = np.split(threads[:, 0], [len(lengths)])
    assert first.tolist() == [[sequence, 0] for sequence in range(len(lengths))]
    tiles = [[i, tile] for i, length in enumerate(lengths) for tile in range(1, -(-int(length) // block))]
    assert (others >= [0, 1]).all() and (others[:, 0] < len(lengths)).all()
    assert [each for each in others.tolist() if each[1] * block < lengths[each[0]]] == tiles


def find_tile_text(text: str | None = None) -> str:
    """Return the kernel with the header's text in place of its #include."""
    header = text if text is not None else (kernel.KERNELS / "packed_tiles.cuh").read_text()
    return FIND_TILE.replace('#include "packed_tiles.cuh"', header.replace("#pragma once", ""))


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("block", [16, 64])
def test_every_tile_has_a_slot(lengths: str, block: int) -> None:
    check_find_tile(BATCHES[lengths], block, find_tile_text())


@pytest.mark.parametrize("bug", SLOTS_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_the_slots_is_seen(bug: Bug, cpu_engine: Any) -> None:
    text = find_tile_text()
    check_all_can_be_planted([(text, bug)])
    with pytest.raises((AssertionError, engine.LaunchError)):
        for lengths in BATCHES.values():
            check_find_tile(lengths, 16, bug.plant(text))


def test_stages_have_slots_where_their_kernels_do() -> None:
    for stage in (*LADDER.values(), *BASES.values(), *(step for climb in CLIMBS.values() for step in climb)):
        in_kernel = bool(re.search(r"hook_tile\(\s*tile, sequence, ", kernel.source(stage.file)))
        assert (stage.slots is launches.in_slots) == in_kernel, stage.file


LONG = (*((5, 9), (0, 3), (1, 1)) * 12, (260, 150), (64, 64), (7, 0), (129, 140))


def in_slots_or_not(stage: Stage) -> tuple[Arrays, dict[str, Any]]:
    cu_seqlens = packed(LONG)
    arrays = qkv(stage, (4,), 2, *(int(cu[-1]) for cu in cu_seqlens))
    return arrays, {"cu_seqlens": cu_seqlens}


@pytest.mark.exhaustive(each_value=("name",))
@pytest.mark.parametrize("name", GRIDS[1:])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (40, 9)}], ids=str)
def test_slots_of_a_forward(name: str, mask: dict[str, Any]) -> None:
    stage = stage_of(name)
    arrays, options = in_slots_or_not(stage)
    in_slots, got = forward(stage, *arrays, **options, **mask, sizes={"SLOTS": 1})
    plain, want = forward(stage, *arrays, **options, **mask, sizes={"SLOTS": 0})
    ((slots, heads, one), (tiles, _, sequences)) = (each.launches[0].grid for each in (in_slots, plain))
    assert (heads, one, sequences) == (4, 1, len(LONG)) and slots < tiles * sequences / 2
    assert_same(got, want)


@pytest.mark.parametrize(("name", "deterministic"), GRADIENTS)
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_slots_of_gradients(name: str, deterministic: bool, causal: bool) -> None:
    stage = LADDER[name]
    (q, k, v), options = in_slots_or_not(stage)
    (do,) = random(stage, q.shape)
    options |= {"causal": causal, "deterministic": deterministic}
    ready, got = gradients(stage, do, q, k, v, **options, sizes={"SLOTS": 1})
    assert [launch.grid[2] for launch in ready.launches] == [1] * len(ready.launches)
    assert_same(got, gradients(stage, do, q, k, v, **options, sizes={"SLOTS": 0})[1], exactly=deterministic)


def call_of(lengths: Sequence[int], heads: int, **more: Any) -> Call:
    tokens, cu = sum(lengths), Spec.dense((len(lengths) + 1,), np.int32)
    arrays = {name: Spec.dense((1, heads, tokens, 128), TYPES["bfloat16"]) for name in ("q", "k", "v", "o")}
    arrays |= {name: Spec.dense((1, heads, tokens, 128), TYPES["bfloat16"]) for name in more}
    arrays |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    longest = max(lengths)
    return Call(arrays, 1.0, (-1, 0), longest, len(lengths), True, longest)


def test_slots_are_for_many_empty_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches.limits, "multiprocessors", lambda: 132)
    sizes = {"BLOCK_M": 128, "BLOCK_N": 64}
    batch = (8192, *(240,) * 511)  # 524,288 blocks, instead of 24,544
    call = call_of(batch, 16)
    assert launches.in_slots(call, sizes)
    assert launches.tile_grid(call, "q", sizes) == (64, 16, 512)
    assert launches.tile_grid(call, "q", {**sizes, "SLOTS": 1}) == (1534, 16, 1)
    assert launches.in_slots(call_of(batch, 16, do=True), {"BLOCK_M": 8192, "BLOCK_N": 64}), "by the tiles of keys"
    assert not launches.in_slots(call_of(batch, 16), {"BLOCK_M": 8192, "BLOCK_N": 64})
    assert not launches.in_slots(call_of((512,) * 512, 16), sizes), "no block is empty"
    assert not launches.in_slots(call_of((256, 512) * 256, 16), sizes), "a quarter of the blocks is empty"
    assert not launches.in_slots(call_of((2048, *(240,) * 15), 1), sizes), "few blocks, and soon over"
    assert launches.in_slots(call_of((49,) * 65536, 2), sizes), "more than a grid has room for"


def test_a_call_gets_slots_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's own choice reaches the kernel's options and its grid; a size given by name overrides it."""
    stage = LADDER["heads_and_masks"]
    (q, k, v), options = in_slots_or_not(stage)
    monkeypatch.setattr(launches, "EMPTY_BLOCKS", 0)
    grids = [stage.plan(q, k, v, **options, sizes=sizes)[0].launches[0].grid[2] for sizes in ({}, {"SLOTS": 0})]
    assert grids == [1, len(LONG)]
    monkeypatch.setattr(launches, "EMPTY_BLOCKS", 10**6)
    assert stage.plan(q, k, v, **options)[0].launches[0].grid[2] == len(LONG)


@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("name", ["heads_and_masks", "flash_mma"])
def test_a_checked_run_in_slots_is_clean(name: str, cpu_engine: Any) -> None:
    stage = LADDER[name]
    arrays, options = in_slots_or_not(stage)
    ready, named, _ = stage.plan(*arrays, **options, causal=True, sizes={"SLOTS": 1})
    ((launch, compiled, args),) = ready.resolve_arguments(named)
    report = xray(compiled, launch.grid, launch.block, args, launch.shared_bytes)
    assert report.findings == []
    assert report.traffic["O"].written == arrays[0].nbytes
