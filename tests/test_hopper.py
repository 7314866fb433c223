"""Stage 10 beyond the tests of test_tensor_cores.py: its tiles, its order of tiles, tensor maps, planted bugs."""

from __future__ import annotations

import ctypes
import re
import struct
from functools import partial
from types import SimpleNamespace
from typing import Any

import hopper_tiles
import numpy as np
import oracle
import pytest
from backends import needs_nvrtc
from planted import ALL, Bug, check_all_can_be_planted
from test_tensor_cores import check_both, inputs
from two_speeds import files_of

from helpers import device, engine
from helpers.attention import calls, check, compile_report, flash_attention, flash_attention_varlen, forget, kernel
from helpers.attention.ladder import LADDER, limits, tensor_maps
from helpers.attention.ladder.call import Call, ForwardOptions, Spec
from helpers.attention.ladder.launch import Arguments, DirectLaunch, Map
from helpers.attention.ladder.layout import address
from helpers.attention.ladder.stage import CallSize
from helpers.attention.ladder.stages import hopper as stages
from helpers.bench.studies import hopper as study
from helpers.device import cp
from helpers.lesson import shortcuts
from helpers.xray import xray

HOPPER = LADDER["hopper"]
runs_here = pytest.mark.skipif(
    HOPPER.why_not(head_dim=64, dtype="float16") is not None, reason="this GPU is not of compute capability 9.0"
)

# ---- what it is compiled with


HEAD_DIMS = (8, 64, 72, 80, 96, 128, 192, 256)


@pytest.mark.exhaustive
@needs_nvrtc
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_compiles_without_spills_and_keeps_its_products_in_flight(head_dim: int, masked: bool) -> None:
    """The types differ in the instruction that packs P; each head dimension is compiled for one of them, in turn."""
    dtype = ("float16", "bfloat16")[(HEAD_DIMS.index(head_dim) + masked) % 2]
    sizes = {"HEAD_DIM": head_dim, **stages.pick_hopper(head_dim, masked)}
    report = compile_report.compile_report(HOPPER.file, sizes, "sm_90a", name=HOPPER.kernel_name(dtype))
    assert (report.spill_bytes, report.stack_bytes, report.warnings) == (0, 0, ())
    assert stages.hopper_shared_bytes(sizes) <= 227 * 1024


@pytest.mark.exhaustive
@needs_nvrtc
def test_what_the_assembler_warns_of_is_seen() -> None:
    """S is read while its products may be in flight (C7514); there are not enough registers (C7512)."""
    no_wait = Bug("", "      wgmma_wait<1>();\n", "").plant(kernel.source(HOPPER.file))
    for text, sizes, code in (
        (no_wait, {"HEAD_DIM": 64}, "C7514"),
        (HOPPER.file, {"HEAD_DIM": 128, "BLOCK_M": 192, "BLOCK_N": 128}, "C7512"),
    ):
        report = compile_report.compile_report(text, sizes, "sm_90a", name=HOPPER.kernel_name("float16"))
        assert report.warnings and code in report.warnings[0], str(report)


def test_shared_memory_is_what_the_kernel_counts() -> None:
    text = kernel.source(HOPPER.file) + '\nextern "C" __global__ void count(unsigned* n) { *n = SHARED_BYTES; }\n'
    for head_dim, sizes in ((64, {"BLOCK_M": 128, "BLOCK_N": 192}), (72, {"BLOCK_M": 192, "BLOCK_N": 16, "STAGES": 3})):
        n = engine.zeros(1, np.uint32)
        options = kernel.options({"HEAD_DIM": head_dim, **sizes})
        engine.RawModule(code=text, options=options).get_function("count")((1,), (1,), (n,))
        assert n.get()[0] == stages.hopper_shared_bytes({"HEAD_DIM": head_dim, **sizes})


@pytest.mark.parametrize(("cc", "there"), [(89, "8.9"), (100, "10.0"), (120, "12.0")])
def test_other_gpus_are_told(cc: int, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "compute_capability", lambda: cc)
    reason = HOPPER.why_not(head_dim=64, dtype="float16")
    assert reason is not None and reason.endswith(f"this GPU has {there}")
    assert cc < 90 or "compiled for sm_90a, which only compute capability 9.0 runs" in reason


# ---- tensor maps


def test_dimensions_of_a_view() -> None:
    """(batch, heads, rows, d) of (batch, rows, heads, d); strides in bytes; an axis of size 1 may have any stride."""
    spec = Spec((2, 3, 50, 64), (50 * 3 * 128, 128, 3 * 128, 2), np.dtype(np.float16))
    assert tensor_maps.dimensions(spec) == ((64, 50, 3, 2), (3 * 128, 128, 50 * 3 * 128))
    assert tensor_maps.dimensions(Spec((1, 1, 7, 72), (2, 6, 144, 2), np.dtype(np.float16)))[1] == (144, 144, 144)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_dimension_that_is_broadcast_keeps_its_stride_of_0(axis: int) -> None:
    """Any other stride would lead to memory outside of the array."""
    a = np.zeros([1 if i == axis else size for i, size in enumerate((2, 3, 50, 64))], np.float16)
    wide = np.broadcast_to(a, (2, 3, 50, 64))
    _, strides = tensor_maps.dimensions(Spec((2, 3, 50, 64), wide.strides, wide.dtype))
    assert strides == wide.strides[2::-1] and strides[2 - axis] == 0


# Changes to a map that both accept: float16, rows of 64 elements.
MAPS: dict[str, dict[str, dict[int, int]]] = {
    "as it is": {},
    **{f"stride {i} is {n}": {"strides": {i: n}} for i in (0, 1, 2) for n in (0, 16, 64, 120, 2**40 - 16, 2**40)},
    "backwards": {"strides": {1: 2**64 - 6400}},
    "the longest first": {"strides": {0: 38400, 2: 128}},
    **{f"size {i} is {n}": {"dims": {i: n}} for i in (0, 1, 3) for n in (0, 1, 2**32, 2**32 + 1)},
    **{f"box {i} is {n}": {"box": {i: n}} for i in (0, 1, 3) for n in (0, 1, 8, 12, 64, 72, 128, 256, 257)},
}


@pytest.mark.skipif(not device.ON_GPU, reason="needs a GPU")
def test_the_twin_refuses_what_the_driver_refuses() -> None:
    array, differences = cp.zeros(2**20, np.float16), []
    for case, change in MAPS.items():
        how = {"dims": [64, 100, 3, 2], "strides": [128, 12800, 38400], "box": [64, 16, 1, 1]}
        for name, values in change.items():
            for i, value in values.items():
                how[name][i] = value
        packed = (struct.pack(f"={len(a)}{letter}", *a) for a, letter in zip(how.values(), "QQI", strict=True))
        room = ctypes.create_string_buffer(192)
        at = ctypes.addressof(room) + -ctypes.addressof(room) % 64
        ones, swizzled = struct.pack("=4I", 1, 1, 1, 1), (0, 3, 2, 0)
        error = tensor_maps._driver_function()(at, 6, 4, array.data.ptr, *packed, ones, *swizzled)
        try:
            engine.tensor_map.encode_tiled("float16", array.data.ptr, **how)
            refused = ""
        except ValueError as why:
            refused = str(why)
        if bool(error) != bool(refused):
            differences.append(f"{case}: the driver returns {error}; the twin says {refused or 'nothing'}")
    assert not differences, "\n".join(differences)


@runs_here
def test_maps_are_kept_by_address() -> None:
    a, b = (cp.zeros((1, 2, 30, 64), np.float16) for _ in range(2))
    kept = tensor_maps.MapCache(Spec.of(a), 64)
    (first, held), (second, _) = (kept.at(address(x)) for x in (a, b))
    assert first != second and kept.at(address(a))[0] == first
    before = ctypes.string_at(first, 128)
    for i in range(2 * kept.MOST):  # as another thread may do before a launch has read the first
        kept.at(address(a) + 16 * i)
        assert len(kept) <= kept.MOST
    assert kept.at(address(a))[1] is not held and ctypes.string_at(first, 128) == before


@runs_here
def test_a_bound_launch_keeps_its_arrays() -> None:
    """A tensor map contains only the address, and NumPy inputs are copied: the copies must outlive the call."""
    q, k, v = inputs((1, 2, 50, 64), 70, 2, "float16")
    launch, got = HOPPER.prepare(q, k, v, return_lse=True)
    others = [cp.full(q.shape, cp.nan, q.dtype) for _ in range(20)]
    launch()
    check_both("hopper", got, q, k, v)
    assert len(others) == 20


@runs_here
def test_calls_with_new_addresses() -> None:
    """The second call of its kind makes new maps, on a GPU in a launch without checks."""
    shape = (2, 100, 4, 64)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(shape).astype(np.float16) for _ in range(3))
        o, lse = flash_attention(*map(cp.asarray, (q, k, v)), causal=True, return_lse=True, stage="hopper")
        heads_first = (a.swapaxes(1, 2) for a in (q, k, v))
        check_both(f"call {seed}", (cp.asnumpy(o).swapaxes(1, 2), lse), *heads_first, causal=True)


# ---- which tiles, and in which order


def test_tiles_for_masks_and_few_keys() -> None:
    """At D = 64 three consumers, at 128 wide tiles of keys; narrower ones and fewer rows with a mask or few keys."""
    pick = stages.pick_hopper
    assert pick(64) == {"BLOCK_M": 192, "BLOCK_N": 128} == pick(64, True) == pick(40, False, 1024)
    assert pick(64, True, 1024) == {"BLOCK_M": 128, "BLOCK_N": 128}
    assert [pick(128, *of)["BLOCK_N"] for of in ((), (True,), (False, 1025), (False, 1024))] == [160, 128, 176, 128]
    assert [pick(128, False, keys)["BLOCK_N"] for keys in (2048, 2112, 3000, 4096)] == [160, 176, 160, 160]
    for head_dim in range(8, 257, 8):
        for masked in (False, True):
            for keys in (1, 1024, 1025, None):
                sizes = pick(head_dim, masked, keys)
                assert stages.hopper_shared_bytes({"HEAD_DIM": head_dim, **sizes}) <= 227 * 1024
                assert sizes["BLOCK_M"] in (128, 192) and sizes["BLOCK_N"] % 16 == 0
    for head_dim in (0, 257):
        with pytest.raises(ValueError, match="1 to 256"):
            pick(head_dim)


def call_of(shape: tuple[int, ...], kv_heads: int, keys: int, window: tuple[int, int], packed: bool = False) -> Call:
    """Describe a call of (batch or sequences, heads, rows, d). packed: all sequences have that many rows."""
    sequences, heads, rows, d = shape
    q, kv = (sequences, heads, rows, d), (sequences, kv_heads, keys, d)
    if packed:
        q, kv = (1, heads, sequences * rows, d), (1, kv_heads, sequences * keys, d)
    arrays = {name: Spec.dense(kv if name in "kv" else q, np.float16) for name in "qkvo"}
    if packed:
        arrays |= {name: Spec.dense((sequences + 1,), np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return Call(arrays, 1.0, window, rows=rows, sequences=sequences, aligned=True)


def tile_of_call(
    batch: int, rows: int, *, d: int = 128, keys: int | None = None, causal: bool = False
) -> tuple[int, int]:
    """Return BLOCK_M and BLOCK_N for a call with 16 heads."""
    sizes = LADDER["hopper"].sizes_for(call_of((batch, 16, rows, d), 16, keys or rows, (-1, 0) if causal else (-1, -1)))
    return sizes["BLOCK_M"], sizes["BLOCK_N"]


def test_which_calls_have_tall_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are chosen where they were faster on an H200, which has 132 multiprocessors: (batch, rows)."""
    monkeypatch.setattr(limits, "persistent_blocks", lambda: 132)
    tall = (192, 64)
    faster = ((21, 768), (11, 1536), (8, 2048), (8, 2112), (5, 3072), (4, 4096), (4, 4224), (2, 8192), (1, 16384))
    for batch, rows in faster:
        assert tile_of_call(batch, rows) == tall, rows
    for batch, rows in ((32, 512), (26, 640), (16, 1024), (6, 2560)):
        assert tile_of_call(batch, rows) != tall, rows
    assert all(tile_of_call(8, rows, causal=True) == tall for rows in (2112, 4224))
    assert all(tile_of_call(8, rows, causal=True) != tall for rows in (768, 2048, 4096))
    assert tile_of_call(8, 2112, keys=77) != tall and tile_of_call(8, 2112, d=64) != tall


def planned(call: Call, lengths: tuple[list[int], list[int]] | None = None, **sizes: int) -> tuple[np.ndarray, Any]:
    """Return a call's table of tiles (rounds, blocks, 4), as written by the device; and the sizes."""
    sizes = {**HOPPER.defines(call.arrays["q"].shape[-1]), **HOPPER.variant(call), **sizes}
    ends = [cp.asarray(np.cumsum([0, *of], dtype=np.int32)) for of in lengths or ()]
    cu = dict(zip(CU, ends, strict=False))
    table = study.table_of(call, sizes, **cu)
    _, launch = HOPPER.launches(HOPPER, call, sizes)
    assert launch.args[launch.args.index("schedule") + 1] == len(table) and launch.grid == table.shape[1:2]
    return table, sizes


CU = ("cu_seqlens_q", "cu_seqlens_k")


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 30), (40, -1)], ids=str)
@pytest.mark.parametrize("blocks", [1, 7, 132, 100_000])
def test_every_tile_is_in_the_table_once(blocks: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "multiprocessors", lambda: blocks)
    for heads, kv_heads, rows in ((4, 2, 300), (6, 1, 128), (3, 3, 129), (8, 8, 1), (4, 4, 900)):
        table, sizes = planned(call_of((3, heads, rows, 64), kv_heads, 200, window))
        entries = table.reshape(-1, 4)
        entries = entries[entries[:, 3] >= 0]
        wanted = [
            (sequence, head, head // (heads // kv_heads), row)
            for sequence in range(3)
            for head in range(heads)
            for row in range(0, rows, sizes["BLOCK_M"])
        ]
        assert sorted(map(tuple, entries.tolist())) == wanted
        assert table.shape[1] == min(blocks, len(wanted)) and (table[0, :, 3] >= 0).all()


LENGTHS = ([300, 0, 1, 129, 5, 1000, 0], [40, 7, 0, 300, 0, 900, 3])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 30)], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, ([1], [1]), ([0, 128], [5, 0]), ([30] * 90, [30] * 90)], ids=len)
def test_the_table_of_packed_sequences(lengths: tuple[list[int], list[int]], window: tuple[int, int]) -> None:
    """Each tile with rows occurs once, the longest first; blocks without one come last, and are few."""
    rows, keys = lengths
    q, kv = (1, 4, sum(rows), 64), (1, 2, sum(keys), 64)
    arrays = {name: Spec.dense(kv if name in "kv" else q, np.float16) for name in "qkvo"}
    arrays |= {name: Spec.dense((len(rows) + 1,), np.int32) for name in CU}
    call = Call(arrays, 1.0, window, rows=max(rows), sequences=len(rows), aligned=True, keys=max(keys))
    table, sizes = planned(call, lengths)
    block_m = sizes["BLOCK_M"]
    entries = table[0][table[0, :, 3] >= 0]
    wanted = [
        (i, head, head // 2, row) for i, n in enumerate(rows) for row in range(0, n, block_m) for head in range(4)
    ]
    assert sorted(map(tuple, entries.tolist())) == sorted(wanted)
    assert len(table) == 1 and table.shape[1] == (sum(rows) // block_m + len(rows)) * 4
    assert (table[0, len(wanted) :, 3] == -1).all()
    steps = {i: study.steps_of_rows(n, keys[i], window, block_m, sizes["BLOCK_N"]) for i, n in enumerate(rows) if n}
    work = [steps[i][row // block_m] for i, _, _, row in entries.tolist()]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (500, 0)], ids=["all", "causal", "window"])
@pytest.mark.parametrize(("heads", "d"), [(16, 128), (32, 64)])
@pytest.mark.parametrize("rows", [512, 1024, 2112, 4224, 8448, 16896])
def test_blocks_get_similar_amounts_of_work(
    rows: int, heads: int, d: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,384 tokens on 132 multiprocessors. In row order a causal mask would make blocks differ by 33 %."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 132)
    table, sizes = planned(call_of((max(16896 // rows, 1), heads, rows, d), heads, rows, window))
    steps = study.steps_of_rows(rows, rows, window, sizes["BLOCK_M"], sizes["BLOCK_N"]) + 1
    first_row = table[..., 3]
    work = np.where(first_row < 0, 0, steps[np.maximum(first_row, 0) // sizes["BLOCK_M"]]).sum(axis=0)
    assert work.max() < 1.08 * work.mean() and work.max() - work.mean() < steps.max()


def test_longest_tiles_come_first_and_heads_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal: a head's last rows see most keys. The first of two groups of heads begins with its shortest tiles."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 4)
    table, _ = planned(call_of((1, 2, 512, 64), 2, 512, (-1, 0)), BLOCK_M=128)
    assert table[..., 3].tolist() == [[384, 384, 256, 256], [0, 0, 128, 128]]
    assert [sorted(row) for row in table[..., 1].tolist()] == [[0, 0, 1, 1]] * 2
    monkeypatch.setattr(stages, "heads_together", lambda *_: 1)
    table, _ = planned(call_of((1, 2, 512, 64), 2, 512, (-1, 0)), BLOCK_M=128)
    assert table[:, :, 1].tolist() == [[0] * 4, [1] * 4]
    assert table[..., 3].tolist() == [[0, 128, 256, 384], [0, 128, 256, 384]]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (60, 10), (0, 0), (-1, 33), (40, -1)])
@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (500, 90), (90, 500), (1, 70)])
def test_steps_are_the_key_tiles_that_are_seen(rows: int, keys: int, window: tuple[int, int]) -> None:
    """The expected steps follow from the definition of a mask."""
    left, right = window
    i, j = np.arange(rows)[:, None] + keys - rows, np.arange(keys)
    seen = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    wanted = [max(-(-np.count_nonzero(seen[first : first + 128].any(0)) // 48), 1) for first in range(0, rows, 128)]
    assert study.steps_of_rows(rows, keys, window, 128, 48).tolist() == wanted


@runs_here
@pytest.mark.exhaustive(one_of_each=lambda blocks: blocks)
@pytest.mark.parametrize(("blocks", "together"), [(1, 3), (3, 100), (5, 1), (3, 1), (5, 3)])
def test_every_tile_is_computed_whatever_the_order(blocks: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks take many tiles each: the stages of K and V, and Q, carry over from tile to tile."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: blocks)
    monkeypatch.setattr(stages, "heads_together", lambda *_: together)
    q, k, v = inputs((2, 4, 300, 64), 170, 2, "float16")
    for options in ({}, {"causal": True}, {"window": (60, 10)}):
        launch, got = HOPPER.prepare(q, k, v, return_lse=True, sizes={"BLOCK_N": 64}, **options)
        launch()
        check_both(f"hopper {options}", got, q, k, v, **options)


def test_heads_that_are_worked_on_together() -> None:
    """K and V of 32 MB, but few rounds of tiles; whole groups; without a causal mask one head after the other."""

    def of(heads: int, kv_heads: int, keys: int, window: tuple[int, int]) -> int:
        sizes = {"BLOCK_M": 128, "BLOCK_N": 160}
        return stages.heads_together(call_of((1, heads, 128, 128), kv_heads, keys, window), sizes)

    assert of(16, 16, 16384, (-1, -1)) == 1
    assert of(16, 16, 16384, (-1, 0)) == 4 and of(16, 4, 16384, (-1, 0)) == 16
    assert of(16, 16, 10**6, (-1, 0)) == 1 and of(16, 2, 10**6, (-1, 0)) == 8


def test_heads_are_grouped_so_that_blocks_finish_together() -> None:
    """Short sequences get few heads at a time; no block gets the longest tiles of every group."""

    def dealt(heads: int, rows: int, together: int, block_m: int, block_n: int) -> float:
        """Return the largest amount of a block relative to the mean, as 10_order.cu deals the tiles."""
        tiles = -(-rows // block_m)
        places = [
            tiles - 1 - place if (-(-heads // together) - 1 - first // together) % 2 else place
            for first in range(0, heads, together)
            for place in range(tiles)
            for _ in range(min(together, heads - first))
        ]
        work = [1 + -(-((tiles - place) * block_m) // block_n) for place in places]
        blocks = [0] * 132
        for number, its in enumerate(work):
            turn, block = divmod(number, 132)
            blocks[131 - block if turn % 2 else block] += its
        return max(blocks) * 132 / sum(work)

    for heads, rows, head_dim, block_m, block_n in (
        *((512, 512, 128, 128, 160), (128, 2048, 128, 128, 160), (64, 4096, 128, 128, 160), (16, 16384, 128, 128, 160)),
        *((64, 4096, 64, 192, 128), (256, 2048, 64, 192, 128), (1024, 512, 64, 192, 128), (40, 2048, 128, 128, 160)),
    ):
        rows += -rows % block_m
        together = stages.group_of_heads(heads, 1, rows, rows, head_dim, (-1, 0), block_m, block_n, 132)
        assert together * 4 * rows * head_dim <= 24 * 2**20 and dealt(heads, rows, together, block_m, block_n) < 1.06


def test_too_many_tiles_are_refused() -> None:
    # This many, and enough to fill the last round of this device's multiprocessors.
    with pytest.raises(ValueError, match=r"134,217,\d{3} tiles of rows; one launch takes 134,217,727 at most"):
        planned(call_of((2**17, 1024, 1, 64), 1024, 1, (-1, -1)))


@runs_here
@pytest.mark.parametrize(
    "sizes",
    [
        {"BLOCK_M": 192, "BLOCK_N": 128},
        {"BLOCK_M": 192, "BLOCK_N": 96, "PINGPONG": 0},
        {"BLOCK_N": 80, "STAGES": 3},
        {"BLOCK_N": 16},
        {"BLOCK_M": 128, "BLOCK_N": 224},
    ],
    ids=str,
)
def test_other_tiles(sizes: dict[str, int]) -> None:
    q, k, v = inputs((1, 3, 300, 64), 333, 3, "bfloat16")
    for options in ({}, {"causal": True}):
        launch, got = HOPPER.prepare(q, k, v, return_lse=True, sizes=sizes, **options)
        launch()
        check_both(f"hopper {sizes}", got, q, k, v, **options)


# ---- arguments


@runs_here
def test_a_launch_without_checks_has_the_same_arguments(cpu_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DirectLaunch passes the driver the same addresses by name, and the same bytes of maps and values."""
    q, k, v = (engine.asarray(a) for a in inputs((1, 4, 150, 64), 170, 2, "float16"))
    ready, arrays, _ = HOPPER.plan(q, k, v, return_lse=True, causal=True)
    _, (launch, _, args) = ready.resolve_arguments(arrays)
    maps = {name: arg for name, arg in zip("qkv", args, strict=False)}
    arrays["schedule"] = args[launch.args.index("schedule")]
    seen: dict[str, Any] = {}

    def read(address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def launch_kernel(function: int, *rest: Any) -> None:
        seen["function"], seen["sizes"], seen["stream"] = function, rest[:7], rest[7]
        pointers = np.frombuffer(read(rest[8], 8 * len(launch.args)), np.int64).tolist()
        for arg, pointer in zip(launch.args, pointers, strict=True):
            if isinstance(arg, Map):
                assert read(pointer, 128) == maps[arg.name].tobytes()
                seen[arg.name] = True
            elif isinstance(arg, str) or arg is None:
                wanted = address(arrays[arg]) if arg else 0
                assert np.frombuffer(read(pointer, 8), np.int64)[0] == wanted
                seen[arg if isinstance(arg, str) else type(arg).__name__] = True
            else:
                assert read(pointer, np.asarray(arg).nbytes) == np.asarray(arg).tobytes()

    driver = SimpleNamespace(cuda=SimpleNamespace(driver=SimpleNamespace(launchKernel=launch_kernel)))
    driver.tensor_map = engine.tensor_map
    monkeypatch.setattr(device, "cp", driver)
    names = tuple(arrays)
    slots = {name: 8 * i for i, name in enumerate(names)}
    specs = {name: Spec.of(a) for name, a in arrays.items()}
    function = SimpleNamespace(kernel=SimpleNamespace(ptr=77))
    direct = DirectLaunch(Arguments(launch, function, slots), launch, slots, specs)
    for _ in range(2):
        direct([address(arrays[name]) for name in names], 5)
        assert seen["function"] == 77 and seen["stream"] == 5
        assert seen["sizes"] == (*launch.grid, 1, 1, *launch.block, 1, 1, launch.shared_bytes)
        assert {"q", "k", "v", "o", "lse", "schedule", "NoneType"} <= set(seen)
        seen.clear()


@runs_here
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "head_dim", "enough"), [(50, 64, False), (512, 64, False), (50, 128, False), (512, 128, True)]
)
def test_the_stage_of_a_call_that_names_none(
    rows: int, head_dim: int, enough: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 on a Hopper GPU if there is enough work; 07 on the CPU engine, and wherever 10 cannot run."""
    views = dict.fromkeys("qkv", Spec.dense((1, 2, rows, head_dim), np.float16))
    if packed:
        views |= dict.fromkeys(CU, Spec.dense((3,), np.int32))

    def chosen() -> str:
        return calls.choose(views, ForwardOptions(), rows - 20 if packed else None)[1].name

    own = "hopper" if device.ON_GPU and enough and not packed else "flash_mma"  # packed: of 20 rows and others
    assert chosen() == own
    forget()
    monkeypatch.setattr(limits, "compute_capability", lambda: 100)
    assert chosen() == "flash_mma"


@pytest.mark.parametrize("packed", [False, True])
def test_the_chosen_stage_is_launched(packed: bool, cpu_engine: Any) -> None:
    launched: set[str] = set()
    q, k, v = (engine.asarray(a.swapaxes(1, 2)) for a in inputs((1, 2, 50, 64), 50, 2, "float16"))
    with kernel.launches_replaced(lambda kernel, *_, **__: launched.update(files_of(kernel.code))):
        if packed:
            cu = np.array([0, 20, 50], np.int32)
            flash_attention_varlen(q[0], k[0], v[0], cu, cu)
        else:
            flash_attention(q, k, v)
    assert launched == {LADDER["flash_mma"].file}


def test_how_much_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold follows the times of 07 and 10 on an H200; the CPU engine never chooses 10."""
    few = (
        *(CallSize(*size) for size in ((511, 8448, 128), (127, 2**20, 128), (4096, 16383, 64), (511, 49151, 64))),
        *(CallSize(*size, packed=True) for size in ((511, 2**20, 128), (1023, 2**20, 64))),
        *(CallSize(*size, functions=True) for size in ((1024, 16383, 128), (1024, 32767, 64))),
        CallSize(511, 2**20, 32),
    )
    enough = (
        *(CallSize(*size) for size in ((512, 512, 128), (128, 8449, 128), (512, 16384, 64), (128, 49152, 64))),
        *(CallSize(*size, packed=True) for size in ((512, 512, 128), (1024, 32768, 64))),
        *(CallSize(*size, functions=True) for size in ((512, 16384, 128), (512, 32768, 64))),
    )
    for on_gpu in (True, False):
        monkeypatch.setattr(device, "ON_GPU", on_gpu)
        assert not any(HOPPER.tuning.by_default(size) for size in few)
        assert all(HOPPER.tuning.by_default(size) == on_gpu for size in enough)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([30] * 1000, 30), ([8192, *[240] * 511], 1446), ([512] * 4, 512), ([1, 0, 0, 0], 0)],
    ids=["short", "one long", "even", "empty"],
)
def test_packed_sequences_count_by_typical_lengths(
    lengths: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the mean and the longest, whatever their sum."""
    asked: list[int] = []
    stage = HOPPER.changed(by_default=lambda size: asked.append(size.rows) or True)
    monkeypatch.setattr(calls, "able_of", lambda *_, **__: [stage])
    tokens, ends = sum(lengths), Spec.dense((len(lengths) + 1,), np.int32)
    views = dict.fromkeys("qkv", Spec.dense((1, 2, tokens, 128), np.float16))
    calls.choose({**views, **dict.fromkeys(CU, ends)}, ForwardOptions(), max(lengths))
    assert asked == [rows]


# ---- packed lengths, infinities


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let three blocks compute all tiles: some have one less, so that the table has empty places."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 3)


def packed(text: str | None = None) -> None:
    """Infinities in one sequence reach no other, although TMA copies the rows after a sequence's end with its own."""
    rows, keys = (70, 1, 33, 130), (50, 13, 30, 65)
    cu = tuple(np.cumsum([0, *lengths], dtype=np.int32) for lengths in (rows, keys))
    q, k, v = (a[0] for a in inputs((1, 2, sum(rows), 72), sum(keys), 1, "float16"))
    v[:, cu[1][2] : cu[1][3]] = np.inf
    k[:, cu[1][2] : cu[1][3]] = np.nan
    launch, (o, lse) = HOPPER.prepare(
        q, k, v, causal=True, cu_seqlens=cu, return_lse=True, source=text, sizes={"BLOCK_N": 48}
    )
    launch()
    o, lse = cp.asnumpy(o), cp.asnumpy(lse)
    for i in (0, 1, 3):
        own, its = slice(*cu[0][i : i + 2]), slice(*cu[1][i : i + 2])
        one = q[None, :, own], k[None, :, its], v[None, :, its]
        check_both(f"sequence {i}", (o[None, :, own], lse[None, :, own]), *one, causal=True)


def beside_infinities(text: str | None = None) -> None:
    """Check that accumulators of a head with infinities do not reach the block's next tile."""
    q, k, v = inputs((1, 4, 150, 72), 100, 2, "float16")
    v[:, :1] = np.inf
    launch, (o, lse) = HOPPER.prepare(q, k, v, return_lse=True, source=text, sizes={"BLOCK_N": 48})
    launch()
    o, lse = cp.asnumpy(o), cp.asnumpy(lse)
    check_both("two heads", (o[:, 2:], lse[:, 2:]), q[:, 2:], k[:, 1:], v[:, 1:])


@runs_here
def test_infinities_stay_in_their_sequence_and_head(few_blocks: None) -> None:
    packed()
    beside_infinities()


# ---- scores that try the integer maxima


def by_processing(steps: np.ndarray, d: int, rows: int, sign: float = 1.0) -> tuple[np.ndarray, ...]:
    """Make one head with the scores `steps`, one per key, in the order of processing, last keys first."""
    q = np.full((1, 1, rows, d), sign, np.float16)
    k = np.repeat(sign * steps[::-1][None, None, :, None] / d, d, -1).astype(np.float16)
    v = np.random.default_rng(4).standard_normal(k.shape).astype(np.float16) + np.float16(0.5)
    return q, k, v


RAMPS = {
    "all negative, rising": np.linspace(-3000, -1, 300),
    "all negative, falling": np.linspace(-1, -3000, 300),
    "all negative, in the last tile less": np.where(np.arange(300) < 250, -900.0, -3.0),
    "from negative to large": np.where(np.arange(300) < 200, -500.0, 2000.0),
    "from large to negative": np.where(np.arange(300) < 100, 2000.0, -500.0),
    "from beyond -2^13 to beyond 2^13": np.where(np.arange(300) < 150, -20000.0, 30000.0),
    "beyond 2^13, rising": np.linspace(8000, 60000, 300).round(-3),
    "a little above, and again": np.linspace(0, 90, 300),
    "minus zero, then more": np.where(np.arange(300) < 100, -0.0, 40.0),
}


def ramp(name: str, text: str | None = None, scale: float = 1.0) -> None:
    q, k, v = by_processing(RAMPS[name], 64, 70)
    options = {"softmax_scale": scale}
    launch, got = HOPPER.prepare(
        q, k, v, return_lse=True, source=text, sizes={"BLOCK_N": 48, "BLOCK_M": 128}, **options
    )
    launch()
    check_both(f"{name}, scale {scale}", got, q, k, v, **options)


@runs_here
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.05])
@pytest.mark.parametrize("name", RAMPS)
def test_scores_that_rise_and_fall(name: str, scale: float) -> None:
    """Every tile of keys except the first may leave m_i unchanged; integer maxima decide whether it does."""
    ramp(name, scale=scale)


# ---- planted bugs


def changed(name: str, old: str, new: str = "", **more: Any) -> Bug:
    return Bug(name, old, new, **{"which": ALL, **more})


def on_cpu(name: str, old: str, new: str = "", **more: Any) -> Bug:
    """Mark a bug that a GPU shows only by luck, or that hangs it or loses the context."""
    return changed(name, old, new, cpu_only=True, **more)


RESCALES = "if (rescaled) rescale_output(acc, rescale);"
RELEASES_V = "if (leader) v_ring.release(v_stage);"
NEW_ROW = "hook_start(maxima.m_i[i], l_i[i], hooks_of_tile(), t == 0);"
OF_BEFORE = "const float m_before = maxima.m_i[i], l_before = l_i[i];"
ZEROS = "for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;"
LAST_KEYS = "weights(GROUPS / 2, GROUPS);\n      to_operand<T>(P, S, GROUPS / 2, GROUPS);"
BUGS = (  # bugs that 07 and 10 share are in test_tensor_cores.py
    # visible keys
    changed("full tiles end late", "first + BLOCK_N > min(tile.first_pos", "first > min(tile.first_pos"),
    changed(
        "ends where the first row does", "tile.first_pos + min(BLOCK_M, tile.rows) + params", "tile.first_pos + params"
    ),
    changed("a key too many", "8 * i + params.window_right + 1, end)", "8 * i + params.window_right + 2, end)"),
    changed(
        "a key past the end",
        "min(row_pos + 8 * i + params.window_right + 1, end)",
        "row_pos + 8 * i + params.window_right + 1",
    ),
    changed("a key too few", "keys_before<128>(window_lo - keys)", "keys_before<128>(window_lo + 1 - keys)"),
    # the table of tiles
    changed("the next item is this one", "if (++round < rounds) item =", "if (++round < rounds - 1) item ="),
    on_cpu("a tile where there is none", "    if (first_row < 0) continue;\n"),
    changed("head of Q for K and V", "tile.kv_head = item.z", "tile.kv_head = item.y"),
    on_cpu(
        "sequence and head exchanged",
        "tile.sequence = item.x;\n    tile.head = item.y;",
        "tile.sequence = item.y;\n    tile.head = item.x;",
    ),
    changed("rows of the tile alone", "tile.row = q_first + first_row", "tile.row = first_row"),
    # softmax
    changed("maxima of one lane out of four", "return fmaxf(a, b); });", "return a; });", times=2),
    changed("acc is not rescaled in the loop", RESCALES, times=2, which=0),
    changed(
        "the maxima stay those of the first keys",
        "if (exceeds_limit(S, maxima.limit, softmax_scale_log2)) rescaled = move();",
    ),
    changed("the maxima may be exceeded by far", "m_new[i] + RESCALE_THRESHOLD", "m_new[i] + 200"),
    changed("large maxima are forgotten", "base[i] = large ? m_new[i] : 0.0f", "base[i] = 0.0f"),
    changed("m_i of the tile before", NEW_ROW, f"{OF_BEFORE} {NEW_ROW} if (round > 1) maxima.m_i[i] = m_before;"),
    changed("division by zero", "sum == 0.0f ? 0.0f : __fdividef(1.0f, sum)", "__fdividef(1.0f, sum)"),
    changed("lse in units of log2", "LN_2 * (m_i", "(m_i"),
    # the integer maxima
    changed(
        "negative scores are compared the wrong way round",
        "fmaxf(__int_as_float(highest), 0.0f)",
        "__int_as_float(highest)",
    ),
    changed(
        "maxima of the even keys",
        ", __float_as_int(S[4 * n + 2 * i])), __float_as_int(S[4 * n + 2 * i + 1]))",
        ", __float_as_int(S[4 * n + 2 * i])), highest)",
    ),
    changed(
        "maxima of the other row",
        "max(max(highest, __float_as_int(S[4 * n + 2 * i]))",
        "max(max(highest, __float_as_int(S[4 * n + 2 - 2 * i]))",
    ),
    # registers, descriptors, swizzles
    changed("rows of P exchanged", "P[n / 2][n % 2 * 2 + i]", "P[n / 2][n % 2 * 2 + 1 - i]"),
    changed(
        "the next 16 columns are the next 8", "(i / 4 * rows * 128 + i % 4 * 32)", "(i / 4 * rows * 128 + i % 4 * 16)"
    ),
    changed(
        "the second panel of K is the first", "advance_columns(k, i, BLOCK_N)", "advance_columns(k, i % 4, BLOCK_N)"
    ),
    changed(
        "the next 16 keys are the next 8",
        "advance_tiles(descriptor, i, 16 * 128)",
        "advance_tiles(descriptor, i, 8 * 128)",
    ),
    changed(
        "each consumer has the first rows", "wgmma_descriptor(Q_smem + consumer * Q_BYTES)", "wgmma_descriptor(Q_smem)"
    ),
    changed(
        "O is staged in rows and read swizzled",
        "((n % 8 + lane_id / 16) ^ lane_id % 8) * 16",
        "(n % 8 + lane_id / 16) * 16",
    ),
    changed("the second half of the rows is staged over the first", "lane_id % 16 * 128", "lane_id % 8 * 128"),
    changed("O without the head", "params.o.row + tile.head * params.o.head;", "params.o.row;"),
    # stages, phases
    on_cpu("always the first stage of K", "advance_tiles(k, k_stage.index, TILE_BYTES)", "k", times=2),
    on_cpu("K is not waited for", "k_ring.wait_full(k_stage);\n      if", "if"),
    on_cpu("Q's wrong parity", "q_stage.phase ^= 1;"),
    on_cpu(
        "the parity changes with each stage",
        "    if (++index < N) return;\n    index = 0;",
        "    index = (index + 1) % N;",
    ),
    on_cpu("a stage is empty only when it is full", "stage.phase ^ 1)", "stage.phase)"),
    on_cpu("one consumer does not give K back", "      if (leader) k_ring", "      if (leader && consumer) k_ring"),
    on_cpu("V is not given back in the loop", RELEASES_V, times=2, which=0),
    on_cpu("one arrival is enough", "k_ring.init(CONSUMERS)", "k_ring.init(1)"),
    on_cpu("nobody has the first turn", "PINGPONG && consumer == CONSUMERS - 1", "false"),
    on_cpu("fewer bytes than expected", "expect(q_stage, Q_BYTES)", "expect(q_stage, 2 * Q_BYTES)"),
    # products in flight
    on_cpu("S is read in flight", "      wgmma_wait<1>();\n"),
    on_cpu("O is stored in flight", "    wgmma_wait<1>();\n    wgmma_registers(acc);\n    if", "    if"),
    # packed
    changed("rows of the next sequence stay", "if (packed && first + BLOCK_N > tile.kv_len)", "if (false)"),
    changed(
        "one panel of the next sequence's rows stays",
        "for (int panel = 0; panel < PANELS; ++panel)\n      *re",
        "for (int panel = 0; panel < 1; ++panel)\n      *re",
    ),
    changed("K of the first sequence", "tile.k_first + first,", "first,"),
)
WITH_BUG: tuple[dict[str, Any], ...] = (
    {"n": 150, "n_kv": 200, "window": (90, 90)},
    {"n": 200, "n_kv": 130, "causal": True, "softmax_scale": -0.2},  # some rows see nothing
    {"n": 40, "n_kv": 300, "grow": 400.0},
)


def few_products() -> str:
    """Keep only the wgmma for the columns that are used here: builds take two thirds of the time."""
    text, left_out = re.subn(r"^WGMMA\((?!(?:48|64|80),)\d+,.*$", "", kernel.source(HOPPER.file), flags=re.M)
    assert left_out == 13
    return text


def check_with(text: str) -> None:
    """Check a few calls with another text of the kernel, with many tiles per block."""
    for case in WITH_BUG:
        options = dict(case)
        q, k, v = inputs((2, 4, options.pop("n"), 72), options.pop("n_kv"), 2, "float16", grow=options.pop("grow", 1.0))
        launch, got = HOPPER.prepare(q, k, v, source=text, return_lse=True, sizes={"BLOCK_N": 48}, **options)
        launch()
        check_both("hopper", got, q, k, v, **options)
    for name in RAMPS:
        ramp(name, text)
    packed(text)
    beside_infinities(text)


@runs_here
def test_kernel_without_a_bug_passes(few_blocks: None) -> None:
    check_with(few_products())


def test_every_bug_can_be_planted() -> None:
    check_all_can_be_planted((few_products(), bug) for bug in BUGS)


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.cpu_only)
@runs_here
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_seen(bug: Bug, few_blocks: None, request: pytest.FixtureRequest) -> None:
    if bug.cpu_only:
        request.getfixturevalue("cpu_engine")
    text = bug.plant(few_products())
    with pytest.raises((AssertionError, engine.LaunchError)):
        check_with(text)


def test_enough_bugs_have_been_planted() -> None:
    assert len(BUGS) >= 20 and len({bug.name for bug in BUGS}) == len(BUGS)


# In 10_order.cu.
ORDER_BUGS = (
    Bug("one tile twice, another never", "row_tile = i % row_tiles", "row_tile = i % row_tiles / 2 * 2"),
    Bug(
        "the second round is missing",
        "  const int first_of_round",
        "  if (blockIdx.x == 1) return;\n  const int first_of_round",
    ),
    Bug(
        "some heads for others", "entry_of(head / params.heads, head % params.heads", "entry_of(head / params.heads, 0"
    ),
    Bug("K and V of the head of Q", "head / (params.heads / params.kv_heads)", "head"),
    Bug("slots of the first sequence", "return make_int2(sequence, slot", "return make_int2(0, slot"),
    Bug("places from the first one on", "counts[thread] -= own;", "counts[thread] = 0;"),
    Bug("every tile has the first rows", "tile.y * block_m;", "0;"),
)


@runs_here
@pytest.mark.parametrize("bug", ORDER_BUGS, ids=lambda bug: bug.name)
def test_a_wrong_order_is_seen(bug: Bug, few_blocks: None, cpu_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine only, because a wrong entry leads to addresses that would leave a GPU's context unusable."""
    text = bug.plant(kernel.source(stages.ORDER))
    load = kernel.load
    monkeypatch.setattr(kernel, "load", lambda file, *rest, **more: load(text, *rest, **more))

    def both() -> None:
        q, k, v = inputs((1, 4, 400, 64), 200, 2, "float16")
        launch, got = HOPPER.prepare(q, k, v, return_lse=True, sizes={"BLOCK_M": 128})
        launch()
        check_both(bug.name, got, q, k, v)
        packed()

    with pytest.raises((AssertionError, engine.LaunchError)):
        both()


# ---- the X-ray

XRAYED = {"BLOCK_M": 128, "BLOCK_N": 48}


x_rayed = partial(hopper_tiles.x_rayed, "hopper", np.float16, sizes=XRAYED)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (40, 10)},
        {"packed": True, "causal": True},
        {"sizes": {"BLOCK_M": 192, "BLOCK_N": 64}},
        {"sizes": {**XRAYED, "STAGES": 3, "PINGPONG": 0}},
        {"return_lse": True, "softmax_scale": -0.2},
    ],
    ids=str,
)
def test_the_xray_finds_nothing(options: dict[str, Any], one_block: None) -> None:
    report = x_rayed(**options)
    report.assert_clean()
    assert report.shared["dynamic shared memory"].conflicts == 0
    assert report.traffic["O"].written == 2 * 150 * 72 * 2
    if not options:  # each tile of 128 rows: Q once, all of K and V
        read = {name: report.traffic[f"{name}_map"].read for name in "qkv"}
        assert read == {"q": 2 * 150 * 72 * 2, "k": 2 * 2 * 130 * 72 * 2, "v": 2 * 2 * 130 * 72 * 2}
    if options == {"causal": True}:  # rows 0 to 127 of 150 see keys 0 to 107; the tiles after them are not copied
        assert report.traffic["k_map"].read == 2 * (130 + 130) * 72 * 2


@pytest.mark.skipif(not device.ON_GPU, reason="needs a GPU")
@runs_here
def test_the_xray_of_a_launch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays described by the driver's maps are copied to the engine, and its results are copied back."""
    monkeypatch.setattr(limits, "multiprocessors", lambda: 1)
    report = x_rayed(causal=True)
    report.assert_clean()
    assert (report.traffic["k_map"].read, report.traffic["O"].written) == (2 * (130 + 130) * 72 * 2, 2 * 150 * 72 * 2)
    q, k, v = inputs((1, 2, 50, 64), 70, 2, "float16")
    ready, arrays, o = HOPPER.plan(q, k, v)
    *_, (launch, compiled, args) = shortcuts.prepared_launches(ready, arrays)
    xray(compiled, launch.grid, launch.block, args, launch.shared_bytes).assert_clean()
    exact, _, tolerance = oracle.expected(q, k, v)
    check.check("O of the X-ray", o, exact, tolerance=tolerance)


@pytest.mark.parametrize("order", ["1", "2", "3"])
def test_it_is_clean_in_other_orders_of_warps(order: str, one_block: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_CPU_ORDER", order)
    x_rayed(causal=True).assert_clean()
    x_rayed(packed=True).assert_clean()


S_PRODUCTS, O_PRODUCTS = "wgmma_ss(", "wgmma_rs(T(), O"
LOADS_KV = LOADS_Q = "tma_load_panels<"
STAGES_O = COPIES_O = "store_rows("  # errors in a header count for the line that calls it
CLEARS = "clear_rows<"
WAITS_K = "      k_ring.wait_full(k_stage);\n"
GIVES_K = "      if (leader) k_ring.release(k_stage);\n"
GIVES_V = "      if (leader) v_ring.release(v_stage);\n"
HAS_S, HAS_O = (
    "      wgmma_wait<1>();\n      wgmma_registers(S);\n",
    "      wgmma_wait<0>();\n      wgmma_registers(acc);\n",
)
GIVES_FIRST_K = "    if (leader) k_ring.release(k_stage);\n    auto key_tiles"
XRAY_BUGS = (
    Bug(
        "no proxy fence",
        "  async_proxy_fence();\n",
        "\n",
        finds="no proxy fence",
        here=O_PRODUCTS,
        there=CLEARS,
        options={"packed": True},
    ),
    Bug(
        "no barrier of the consumers",
        "named_barrier_sync(V_CLEARED, 128 * CONSUMERS);",
        "",
        finds="race",
        here=CLEARS,
        there=O_PRODUCTS,
        options={"packed": True},
    ),
    Bug("K is released too early", HAS_S + GIVES_K, GIVES_K + HAS_S, finds="race", here=LOADS_KV, there=S_PRODUCTS),
    Bug("V is released too early", HAS_O + GIVES_V, GIVES_V + HAS_O, finds="race", here=LOADS_KV, there=O_PRODUCTS),
    Bug(
        "Q is released at a tile's first keys",
        GIVES_FIRST_K,
        "    if (leader) q_ring.release(q_stage);\n" + GIVES_FIRST_K,
        finds="not waited for",
        here=S_PRODUCTS,
        there=LOADS_Q,
    ),
    Bug(
        "wrong parity",
        f"{WAITS_K}      if",
        f"{WAITS_K.replace('k_stage', '{k_stage.index, 0}')}      if",
        finds="not waited for",
        here=S_PRODUCTS,
        there=LOADS_KV,
    ),
    Bug("no fence of the mbarriers", "mbarrier_init_fence();", "", finds="no proxy fence", there="k_ring.init("),
    Bug(
        "O is copied before all have staged it",
        "__syncwarp();\n#pragma unroll\n    for (int r =",
        "\n#pragma unroll\n    for (int r =",
        finds="race",
        here=COPIES_O,
        there=STAGES_O,
    ),
    Bug(
        "O is staged over what is still copied",
        "__syncwarp();\n#pragma unroll\n    for (int n =",
        "\n#pragma unroll\n    for (int n =",
        finds="race",
        here=STAGES_O,
        there=COPIES_O,
    ),
    Bug(
        "no fence of the registers",
        "  wgmma_registers(S);\n  wgmma_fence();\n",
        "  wgmma_registers(S);\n",
        finds="no wgmma fence",
        here=S_PRODUCTS,
    ),
)


def lines_of(text: str) -> dict[tuple[str | None, int], str]:
    """Return the lines of a text by file and number, according to its #line directives."""
    lines: dict[tuple[str | None, int], str] = {}
    file, number = "", 1
    for line in text.splitlines():
        if directive := re.match(r'#line (\d+) "(.+)"', line):
            number, file = int(directive[1]), directive[2]
        else:
            lines[file, number] = line
            number += 1
    return lines


@pytest.mark.exhaustive(one_of_each=lambda bug: bug.finds)
@pytest.mark.parametrize("bug", XRAY_BUGS, ids=lambda bug: bug.name)
def test_the_xray_finds_the_line(bug: Bug, one_block: None) -> None:
    """A race has two lines in either order."""
    text = bug.plant(few_products())
    first = x_rayed(text, **bug.options).findings[0]
    lines = lines_of(text)

    def around(file: str | None, line: int | None) -> str:
        return "" if line is None else "\n".join(lines.get((file, number), "") for number in (line, line + 1))

    sides = around(first.file, first.line), around(first.other_file, first.other_line)
    orders = (sides, sides[::-1]) if bug.finds == "race" else (sides,)
    assert first.kind == bug.finds and any(bug.here in a and bug.there in b for a, b in orders), first
    assert (first.other_line is None) == (bug.there == ""), first


def test_the_xray_counts_the_conflicts_of_a_wrong_swizzle(one_block: None) -> None:
    """Storing and reading O by rows is right, but slow: eight lanes share four banks."""
    text = few_products()
    for old, new in (
        ("((n % 8 + lane_id / 16) ^ lane_id % 8) * 16", "(n % 8 + lane_id / 16) * 16"),
        ("(chunk ^ (row + r) % 8) * 16", "chunk * 16"),
    ):
        text = Bug("", old, new).plant(text)
    report = x_rayed(text)
    report.assert_clean()
    lines = lines_of(text)
    conflicts = {lines[place].strip(): f.conflicts for place, f in report.by_line.items() if f.conflicts}
    (stores,) = conflicts
    assert "store_rows(" in stores
    # Four tiles of rows, by eight warps each; five for 80 columns; 28 of 32 wavefronts are superfluous.
    assert report.shared["dynamic shared memory"].conflicts == conflicts[stores] == 4 * 8 * 5 * 28
