"""Inline PTX that accesses memory: loads, stores, atomics, their order, addresses, and what a checked run records."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from backends import compiled, on_each_device
from cuda_files import cuda_text

from helpers import engine
from helpers.engine import checked, observed

LOADS = {
    # text of the instruction, its results' constraints, bytes per thread
    "u8": ("ld.global.u8 %0, [%1];", "r", 1),
    "s8": ("ld.global.s8 %0, [%1];", "r", 1),
    "u16": ("ld.global.nc.u16 %0, [%1];", "h", 2),
    "s16": ("ld.global.ca.s16 %0, [%1];", "r", 2),
    "b32": ("ld.cg.global.b32 %0, [%1];", "r", 4),
    "f32": ("ld.global.nc.L1::no_allocate.L2::128B.f32 %0, [%1];", "f", 4),
    "f32_bits": ("ld.global.f32 %0, [%1];", "r", 4),
    "u64": ("ld.global.cs.u64 %0, [%1];", "l", 8),
    "f64": ("ld.f64 %0, [%1];", "d", 8),
    "v2_u8": ("{ .reg .u8 a, b; ld.global.v2.u8 {a, b}, [%2]; cvt.u32.u8 %0, a; cvt.u32.u8 %1, b; }", "rr", 2),
    "v4_u16": ("ld.global.lu.v4.u16 {%0, %1, %2, %3}, [%4];", "hhhh", 8),
    "v2_f32": ("ld.global.v2.f32 {%0, %1}, [%2];", "ff", 8),
    "v4_f32": ("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];", "ffff", 16),
    "v4_u32": ("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];", "rrrr", 16),
    "v2_u64": ("ld.global.v2.u64 {%0, %1}, [%2];", "ll", 16),
    "v2_f64": ("ld.global.f64.v2 {%0, %1}, [%2];", "dd", 16),
    "b128": ("{ .reg .b128 t; ld.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }", "ll", 16),
    "volatile": ("ld.volatile.global.u32 %0, [%1];", "r", 4),
    "relaxed": ("ld.relaxed.gpu.global.u32 %0, [%1];", "r", 4),
    "acquire": ("ld.acquire.sys.global.u64 %0, [%1];", "l", 8),
    "acquire_cta": ("ld.global.acquire.cta.f32 %0, [%1];", "f", 4),
    "hint": (
        "{ .reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0; ld.global.L2::cache_hint.b32 %0, [%1], p; }",
        "r",
        4,
    ),
}
NUMPY = {"r": np.uint32, "l": np.uint64, "f": np.float32, "d": np.float64, "h": np.uint16}
CPP = {"r": "unsigned", "l": "unsigned long long", "f": "float", "d": "double", "h": "unsigned short"}


def loads_source() -> str:
    """Write a kernel each: thread t reads its bytes at x + t * bytes, and writes each result as 8 bytes."""
    code = ""
    for name, (text, letters, size) in LOADS.items():
        outs = ", ".join(f'"={letter}"(r{i})' for i, letter in enumerate(letters))
        declared = " ".join(f"{CPP[letter]} r{i};" for i, letter in enumerate(letters))
        stored = " ".join(f"*({CPP[c]} *)(y + t * {len(letters)} + {i}) = r{i};" for i, c in enumerate(letters))
        code += f"""
extern "C" __global__ void load_{name}(const unsigned char *x, unsigned long long *y) {{
  int t = threadIdx.x;
  {declared}
  asm volatile("{text}" : {outs} : "l"(x + t * {size}) : "memory");
  {stored}
}}"""
    return code


LOADS_SOURCE = loads_source()


@on_each_device
@pytest.mark.parametrize("name", LOADS)
def test_loads(cp: Any, name: str) -> None:
    _, letters, size = LOADS[name]
    x = np.random.default_rng(0).integers(0, 256, 32 * size).astype(np.uint8)
    y = cp.zeros((32, len(letters)), np.uint64)
    compiled(cp, LOADS_SOURCE).get_function(f"load_{name}")((1,), (32,), (cp.asarray(x), y))
    part = size // len(letters)
    signed = name.startswith("s")
    whole = x.reshape(32, len(letters), part).view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[part])[
        ..., 0
    ]
    if signed:
        whole = whole.view(f"i{part}").astype(np.int32).view(np.uint32)
    np.testing.assert_array_equal(cp.asnumpy(y), whole.astype(np.uint64))


STORES_SOURCE = cuda_text("engine_ptx_memory_stores")


@on_each_device
def test_stores(cp: Any) -> None:
    x = np.random.default_rng(1).integers(0, 2**32, (32, 4)).astype(np.uint32)
    y = cp.zeros((32, 32), np.uint32)
    compiled(cp, STORES_SOURCE).get_function("stores")((1,), (32,), (y, cp.asarray(x)))
    a, b, c, d = x.T
    expected = np.zeros((32, 32), np.uint32)
    expected[:, 0] = (a & 255) | (b & 0xFFFF) << 16
    expected[:, 1] = c
    expected[:, 2:4] = expected[:, 8:10] = expected[:, 12:14] = expected[:, 16:18] = expected[:, 18:20] = x[:, :2]
    expected[:, 4:8] = x
    expected[:, 10], expected[:, 11] = d, a
    expected[:, 14] = 17
    expected[:, 20], expected[:, 21] = np.where(a >> 31, a, 0), np.where(a >> 31, 0, a)
    np.testing.assert_array_equal(cp.asnumpy(y), expected)


SHARED_SOURCE = cuda_text("engine_ptx_memory_shared")


@on_each_device
def test_shared_memory(cp: Any) -> None:
    x = np.arange(128, dtype=np.float32)
    y = cp.zeros((3, 128), np.float32)
    compiled(cp, SHARED_SOURCE).get_function("shared")((1,), (128,), (cp.asarray(x), y), shared_mem=1024)
    first = 64 + 4 * (np.arange(128) % 16)
    got = cp.asnumpy(y)
    np.testing.assert_array_equal(got[0], sum((first + i) * 10.0**i for i in range(4)))
    np.testing.assert_array_equal(got[1], 2 * x[::-1])
    np.testing.assert_array_equal(got[2], 1)


ATOMICS_SOURCE = cuda_text("engine_ptx_memory_atomics")


@on_each_device
def test_atomics(cp: Any) -> None:
    y = cp.asarray(np.array([0, 0, 2**31, 2**32 - 1, 0, 2**32 - 1, 0, 5], np.uint32))
    w, f, d = cp.zeros(3, np.uint64), cp.zeros(4, np.float32), cp.zeros(1, np.float64)
    pairs, old = cp.zeros(2, np.uint32), cp.zeros(310, np.uint32)
    compiled(cp, ATOMICS_SOURCE).get_function("atomics")((2,), (128,), (y, w, f, d, pairs, old))
    expected = [256, 2**32 - 768, 2**32 + 255 - 1000, 5, 2**32 - 1, 2**32 - 256, 256 % 10, 43]
    assert cp.asnumpy(y).tolist() == expected
    assert cp.asnumpy(w).tolist() == [256 << 33, 0, 0]
    assert cp.asnumpy(f).tolist() == [128, 0, 256, 256] and cp.asnumpy(d)[0] == 64
    halves = cp.asnumpy(pairs).view(np.uint16)
    assert halves.view(np.float16)[:2].tolist() == [512, 256]
    assert halves[2:].tolist() == [0x4400, 0x4380]  # sums of 2 and 1 in bfloat16: 512 and 256 absorb the rest
    got = cp.asnumpy(old)
    np.testing.assert_array_equal(got[:256], 1)
    numbers = np.arange(256).reshape(2, 128)
    assert got[300:302].tolist() == [5, 42]
    assert got[302:306].tolist() == [v for row in numbers for v in (int(row.sum()), int(np.bitwise_xor.reduce(row)))]


COPIES_SOURCE = r"""
extern "C" __global__ void copies(const int *x, int *y) {
  __shared__ __align__(16) int s[128];
  int t = threadIdx.x;
  unsigned at = (unsigned)__cvta_generic_to_shared(s + 4 * t);
  asm volatile("{ .reg .pred p; .reg .b64 h; setp.eq.u32 p, %2, 3;\n"
               "  createpolicy.fractional.L2::evict_first.b64 h, 1.0;\n"
               "  @!p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, h; }"
               :: "r"(at), "l"(x + 4 * t), "r"(t) : "memory");
  if (t == 3) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; cp.async.ca.shared.global.L2::128B [%0], [%1+0], 8, p; }"
                 :: "r"(at), "l"(x + 4 * t), "r"(1) : "memory");
    asm volatile("cp.async.ca.shared::cta.global [%0 + 8], [%1 + 8], %2;"
                 :: "r"(at), "l"(x + 4 * t), "n"(8) : "memory");
  }
  asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) y[4 * t + i] = s[4 * t + i];
}
"""


@on_each_device
def test_asynchronous_copies(cp: Any) -> None:
    x = np.arange(1, 129, dtype=np.int32)
    y = cp.zeros(128, np.int32)
    compiled(cp, COPIES_SOURCE).get_function("copies")((1,), (32,), (cp.asarray(x), y))
    x[12:14] = 0  # the predicate: the source is not read
    np.testing.assert_array_equal(cp.asnumpy(y), x)


# ------------------------------------------------------------------------------------ what is wrong

BROKEN = cuda_text("engine_ptx_memory_broken")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("misaligned", "misaligned address: ld, st, atom and red take an address that is a multiple of what they"),
        ("misaligned_shared", "misaligned address: st takes an address that is a multiple of 16 bytes"),
        ("past_the_end", "illegal read of x["),
        ("not_shared", "ld takes an address within shared memory"),
    ],
)
def test_errors_name_the_line(name: str, says: str) -> None:
    with pytest.raises(engine.LaunchError) as caught:
        compiled(engine, BROKEN).get_function(name)(
            (1,), (1,), (engine.zeros(4, np.float32), engine.zeros(4, np.float32))
        )
    begin = next(i for i, text in enumerate(BROKEN.splitlines(), 1) if f"void {name}(" in text)
    line = next(i for i, text in enumerate(BROKEN.splitlines(), 1) if i > begin and "asm" in text)
    message = str(caught.value)
    assert says in message and re.search(rf"kernel\.cu:{line}\b", message), message


CHECKED_SOURCE = cuda_text("engine_ptx_memory_checked")


@pytest.mark.parametrize(
    ("name", "grid", "kind"),
    [
        ("race", 1, observed.RACE),
        ("fixed", 1, None),
        ("bounds", 1, observed.OUT_OF_BOUNDS),
        ("hand_over", 2, None),
        ("no_hand_over", 2, observed.RACE),
        ("counted", 2, None),
    ],
)
def test_a_checked_run_sees_every_access(name: str, grid: int, kind: int | None) -> None:
    kernel = compiled(engine, CHECKED_SOURCE).get_function(name)
    first = engine.zeros(4, np.int32) if "hand_over" in name else engine.zeros(64, np.float32)
    args = (engine.zeros(1, np.uint32),) if name == "counted" else (first, engine.zeros(64, np.float32))
    seen = checked.observe(kernel, (grid,), (64 if "hand_over" not in name else 1,), args)
    kinds = {issue.kind for issue in seen.issues} - ({observed.UNINITIALISED} if name == "race" else set())
    assert kinds == ({kind} if kind else set()), seen.issues
    begin = next(i for i, text in enumerate(CHECKED_SOURCE.splitlines(), 1) if f"void {name}(" in text)
    end = next(
        (i for i, text in enumerate(CHECKED_SOURCE.splitlines(), 1) if i > begin and "__global__" in text), 10**6
    )
    assert all(site.place and begin < site.place[1] < end for site in seen.sites), seen.sites


SPINNING = r"""
extern "C" __global__ void spin(int *flags, int *y) {
  if (blockIdx.x == 0) {
    for (int i = 0; i < 3; ++i) asm volatile("nanosleep.u32 100;");
    asm volatile("st.global.s32 [%0], 5;" :: "l"(flags) : "memory");
  } else {
    int seen;
    do {
      asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(seen) : "l"(flags));
      asm volatile("nanosleep.u32 20;");
    } while (seen != 5);
    y[0] = seen;
  }
}
"""


@on_each_device
def test_a_volatile_load_is_done_every_time(cp: Any) -> None:
    flags, y = cp.zeros(1, np.int32), cp.zeros(1, np.int32)
    compiled(cp, SPINNING).get_function("spin")((2,), (1,), (flags, y))
    assert cp.asnumpy(y)[0] == 5
