"""Hopper's instructions on the CPU engine: tensor maps, TMA, mbarriers, wgmma, setmaxnreg."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text
from hopper_tiles import HEAD, OPTIONS, halves, map_of, refused_by_ptxas

from helpers import device, engine
from helpers.engine import tensor_map

TESTS = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------ tensor maps

GOOD: dict[str, Any] = {
    "dtype": "bfloat16",
    "address": 1 << 20,
    "dims": (64, 100, 3, 2),
    "strides": (128, 12800, 38400),
    "box": (64, 16, 1, 1),
}


def test_a_map_says_what_it_was_made_of() -> None:
    found = tensor_map.encode_tiled(**GOOD)
    assert found.shape == (1,) and found.dtype == np.dtype("V128")
    said = tensor_map.described(found)
    assert said is not None
    assert (said.address, said.dims, said.strides, said.box) == tuple(
        GOOD[name] for name in ("address", "dims", "strides", "box")
    )
    assert (said.shape, said.byte_strides, said.swizzle) == ((2, 3, 100, 64), (38400, 12800, 128, 2), 128)
    assert said.nbytes == 38400 + 2 * 12800 + 99 * 128 + 128
    again = tensor_map.described(tensor_map.moved(found, 1 << 21))
    assert again is not None and again.address == 1 << 21 and again.dims == said.dims
    assert tensor_map.described(np.zeros(1, "V128")) is None
    assert tensor_map.described(np.zeros(3, np.float32)) is None


def test_what_the_driver_takes_too() -> None:
    """cuTensorMapEncodeTiled of an H200's driver accepts a stride of 0, overlapping rows, a box of 228 KB."""
    for strides in ((0, 12800, 38400), (64, 12800, 38400)):
        said = tensor_map.described(tensor_map.encode_tiled(**(GOOD | {"strides": strides})))
        assert said is not None and said.strides == strides
    said = tensor_map.described(tensor_map.encode_tiled(**(GOOD | {"box": (64, 228, 8, 1)})))
    assert said is not None and said.box == (64, 228, 8, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "complex64"}, "a tensor map holds"),
        ({"dims": (), "strides": (), "box": ()}, "1 to 5 dimensions, not 0"),
        ({"dims": (8,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "1 to 5 dimensions, not 6"),
        ({"strides": (128, 12800)}, "4 dimensions have 3 strides"),
        ({"box": (64, 16)}, "it has 2 sizes, and the array has 4 dimensions"),
        ({"address": (1 << 20) + 8}, "0x100008: TMA takes multiples of 16"),
        ({"address": 0}, "multiples of 16"),
        ({"dims": (64, 0, 3, 2)}, r"dims\[1\] = 0"),
        ({"dims": (64, (1 << 32) + 1, 3, 2)}, r"dims\[1\] = 4,294,967,297"),
        (
            {"strides": (120, 12800, 38400)},
            r"strides\[0\] = 120 bytes \(of dimension 1\): a stride is a multiple of 16",
        ),
        ({"strides": (128, 1 << 40, 38400)}, r"strides\[1\]"),
        ({"box": (64, 257, 1, 1)}, r"box\[1\] = 257: a box has 1 to 256"),
        ({"box": (64, 0, 1, 1)}, r"box\[1\] = 0"),
        ({"box": (64, 229, 8, 1)}, "takes 234,496 bytes: a box has at most 233,472"),
        ({"box": (128, 16, 1, 1)}, "are 256 bytes: with the 128-byte swizzle a row of the box has at most 128 bytes"),
        ({"box": (64, 16, 1, 1), "swizzle": 64}, r"at most 64 bytes \(32 elements\)"),
        ({"box": (12, 16, 1, 1)}, "are 24 bytes: the box's rows are multiples of 16"),
        ({"swizzle": 96}, "swizzle = 96"),
        ({"element_strides": (1, 2, 1, 1)}, "copies boxes of neighbours"),
        ({"element_strides": (1, 9, 1, 1)}, "from 1 to 8"),
        ({"l2_promotion": 100}, "l2_promotion = 100"),
    ],
)
def test_what_a_map_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        tensor_map.encode_tiled(**(GOOD | change))


# ------------------------------------------------------------------------------------ TMA

LOADER = r"""
// What is in shared memory after a load of one box; before its phase has ended, where `early` says so.
extern "C" __global__ void loadRANK(MAP map, char *out, int bytes, int early, int x, int y, int z, int v, int w) {
  extern __shared__ __align__(1024) char s[];
  unsigned long long &b = *(unsigned long long *)(s + bytes);
  if (threadIdx.x == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&b, bytes);
    asm volatile("cp.async.bulk.tensor.RANKd.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {COORDINATES}], [%2];"
                 :: "r"(at(s)), "l"(&map), "r"(at(&b)), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w) : "memory");
  }
  if (!early) wait(&b, 0);
  for (int i = threadIdx.x; i < bytes; i += 32) out[i] = s[i];
  if (early) wait(&b, 0);
}
"""
LOADS = HEAD + "".join(
    LOADER.replace("RANK", str(rank)).replace("COORDINATES", ", ".join(f"%{3 + i}" for i in range(rank)))
    for rank in range(1, 6)
)


def loaded(
    cp: Any, array: Any, box: tuple[int, ...], first: tuple[int, ...], swizzle: int, early: bool = False
) -> np.ndarray:
    """Return the bytes of shared memory after a load."""
    size = int(np.prod(box)) * array.dtype.itemsize
    out = cp.zeros(size, np.int8)
    kernel = compiled(cp, LOADS, options=OPTIONS).get_function(f"load{array.ndim}")
    at = [np.int32(n) for n in (*first, *(0,) * (5 - len(first)))]
    args = (map_of(array, box, swizzle), out, np.int32(size), np.int32(early), *at)
    kernel((1,), (32,), args, shared_mem=size + 8)
    return cp.asnumpy(out)


def expected_tile(array: np.ndarray, box: tuple[int, ...], first: tuple[int, ...], swizzle: int) -> np.ndarray:
    """Compute the same with NumPy: zeros outside of the array, 16-byte chunks in their places."""
    padded = np.zeros([n + 2 * size for n, size in zip(array.shape, box[::-1], strict=True)], array.dtype)
    padded[tuple(slice(size, size + n) for n, size in zip(array.shape, box[::-1], strict=True))] = array
    inner = tuple(slice(size + x, 2 * size + x) for x, size in zip(first[::-1], box[::-1], strict=True))
    chunks = padded[inner].reshape(-1).view(np.int8).reshape(-1, 16)
    number = np.arange(len(chunks))
    address = 16 * number  # bits 7, 8, 9 of the address change chunk bits 4, 5, 6
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    moved = np.empty_like(chunks)
    moved[(address ^ ((address >> 7) & mask) << 4) // 16] = chunks
    return moved.reshape(-1)


TILES = [
    ((200,), (64,), (32,)),
    ((200,), (64,), (-16,)),
    ((100, 64), (64, 32), (0, 8)),
    ((100, 64), (64, 16), (0, 90)),
    ((100, 64), (64, 16), (0, -3)),
    ((100, 72), (64, 16), (24, 50)),
    ((10, 3, 40, 64), (64, 8, 1, 1), (0, 35, 2, 4)),
    ((3, 20, 64), (64, 8, 2), (0, 16, 1)),
    ((2, 3, 2, 9, 64), (64, 4, 2, 2, 1), (0, 6, 1, 2, 1)),
]


@on_each_device
@pytest.mark.parametrize(("shape", "box", "first"), TILES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "uint16"])
def test_loads_of_every_rank(
    cp: Any, shape: tuple[int, ...], box: tuple[int, ...], first: tuple[int, ...], dtype: str
) -> None:
    """Zeros outside of the array, also before its first element, and the 128-byte swizzle."""
    host = np.random.default_rng(0).integers(1, 2**14, shape).astype(np.uint16).view(dtype)
    got = loaded(cp, cp.asarray(host), box, first, 128)
    np.testing.assert_array_equal(got, expected_tile(host, box, first, 128))
    assert got.any()


@on_each_device
@pytest.mark.parametrize(("swizzle", "columns"), [(0, 8), (0, 64), (32, 16), (64, 32), (128, 64)])
def test_swizzles(cp: Any, swizzle: int, columns: int) -> None:
    host = np.random.default_rng(1).integers(-999, 999, (64, columns)).astype(np.float16)
    got = loaded(cp, cp.asarray(host), (columns, 32), (0, 16), swizzle)
    np.testing.assert_array_equal(got, expected_tile(host, (columns, 32), (0, 16), swizzle))


def test_bfloat16_is_two_bytes_like_any_other() -> None:
    host = np.random.default_rng(3).standard_normal((40, 64)).astype(ml_dtypes.bfloat16)
    got = loaded(engine, engine.asarray(host), (64, 16), (0, 30), 128)
    np.testing.assert_array_equal(got, expected_tile(host, (64, 16), (0, 30), 128))


@on_each_device
def test_a_strided_view(cp: Any) -> None:
    host = np.random.default_rng(2).integers(-999, 999, (40, 3, 64)).astype(np.float16)
    array = cp.asarray(host)
    got = loaded(cp, array.transpose(1, 0, 2), (64, 8, 1), (0, 35, 2), 128)
    np.testing.assert_array_equal(got, expected_tile(host.transpose(1, 0, 2), (64, 8, 1), (0, 35, 2), 128))


def test_nothing_is_there_before_the_phase_ends() -> None:
    got = loaded(engine, halves(32, 64), (64, 32), (0, 0), 128, early=True)
    assert (got == -1).all()  # poison


STORES = HEAD + cuda_text("engine_hopper_stores")


@on_each_device
@pytest.mark.parametrize(("x", "to_y"), [(0, 0), (0, 8), (0, 60), (40, 3), (56, 63)])
def test_stores_are_clipped(cp: Any, x: int, to_y: int) -> None:
    """At the array's end; a store's box must not begin before the array."""
    source, target = halves(64, 64, cp=cp), cp.full((64, 64), 99, np.float16)
    kernel = compiled(cp, STORES, options=OPTIONS).get_function("copy")
    args = (map_of(source, (64, 16)), map_of(target, (64, 16)), *map(np.int32, (16, 5, x, to_y, 0)))
    kernel((1,), (32,), args, shared_mem=16 * 128 + 8)
    expected = np.full((64 + 512, 64 + 512), 99, np.float16)
    expected[256 + to_y : 256 + to_y + 16, 256 + x : 256 + x + 64] = cp.asnumpy(source)[5:21]
    np.testing.assert_array_equal(cp.asnumpy(target), expected[256:320, 256:320])


@pytest.mark.parametrize(("spoil", "first"), [(1, 77.0), (2, 99.0), (3, None)])
def test_a_store_reads_at_its_wait(spoil: int, first: float | None) -> None:
    """A store writes the contents of shared memory at its wait; without a wait it writes nothing."""
    source, target = halves(64, 64), engine.full((64, 64), 99, np.float16)
    kernel = compiled(engine, STORES, options=OPTIONS).get_function("copy")
    args = (map_of(source, (64, 16)), map_of(target, (64, 16)), *map(np.int32, (16, 0, 0, 0, spoil)))
    kernel((1,), (32,), args, shared_mem=16 * 128 + 8)
    assert engine.asnumpy(target)[0, 0] == (first if first is not None else engine.asnumpy(source)[0, 0])


# On a GPU these are illegal instructions that lose the context, so each runs in a process of its own there.
ILLEGAL = {
    "a store before the first row": ("to_y", -4, "coordinate 1 of a store is -4"),
    "a store before the first column": ("x", -8, "coordinate 0 of a store is -8"),
    "a store from the fourth column on": ("x", 3, "begins at element 3 of a row, 6 bytes from its start"),
    "a load from the fourth column on": ("from_x", 3, "begins at element 3 of a row, 6 bytes from its start"),
    "a tile at 64 bytes": ("place", 32, "takes a tile at a multiple of 128 bytes of shared memory"),
}
ANYWHERE = (
    HEAD
    + r"""
extern "C" __global__ void copy(MAP from, MAP to, int x, int to_y, int from_x, int place) {
  extern __shared__ __align__(1024) __half s[];
  unsigned long long &b = *(unsigned long long *)(s + 2048);
  if (threadIdx.x == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&b, 2048);
    load(s + place, from, &b, from_x, 0);
    wait(&b, 0);
    store(to, s + place, x, to_y);
    commit();
    wait_read();
  }
}
"""
)


def copy_anywhere(cp: Any, **change: int) -> Any:
    """Copy a tile of 16 rows of 64 halves, from and to places that may be wrong. Returns (source, target)."""
    source, target = halves(64, 64, cp=cp), cp.full((64, 64), 99, np.float16)
    numbers = {"x": 0, "to_y": 0, "from_x": 0, "place": 0} | change
    kernel = compiled(cp, ANYWHERE, options=OPTIONS).get_function("copy")
    maps = map_of(source, (64, 16)), map_of(target, (64, 16))
    kernel((1,), (32,), (*maps, *map(np.int32, numbers.values())), shared_mem=4096 + 8)
    return cp.asnumpy(source), cp.asnumpy(target)


LEGAL = {"nothing": ("x", 0), "a store after the last row": ("to_y", 64), "a store after the last column": ("x", 64)}


def test_what_runs_anywhere_is_right() -> None:
    for place in (0, 64, 960):
        source, target = copy_anywhere(engine, place=place, x=8, to_y=60, from_x=-8)
        wanted = np.full((64, 64), 99, np.float16)
        wanted[60:, 8:16], wanted[60:, 16:] = 0, source[:4, :48]
        np.testing.assert_array_equal(target, wanted)
    for what, number in list(LEGAL.values())[1:]:
        assert (copy_anywhere(engine, **{what: number})[1] == 99).all()


@pytest.mark.parametrize("name", ILLEGAL)
def test_the_engine_refuses_what_a_gpu_does(name: str) -> None:
    what, number, says = ILLEGAL[name]
    with pytest.raises(engine.LaunchError, match=re.escape(says)):
        copy_anywhere(engine, **{what: number})


@pytest.mark.skipif(not device.ON_GPU, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("name", [*LEGAL, *ILLEGAL])
def test_a_gpu_refuses_the_same(name: str) -> None:
    what, number, *_ = (LEGAL | ILLEGAL)[name]
    code = f"import cupy; from test_engine_hopper import copy_anywhere; copy_anywhere(cupy, {what}={number})"
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})
    assert (ended.returncode == 0) == (name in LEGAL), ended.stdout + ended.stderr
    if name in ILLEGAL:
        assert re.search("illegal instruction|misaligned address", ended.stderr), ended.stderr[-600:]


PLACED = (
    HEAD
    + r"""
// A box of 8 rows to s + place, and where its chunks then are.
extern "C" __global__ void look(MAP map, unsigned char *out, int bytes, int place) {
  extern __shared__ __align__(1024) unsigned char s[];
  unsigned long long &b = *(unsigned long long *)(s + 4096);
  for (int i = threadIdx.x; i < 4096; i += 32) s[i] = 0xEE;
  if (threadIdx.x == 0) init(&b, 1), init_fence();
  proxy_fence();
  __syncthreads();
  if (threadIdx.x == 0) expect(&b, bytes), load(s + place, map, &b, 0, 0);
  wait(&b, 0);
  for (int i = threadIdx.x; i < 4096; i += 32) out[i] = s[i];
}
"""
)
# (columns of the box, swizzle, bytes past a multiple of 1024, {(row, chunk): its byte}), as on an H200
SEEN = [
    (16, 128, 0, {(1, 0): 144, (1, 1): 128, (7, 0): 1008, (7, 1): 992}),
    (16, 64, 0, {(1, 0): 64, (2, 0): 144, (2, 1): 128, (7, 1): 480}),
    (64, 128, 128, {(0, 0): 144, (0, 7): 224, (6, 0): 1008, (7, 0): 1024, (7, 7): 1136}),
    (64, 128, 512, {(0, 0): 576, (0, 4): 512, (3, 7): 896, (4, 0): 1024, (7, 7): 1472}),
]


@on_each_device
@pytest.mark.parametrize(("columns", "swizzle", "place", "seen"), SEEN)
def test_where_the_chunks_of_a_box_go(
    cp: Any, columns: int, swizzle: int, place: int, seen: dict[tuple[int, int], int]
) -> None:
    """Rows narrower than the swizzle are as far apart as it is wide, and only the box's own bytes count; the swizzle
    depends on the address, wherever the tile begins."""
    host = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64).view(np.float16)
    out = cp.zeros(4096, np.uint8)
    kernel = compiled(cp, PLACED, options=OPTIONS).get_function("look")
    kernel(
        *((1,), (32,)),
        (map_of(cp.asarray(host), (columns, 8), swizzle), out, np.int32(columns * 16), np.int32(place)),
        shared_mem=4096 + 8,
    )
    words = cp.asnumpy(out).view(np.uint16)
    found = {(int(x) // 64, int(x) % 64 // 8): 2 * i for i, x in enumerate(words) if x != 0xEEEE and x % 8 == 0}
    assert len(found) == columns and found.items() >= seen.items()
    mask = {64: 3, 128: 7}[swizzle]
    for (row, chunk), at in found.items():
        address = place + row * swizzle + 16 * chunk
        assert at == address ^ (address >> 7 & mask) << 4


BULK = HEAD + cuda_text("engine_hopper_bulk")


def test_bulk_copies_of_plain_bytes_land_late_too() -> None:
    data, kernel = np.arange(64, dtype=np.float32), compiled(engine, BULK, options=OPTIONS).get_function("bulk")
    for early in (0, 1):
        out = engine.zeros(64, np.float32)
        kernel((1,), (64,), (engine.asarray(data), out, np.int32(early)))
        assert np.isnan(engine.asnumpy(out)).all() if early else (engine.asnumpy(out) == 2 * data).all()


def test_a_copy_arrives_although_another_thread_looks() -> None:
    """A thread that waits for a copy, and one that looks at what the first writes then, do not wait for each other."""
    flag, kernel = engine.zeros(1, np.int32), compiled(engine, BULK, options=OPTIONS).get_function("looked_for")
    kernel((1,), (64,), (engine.asarray(np.arange(64, dtype=np.float32)), flag), timeout=5)
    assert int(flag[0]) == 63


ADDS = HEAD + cuda_text("engine_hopper_adds")


@on_each_device
@pytest.mark.parametrize("blocks", [1, 24])
def test_bulk_additions_of_many_blocks_are_all_there(cp: Any, blocks: int) -> None:
    data = np.random.default_rng(4).integers(-99, 99, (48, 64)).astype(np.float32)
    out, kernel = cp.full(64, 5, np.float32), compiled(cp, ADDS, options=OPTIONS).get_function("adds")
    kernel((blocks,), (64,), (cp.asarray(data), out, np.int32(48), np.int32(0)))
    np.testing.assert_array_equal(cp.asnumpy(out), data.sum(0) + 5)


@pytest.mark.parametrize(("spoil", "first", "second"), [(1, 77, 77), (2, 0, 77), (3, 0, None)])
def test_a_bulk_addition_reads_at_its_wait(spoil: int, first: float, second: float | None) -> None:
    """An addition reads at its group's wait, like a store; without a wait nothing is added."""
    out, kernel = engine.zeros(64, np.float32), compiled(engine, ADDS, options=OPTIONS).get_function("adds")
    data = np.arange(64, dtype=np.float32)
    kernel((1,), (64,), (engine.asarray(data), out, np.int32(1), np.int32(spoil)))
    wanted = data.copy()
    wanted[0], wanted[32] = first, second or 0
    if second is None:
        wanted[32:] = 0
    np.testing.assert_array_equal(engine.asnumpy(out), wanted)


@on_each_device
def test_a_barrier_of_160_threads_of_which_some_arrive(cp: Any) -> None:
    data = np.random.default_rng(5).integers(-99, 99, (5, 128)).astype(np.float32)
    out, kernel = cp.zeros(128, np.float32), compiled(cp, ADDS, options=OPTIONS).get_function("turns")
    kernel((1,), (160,), (cp.asarray(data), out, np.int32(5)))
    np.testing.assert_array_equal(cp.asnumpy(out), data.sum(0))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("bulk_add(out, s, 24);", "cp.reduce.async.bulk adds a multiple of 16 bytes"),
        ("bulk_add(out + 1, s, 32);", "misaligned address: "),
        ("bulk_add(out, s + 2, 32);", "cp.reduce.async.bulk takes an address that is a multiple of 16 bytes"),
        ("bulk_add(out + (1 << 16), s, 32);", "illegal write to out[65536]"),
    ],
)
def test_bulk_additions_that_are_refused(call: str, says: str) -> None:
    code = f"""{HEAD}#line 1 "added.cu"
extern "C" __global__ void added(float *out) {{
  __shared__ __align__(16) float s[16];
  {call}
}}"""
    kernel = compiled(engine, code, options=OPTIONS).get_function("added")
    with pytest.raises(engine.LaunchError) as raised:
        kernel((1,), (1,), (engine.zeros(64, np.float32),))
    assert says in str(raised.value)


# ------------------------------------------------------------------------------------ wgmma


DTYPE_OF = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
K_OF = {"f16": 16, "bf16": 16, "e4m3": 32, "e5m2": 32}


def wgmma(
    n: int, kind: str, *, registers: bool, sign_a: int = 1, sign_b: int = 1, trans_a: int = 0, trans_b: int = 0
) -> str:
    """Write a C++ function `product` for one form of the instruction. kind: "e4m3.e5m2" if A and B differ."""
    d, types = n // 2, kind if "." in kind else f"{kind}.{kind}"
    k, of_eights = K_OF[kind.partition(".")[0]], kind.startswith("e")
    sums = ", ".join(f"%{i}" for i in range(d))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(d))
    if registers:
        operand, at, given = "{" + ", ".join(f"%{d + i}" for i in range(4)) + "}", d + 4, "const unsigned (&a)[4]"
        inputs, trans = ", ".join(f'"r"(a[{i}])' for i in range(4)), f", {trans_b}"
    else:
        operand, at, given = f"%{d}", d + 1, "unsigned long long a"
        inputs, trans = '"l"(a)', f", {trans_a}, {trans_b}"
    trans = "" if of_eights else trans
    return rf"""
__device__ __forceinline__ void product(float (&d)[{d}], {given}, unsigned long long b, int adds) {{
  asm volatile("{{\n.reg .pred p;\nsetp.ne.b32 p, %{at + 1}, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{types} {{{sums}}}, {operand}, %{at}, p, "
    "{sign_a}, {sign_b}{trans};\n}}"
    : {outputs} : {inputs}, "l"(b), "r"(adds));
}}
"""


# A (64 x 16 STEPS) times B (16 STEPS x N) plus C, for the matrices of one warpgroup. Rows of A along K or, transposed,
# along M; of B along K or, transposed, along N: as in memory, copied by TMA in panels of SPAN bytes. Numbers of 8
# bits, with ITEM = 1, count as half a number each.
PRODUCT = cuda_text("engine_hopper_product")


@functools.cache
def multiplier(cp: Any, n: int, kind: str, steps: int, span: int, **form: Any) -> Any:
    item = 1 if kind.startswith("e") else 2
    defines = {"WIDTH": n, "KS": 16 * steps, "SPAN": span, "ITEM": item, "REGISTERS": int(form.get("registers", False))}
    defines |= {"TRANS_A": form.get("trans_a", 0), "TRANS_B": form.get("trans_b", 0)}
    code = HEAD + wgmma(n, kind, **form) + PRODUCT
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defines.items()))
    kernel = compiled(cp, code, options=options).get_function("multiply_all")
    kernel.max_dynamic_shared_size_bytes = 200 * 1024
    return kernel


def product(
    cp: Any, a: np.ndarray, b: np.ndarray, c: np.ndarray, adds: bool, kind: str, span: int = 128, **form: Any
) -> np.ndarray:
    """Compute A (64, k) B (k, n) + C on a warpgroup. The arrays are stored in the layout that the instruction reads."""
    n, wide, size = b.shape[1], span // a.itemsize, a.itemsize
    kernel = multiplier(cp, n, kind, a.shape[1] * size // 32, span, **{"registers": False, **form})
    unsigned = np.dtype(f"u{size}")
    stored_a = cp.asarray(np.ascontiguousarray(a.T if form.get("trans_a") else a).view(unsigned))
    stored_b = cp.asarray(np.ascontiguousarray(b if form.get("trans_b") else b.T).view(unsigned))
    out = cp.empty((64, n), np.float32)
    swizzle = span if span > 16 else 0
    maps = map_of(stored_a, (wide, stored_a.shape[0]), swizzle), map_of(stored_b, (wide, stored_b.shape[0]), swizzle)
    args = (*maps, cp.asarray(a.view(np.uint32)), cp.asarray(c), out, np.int32(adds))
    kernel((1,), (128,), args, shared_mem=(64 + n) * a.shape[1] * size + 8)
    return cp.asnumpy(out)


def factors(k: int, n: int, kind: str, *, whole: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n + k)
    of_a, _, of_b = kind.partition(".")
    shapes = (64, k), (k, n), (64, n)
    if whole:
        a, b, c = (rng.integers(-6, 7, shape).astype(np.float32) for shape in shapes)
    else:
        a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return a.astype(DTYPE_OF[of_a]), b.astype(DTYPE_OF[of_b or of_a]), c


FORMS = [
    (64, "f16", {}),
    (8, "f16", {}),
    (24, "bf16", {}),
    (128, "bf16", {}),
    (176, "bf16", {}),
    (256, "f16", {}),
    (64, "bf16", {"registers": True}),
    (64, "bf16", {"registers": True, "trans_b": 1}),
    (128, "f16", {"registers": True, "trans_b": 1}),
    (128, "bf16", {"trans_b": 1}),
    (64, "f16", {"trans_a": 1}),
    (128, "f16", {"trans_a": 1, "trans_b": 1}),
    (64, "f16", {"trans_b": 1}),
    (64, "bf16", {"trans_a": 1}),
    (128, "bf16", {"trans_a": 1, "trans_b": 1}),
    (64, "f16", {"sign_a": -1}),
    (64, "bf16", {"sign_b": -1}),
    (128, "e5m2.e4m3", {"registers": True}),
]
MORE_FORMS = [
    (256, "e4m3", {}),
    (24, "e5m2", {}),
    (64, "e4m3", {"sign_a": -1}),
    (8, "e4m3", {}),
    (96, "e4m3.e5m2", {}),
    (64, "e4m3", {"registers": True}),
    (64, "e5m2", {"registers": True, "sign_b": -1}),
]


@on_each_device
@pytest.mark.parametrize(
    ("n", "kind", "form"),
    [*FORMS, *(pytest.param(*form, marks=pytest.mark.exhaustive) for form in MORE_FORMS)],
    ids=str,
)
@pytest.mark.parametrize("adds", [False, True])
def test_products_of_whole_numbers_are_exact(cp: Any, n: int, kind: str, form: dict[str, Any], adds: bool) -> None:
    a, b, c = factors(4 * K_OF[kind.partition(".")[0]], n, kind, whole=True)
    got = product(cp, a, b, c, adds, kind, **form)
    sign = form.get("sign_a", 1) * form.get("sign_b", 1)
    np.testing.assert_array_equal(got, sign * (a.astype(np.float32) @ b.astype(np.float32)) + (c if adds else 0))


@on_each_device
@pytest.mark.parametrize("span", [64, 32, 16])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("f16", {}),
        ("f16", {"trans_b": 1}),
        ("f16", {"trans_a": 1}),
        pytest.param("e4m3", {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_smaller_swizzles_and_none(cp: Any, span: int, kind: str, form: dict[str, Any]) -> None:
    a, b, c = factors(4 * K_OF[kind], 64, kind, whole=True)
    got = product(cp, a, b, c, True, kind, span, **form)
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32) + c)


@on_each_device
@pytest.mark.parametrize("kind", ["bf16", pytest.param("e4m3", marks=pytest.mark.exhaustive)])
def test_two_panels_along_k(cp: Any, kind: str) -> None:
    a, b, c = factors(256 // DTYPE_OF[kind].itemsize, 96, kind, whole=True)
    got = product(cp, a, b, c, False, kind)
    np.testing.assert_array_equal(got, a.astype(np.float32) @ b.astype(np.float32))


@on_each_device
@pytest.mark.parametrize("kind", ["f16", "e4m3", pytest.param("e5m2", marks=pytest.mark.exhaustive)])
def test_what_stands_in_no_number_does_not_spread(cp: Any, kind: str) -> None:
    """inf and NaN come only from their own rows and columns; scale-d = 0 does not read the sums."""
    a, b, c = factors(K_OF[kind], 8, kind, whole=True)
    a[3, 2], b[5, 6] = np.inf, np.nan  # e4m3 has no infinity: NaN instead
    more = 128 // a.itemsize - a.shape[1]
    given = np.pad(a, ((0, 0), (0, more))), np.pad(b, ((0, more), (0, 0)))
    got = product(cp, *given, np.full_like(c, np.nan), False, kind)
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_array_equal(got, expected)


@on_each_device
@pytest.mark.parametrize("kind", ["f16", "e4m3"])
def test_sums_that_are_no_numbers_stay(cp: Any, kind: str) -> None:
    a, b, c = factors(128 // DTYPE_OF[kind].itemsize, 8, kind, whole=True)
    c[1, 2], c[9, 3], c[40, 0] = np.nan, np.inf, -np.inf
    expected = a.astype(np.float32) @ b.astype(np.float32) + c
    np.testing.assert_array_equal(product(cp, a, b, c, True, kind), expected)


# Like mma.sync for each 16 of K: the same sums, truncated in the same way.
BY_MMA = r"""
extern "C" __global__ void by_mma(const unsigned *a, const unsigned *b, const float *c, float *out, int n, int k) {
  int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  for (int tile = 0; tile < n / 8; ++tile) {
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = c[(16 * warp + g + i / 2 * 8) * n + tile * 8 + 2 * q + i % 2];
    for (int step = 0; step < k / 16; ++step) {
      unsigned x[4], y[2];
      for (int i = 0; i < 4; ++i) x[i] = a[((16 * warp + g + i % 2 * 8) * k + 16 * step + i / 2 * 8 + 2 * q) / 2];
      for (int i = 0; i < 2; ++i) y[i] = b[((8 * tile + g) * k + 16 * step + i * 8 + 2 * q) / 2];
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                   "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                   : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    }
    for (int i = 0; i < 4; ++i) out[(16 * warp + g + i / 2 * 8) * n + tile * 8 + 2 * q + i % 2] = d[i];
  }
}
"""


@on_each_device
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_are_rounded_as_those_of_mma_sync(cp: Any, kind: str) -> None:
    """On a GPU as well; and the engine's wgmma gives a GPU's bits."""
    a, b, c = factors(64, 64, kind, whole=False)
    out = cp.empty((64, 64), np.float32)
    kernel = compiled(cp, BY_MMA.replace("TYPE", kind)).get_function("by_mma")
    columns = np.ascontiguousarray(b.T).view(np.uint32)
    args = (cp.asarray(a.view(np.uint32)), cp.asarray(columns), cp.asarray(c), out, np.int32(64), np.int32(64))
    kernel((1,), (128,), args)
    got = product(cp, a, b, c, True, kind).view(np.uint32)
    np.testing.assert_array_equal(got, cp.asnumpy(out).view(np.uint32))
    np.testing.assert_array_equal(got, product(engine, a, b, c, True, kind).view(np.uint32))


# Sums that an H200 has computed, with their factors and addends: "TYPE.DATA.STEPS.A" and so on. Of each kind of data a
# block of 16 x 16: n normal, p positive, w of wide exponents, b of all finite bytes, d designed to find the bits that
# are kept; c: with addends other than 0. Steps: instructions, one after the other.
SUMS = np.load(TESTS / "h200_sums.npz")
SUMS_OF = sorted({name.rpartition(".")[0] for name in SUMS.files})


def computed(cp: Any, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, **form: Any) -> np.ndarray:
    """Compute the sums of a record. a: bytes, (64, 128); b: bytes of columns, (n, 128); c: (64, n)."""
    kind, _, steps = name.split(".")[:3]
    used = 32 * int(steps)
    factor = [np.pad(x[:, :used], ((0, 0), (0, 128 - used))).view(DTYPE_OF[kind]) for x in (a, b)]
    return product(cp, factor[0], factor[1].T, c, True, kind, **form)


@on_each_device
@pytest.mark.parametrize("name", SUMS_OF)
def test_sums_are_those_of_an_h200(cp: Any, name: str) -> None:
    a, b, c, expected = (SUMS[f"{name}.{part}"] for part in "ABCD")
    for i in range(len(a)):
        got = computed(cp, name, np.tile(a[i], (4, 1)), b[i], np.tile(c[i], (4, 1)))
        np.testing.assert_array_equal(got.view(np.uint32), np.tile(expected[i], (4, 1)).view(np.uint32))


@on_each_device
def test_factors_in_registers_give_the_same_sums(cp: Any) -> None:
    name = "e4m3.wcc.4"
    a, b, c, expected = (SUMS[f"{name}.{part}"][0] for part in "ABCD")
    got = computed(cp, name, np.tile(a, (4, 1)), b, np.tile(c, (4, 1)), registers=True)
    np.testing.assert_array_equal(got[:16], expected)


# ------------------------------------------------------------------------------------ the order of effects

ORDER = HEAD + cuda_text("engine_hopper_order")


def test_sums_are_poison_until_their_wait() -> None:
    array, kernel = halves(128, 64), compiled(engine, ORDER, options=OPTIONS).get_function("groups")
    exact = (engine.asnumpy(array)[:64, :16].astype(float) @ engine.asnumpy(array)[64:, :16].astype(float).T)[
        [16 * (t // 32) + t % 32 // 4 for t in range(128)], [2 * (t % 4) for t in range(128)]
    ]
    for spoil in (0, 1):
        out = engine.zeros((4, 128), np.float32)
        kernel((1,), (128,), (map_of(array, (64, 64)), out, np.int32(spoil)), shared_mem=2 * 64 * 128)
        early, first, other, last = engine.asnumpy(out)
        assert np.isnan(early).all() and np.isnan(other).all()
        np.testing.assert_array_equal(first, exact)
        assert (last == exact + 1).all() != bool(spoil)  # A and B are read at the wait, not before


@on_each_device
def test_phases_of_an_mbarrier(cp: Any) -> None:
    out = cp.zeros((4, 64), np.int32)
    compiled(cp, ORDER, options=OPTIONS).get_function("phases")((1,), (64,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), np.repeat(np.arange(1, 5)[:, None], 64, 1))


@on_each_device
def test_turns_by_named_barriers(cp: Any) -> None:
    out = cp.zeros((2, 3), np.int32)
    compiled(cp, ORDER, options=OPTIONS).get_function("turns")((1,), (64,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), [[1, 3, 5], [0, 2, 4]])


# ------------------------------------------------------------------------------------ what is wrong

BROKEN = HEAD + cuda_text("engine_hopper_broken")


REGISTERS = r"""
extern "C" __global__ __launch_bounds__(384, 1) void registers(int *out) {
  if (threadIdx.x >= 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  out[threadIdx.x] = threadIdx.x;
}
"""


def launch_broken(name: str, block: int = 128) -> str:
    """Launch a kernel of BROKEN, and return its message, or ""."""
    kernel = compiled(engine, BROKEN, options=OPTIONS).get_function(name)
    args: tuple[Any, ...] = (map_of(halves(64, 64), (64, 64)),)
    args += (engine.zeros(256, np.uint8),) if name == "no_such_map" else ()
    try:
        kernel((1,), (block,), args, shared_mem=8192)
    except engine.LaunchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "block", "says"),
    [
        ("no_such_map", 128, "none of the launch's tensor maps"),
        ("wrong_rank", 128, "takes a tensor of 3 dimensions, and the map's has 2"),
        (
            "tile_not_aligned",
            128,
            "misaligned address: cp.async.bulk.tensor takes a tile at a multiple of 128 bytes of shared memory",
        ),
        (
            "tile_too_long",
            128,
            "takes a tile of 8192 bytes at byte 1024 of dynamic shared memory, which has 8192 bytes",
        ),
        ("not_initialised", 128, "nobody has initialised this mbarrier"),
        (
            "waits_for_ever",
            128,
            "deadlock: thread (0,0,0) waits at broken.cu:LINE for the end of the phase of parity 0",
        ),
        ("waits_for_ever", 128, "It expects 1 more arrival. Waiting: warps 0 to 3: mbarrier b, parity 0"),
        ("too_many_arrive", 128, "more threads arrive at an mbarrier than a phase of it expects"),
        ("too_few_bytes", 128, "It expects 64 more bytes of copies than were sent to it"),
        ("too_many_bytes", 128, "64 more bytes arrived than expect_tx announced"),
        (
            "descriptor_outside",
            128,
            "wgmma's descriptor of B reaches to byte 8192 of dynamic shared memory, which has 8192 bytes",
        ),
        ("descriptor_not_aligned", 128, "misaligned address: wgmma's descriptor of B begins at 0x"),
        ("threads_disagree", 128, "the threads of a warpgroup must agree, and do not: whether wgmma adds to its sums"),
        ("a_warp_is_missing", 128, "for its warpgroup, and of its 128 threads 96 have come"),
        ("a_warp_is_missing", 128, "warp 3: has left the kernel"),
        ("no_whole_warpgroup", 64, "needs a warpgroup, four warps whose first is a multiple of four"),
        ("registers_for_ever", 384, "its warpgroup has 168 registers for each thread, and the pool has 56 more"),
        ("fewer_by_inc", 128, "setmaxnreg.inc to 56 registers, and the threads of this warpgroup have 64"),
        ("half_a_warpgroup", 128, "waits in setmaxnreg.dec at broken.cu:LINE for its warpgroup"),
    ],
)
def test_errors_name_the_line(name: str, block: int, says: str) -> None:
    message = launch_broken(name, block)
    lines = BROKEN.partition('"broken.cu"\n')[2].splitlines()
    line = next(i for i, text in enumerate(lines, 1) if f"// {name}" in text)
    assert says.replace("LINE", str(line)) in message, message
    assert f"broken.cu:{line}" in message, message


@on_each_device
def test_registers_that_fit_run(cp: Any) -> None:
    kernel = compiled(cp, REGISTERS, options=OPTIONS).get_function("registers")
    out = cp.zeros(384, np.int32)
    kernel((1,), (384,), (out,))
    assert (cp.asnumpy(out) == np.arange(384)).all()


def test_registers_that_fit_are_shared_out() -> None:
    assert launch_broken("registers_fit", 384) == ""
    assert launch_broken("registers_not_given_back", 256) == ""  # 256 at the start
    assert launch_broken("registers_not_known", 128) == ""


@pytest.mark.parametrize("registers", [16, 30, 264])
def test_registers_that_ptxas_refuses(registers: int) -> None:
    code = rf"""extern "C" __global__ __launch_bounds__(128, 1) void k() {{
  asm volatile("setmaxnreg.dec.sync.aligned.u32 {registers};");
}}"""
    with pytest.raises(engine.CompileError, match="24 to 256 registers, a multiple of 8"):
        engine.RawModule(code=code, options=OPTIONS).compile()


@pytest.mark.parametrize(
    "statement",
    [
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%0, %0, %0}], "
        "[%0], {%0};",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%1, {%0, %0}], [%0];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%1], [%0], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%1], [%0], 16;",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%0], [%0], 16, [%0];",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0, %0, %0, %0}, %1, %1, 1, 1, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0, %0, %0, %0}, %1, %1, 1;",
    ],
)
def test_what_is_not_built_is_named(statement: str) -> None:
    code = f"""extern "C" __global__ void k(long long x) {{
  unsigned r = 0;
  asm volatile("{statement}" : "+r"(r) : "l"(x));
}}"""
    name = statement.split(" ")[0]
    with pytest.raises(engine.LaunchError, match=f"does not know the instruction {re.escape(name)}"):
        engine.RawModule(code=code, options=OPTIONS).get_function("k")((1,), (128,), (np.int64(0),))


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0", "has no transposition bits"),
        ("m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%5, %5, %5, %5}, %4, 1, 1, 1, 1", "has no transposition bits"),
        ("m64n8k16.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, 1, 1, 1", "k16 for f16 and bf16, k32 for e4m3 and e5m2"),
        ("m64n8k32.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0", "k16 for f16 and bf16, k32 for e4m3"),
        ("m64n8k32.f32.e4m3.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1", "k16 for f16 and bf16, k32 for e4m3 and e5m2"),
        ("m64n8k16.f32.f16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0", "both of f16 or both of bf16"),
        ("m64n8k32.bf16.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, 1, 1, 1", "adds in f32 or f16"),
        ("m64n8k16.f16.bf16.bf16 {%0, %1}, %4, %4, 1, 1, 1, 0, 0", "adds in f32"),
        ("m64n12k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %0, %1}, %4, %4, 1, 1, 1", "8 to 256 columns, in steps of 8"),
        ("m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %4, 1, 0, 1", "wgmma's scales are 1 or -1"),
    ],
)
def test_wgmma_that_ptxas_refuses(statement: str, says: str) -> None:
    code = WGMMA.replace("STATEMENT", statement)
    with pytest.raises(engine.CompileError, match=re.escape(says)):
        engine.RawModule(code=code, options=OPTIONS).compile()
    has_nvrtc = refused_by_ptxas("no C++")
    assert bool(refused_by_ptxas(code)) == bool(has_nvrtc)


WGMMA = r"""extern "C" __global__ __launch_bounds__(128) void k(float *out, unsigned long long x) {
  float d[4] = {};
  unsigned r = (unsigned)x;
  asm volatile("wgmma.mma_async.sync.aligned.STATEMENT;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(x), "r"(r));
  for (int i = 0; i < 4; ++i) out[i] = d[i];
}"""


def test_wgmma_with_sums_of_16_bits_is_refused() -> None:
    code = WGMMA.replace("STATEMENT", "m64n8k32.f16.e4m3.e4m3 {%5, %5}, %4, %4, 1, 1, 1")
    kernel = engine.RawModule(code=code, options=OPTIONS).get_function("k")
    with pytest.raises(engine.LaunchError, match="accumulators of float32, not of float16"):
        kernel((1,), (128,), (engine.zeros(4, np.float32), np.uint64(0)))


def test_maps_of_no_array_are_refused() -> None:
    kernel = compiled(engine, BROKEN, options=OPTIONS).get_function("waits_for_ever")
    array = halves(64, 64)
    too_long = tensor_map.encode_tiled("float16", array.ctypes.data, (64, 65), (128,), (64, 64))
    with pytest.raises(
        engine.LaunchError, match="covers 8,320 bytes, and the array has only 8,192 from its address on"
    ):
        kernel((1,), (128,), (too_long,), shared_mem=8192)
    gone = tensor_map.encode_tiled("float16", 1 << 30, (64, 64), (128,), (64, 64))
    with pytest.raises(engine.LaunchError, match="where there is no device array"):
        kernel((1,), (128,), (gone,), shared_mem=8192)
    with pytest.raises(TypeError, match="struct of 128 bytes"):
        kernel((1,), (128,), (np.zeros(1, np.float32),), shared_mem=8192)


def test_ptxas_takes_these_kernels() -> None:
    """A GPU's assembler accepts the kernels that the engine runs here."""
    for code in (LOADS, STORES, BULK, ADDS):  # (for sums read too early it reports that it adds a wait)
        assert refused_by_ptxas(code) == ""
    for n, kind, form in FORMS[:1] + FORMS[7:8] + FORMS[10:12] + FORMS[17:] + MORE_FORMS[1:2]:
        form = {"registers": False, **form}
        options = [f"-D{name}={form.get(name.lower(), 0):d}" for name in ("REGISTERS", "TRANS_A", "TRANS_B")]
        options.append(f"-DITEM={DTYPE_OF[kind.partition('.')[0]].itemsize}")
        code = HEAD + wgmma(n, kind, **form) + PRODUCT
        assert refused_by_ptxas(code, (*OPTIONS, *options, f"-DWIDTH={n}", "-DKS=64")) == ""


# ------------------------------------------------------------------------------------ other orders

ORDERS = (
    HEAD
    + r"""
// In which order warps come; and what a warp reads that should have waited for another one.
extern "C" __global__ void come(int *out) {
  __shared__ int next;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) out[atomicAdd(&next, 1)] = threadIdx.x / 32;
}
extern "C" __global__ void relies_on_the_order(float *out) {
  __shared__ float s;
  __syncthreads();
  if (threadIdx.x == 0) s = 1.0f;
  if (threadIdx.x == 96) out[0] = s;
}
"""
)


def test_another_order_of_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU guarantees no order. The same seed gives the same order; results that depend on it show with some seeds."""
    module = compiled(engine, ORDERS, options=OPTIONS)
    seen, read = {}, set()
    for order in [*range(8), *range(8)]:
        monkeypatch.setenv("COURSE_CPU_ORDER", str(order))
        out, value = engine.zeros(4, np.int32), engine.zeros(1, np.float32)
        module.get_function("come")((1,), (128,), (out,))
        module.get_function("relies_on_the_order")((1,), (128,), (value,))
        said = tuple(out.get().tolist())
        assert seen.setdefault(order, said) == said and sorted(said) == [0, 1, 2, 3]
        read.add(str(value[0]))
    assert seen[0] == (0, 1, 2, 3) and len(set(seen.values())) > 3
    assert read == {"1.0", "nan"}
    monkeypatch.setenv("COURSE_CPU_ORDER", "some")
    with pytest.raises(ValueError, match="COURSE_CPU_ORDER must be a whole number"):
        module.get_function("come")((1,), (128,), (out,))


@pytest.mark.parametrize("order", range(1, 6))
def test_products_in_other_orders(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies arrive before a thread waits for them, and the warps of a warpgroup run one after the other."""
    monkeypatch.setenv("COURSE_CPU_ORDER", str(order))
    a, b, c = factors(64, 64, "f16", whole=True)
    np.testing.assert_array_equal(
        product(engine, a, b, c, True, "f16"), a.astype(np.float32) @ b.astype(np.float32) + c
    )


# ------------------------------------------------------------------------------------ where tiles are

STATIC = HEAD + cuda_text("engine_hopper_static")


def test_static_and_dynamic_tiles_in_one_product() -> None:
    """On a GPU dynamic memory would begin after the static array, whose size is a multiple of 1024 bytes."""
    a, b, out = halves(64, 64), halves(8, 64, seed=1), engine.empty((64, 8), np.float32)
    compiled(engine, STATIC, options=OPTIONS).get_function("both")((1,), (128,), (a, b, out), shared_mem=1024)
    expected = engine.asnumpy(a).astype(np.float32) @ engine.asnumpy(b).astype(np.float32).T
    np.testing.assert_array_equal(engine.asnumpy(out), expected)
