"""More of the zoo: what orders accesses and what does not (groups of threads, volatile), and values that meet."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import zoo
from zoo import SYNC, Bug, out, some

from helpers import engine
from helpers.engine import nvrtc
from helpers.xray import Report, xray

GROUPS = "#include <cooperative_groups.h>\n#include <cooperative_groups/memcpy_async.h>\n"

GROUP_BARRIERS = [
    Bug(
        "tile_without_sync",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  auto tile = cooperative_groups::tiled_partition<32>(cooperative_groups::this_thread_block());
  int t = threadIdx.x;
  s[t] = in[t];  // here
  float other = tile.shfl_xor(in[t], 1); /* no barrier */
  out[t] = s[t ^ 1] + other;  // there
}
""",
        (("/* no barrier */", "tile.sync();"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "tile_too_small",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  auto block = cooperative_groups::this_thread_block();
  auto tile = cooperative_groups::tiled_partition<8>(cooperative_groups::tiled_partition<32>(block));
  int t = threadIdx.x;
  s[t] = in[t];  // here
  cooperative_groups::sync(tile);
  out[t] = s[t ^ 8];  // there
}
""",
        (("partition<8>", "partition<16>"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "tile_of_a_run_time_size",
        "race",
        """NAME(const float *in, float *out, int size) {
  __shared__ float s[64];
  cooperative_groups::thread_group block = cooperative_groups::this_thread_block();
  cooperative_groups::thread_group tile = cooperative_groups::tiled_partition(block, size);
  int t = threadIdx.x;
  s[t] = in[t];  // here
  /* no barrier */
  out[t] = s[t ^ 3];  // there
}
""",
        (("/* no barrier */", "tile.sync();"),),
        lambda: (some(64), out(64), np.int32(4)),
        array="s",
    ),
    Bug(
        "coalesced_without_sync",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t % 2) {
    auto active = cooperative_groups::coalesced_threads();
    s[t] = in[t];  // here
    /* no barrier */
    out[t] = s[t ^ 2];  // there
  } else {
    out[t] = 0;
  }
}
""",
        (("/* no barrier */", "active.sync();"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "parts_of_a_tile",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  auto tile = cooperative_groups::tiled_partition<32>(cooperative_groups::this_thread_block());
  auto part = cooperative_groups::labeled_partition(tile, t % 4);
  s[t] = in[t];  // here
  /* no barrier */
  out[t] = s[t ^ 4];  // there
}
""",
        (("/* no barrier */", "part.sync();"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "memcpy_async_without_wait",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  auto block = cooperative_groups::this_thread_block();
  cooperative_groups::memcpy_async(block, s, in, sizeof(float) * 64);  // here
  /* no barrier */
  out[threadIdx.x] = s[63 - threadIdx.x];  // there
}
""",
        (("/* no barrier */", "cooperative_groups::wait(block);"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
]

COPIES = [
    Bug(
        "memcpy_by_one_thread",
        "race",
        """NAME(const float *in, float *out, int bytes) {
  extern __shared__ float s[];
  if (threadIdx.x == 0) memcpy(s, in, bytes);  // there
  /* no barrier */
  out[threadIdx.x] = s[threadIdx.x];  // here
}
""",
        (SYNC,),
        lambda: (some(64), out(64), np.int32(256)),
        shared_mem=256,
        array="dynamic shared memory",
        at_thread=1,
    ),
    Bug(
        "memcpy_of_too_much",
        "out of bounds",
        """NAME(const float *in, float *out, int bytes) {
  extern __shared__ float s[];
  if (threadIdx.x == 0) memcpy(s, in, bytes + 4);  // here
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
""",
        (("bytes + 4", "bytes"),),
        lambda: (some(65), out(64), np.int32(256)),
        shared_mem=256,
        array="dynamic shared memory",
        index=64,
        at_thread=0,
    ),
    Bug(
        "memset_of_too_little",
        "uninitialised",
        """NAME(const int *in, int *out, int bytes) {
  extern __shared__ int bins[];
  if (threadIdx.x == 0) memset(bins, 0, bytes - 4);
  __syncthreads();
  atomicAdd(&bins[in[threadIdx.x]], 1);  // here
  __syncthreads();
  out[threadIdx.x] = bins[threadIdx.x];
}
""",
        (("bytes - 4", "bytes"),),
        lambda: (some(64, "i4"), engine.zeros(64, "i4"), np.int32(256)),
        shared_mem=256,
        array="dynamic shared memory",
        index=63,
        at_thread=63,
    ),
    Bug(
        "memcpy_over_its_neighbour",
        "race",
        """NAME(float *a, int bytes) {
  memcpy(a + 2 * threadIdx.x, a + 200 + threadIdx.x, bytes);  // here // there
}
""",
        ((", bytes);", ", bytes - 4);"),),
        lambda: (some(300), np.int32(12)),
        array="a",
    ),
]

VOLATILE = [
    Bug(
        "volatile_tail",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  if (t < 32) {
    volatile float *v = s;
    for (int half = 32; half > 0; half /= 2) {
      float sum = v[t] + v[t + half];  // there
      /* no barrier */
      v[t] = sum;  // here
      /* no barrier */
    }
  }
  if (t == 0) out[0] = s[0];
}
""",
        (("/* no barrier */", "__syncwarp();"),),
        lambda: (some(64), out(1)),
        array="s",
    ),
    Bug(
        "volatile_between_warps",
        "race",
        """NAME(const int *in, int *out) {
  volatile __shared__ int s[64];
  s[threadIdx.x] = in[threadIdx.x];  // here
  /* no barrier */
  out[threadIdx.x] = s[63 - threadIdx.x];  // there
}
""",
        (SYNC,),
        lambda: (some(64, "i4"), engine.zeros(64, "i4")),
        array="s",
    ),
    Bug(
        "volatile_in_global_memory",
        "race",
        """NAME(volatile float *a, float *out) {
  int t = threadIdx.x;
  a[t] = 2 * t;  // here
  /* no barrier */
  out[t] = a[t ^ 1];  // there
}
""",
        (("/* no barrier */", "__syncwarp();"),),
        lambda: (engine.zeros(64, "f4"), out(64)),
        array="a",
    ),
    Bug(
        "volatile_flag_without_fence",
        "race",
        """NAME(volatile int *flag, float *box, float *out) {
  if (threadIdx.x == 0) {
    box[0] = 3;
    /* no fence */
    flag[0] = 1;  // there
  }
  if (threadIdx.x == 40) {
    while (flag[0] == 0) __nanosleep(100);  // here
    out[0] = 1;
  }
}
""",
        (("/* no fence */", "__threadfence_block();"),),
        lambda: (engine.zeros(1, "i4"), out(1), out(1)),
        array="flag",
        at_thread=40,
    ),
    Bug(
        "volatile_beside_plain",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  volatile float *v = s;
  v[threadIdx.x] = in[threadIdx.x];  // here
  /* no barrier */
  out[threadIdx.x] = s[63 - threadIdx.x];  // there
}
""",
        (SYNC,),
        lambda: (some(64), out(64)),
        array="s",
    ),
]

PTX = """
__device__ int acquired(const int *p) {
  int v;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ void add_release(int *p) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(p) : "memory"); }
__device__ void add_relaxed(int *p) { asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(p) : "memory"); }
"""

# A load that sees an atomic write comes after it, and so does what its thread, or who meets it at a barrier, does then.
SEEN = [
    Bug(
        "reset_without_a_look",
        "race",
        """NAME(int *lock) {
  if (blockIdx.x == 0) add_release(lock);
  else {
    /* no look */
    lock[0] = 0;
  }
}
""",
        (("/* no look */", "while (acquired(lock) == 0) {}"),),
        lambda: (engine.zeros(1, "i4"),),
        grid=2,
        block=1,
        array="lock",
    ),
    Bug(
        "reset_that_nobody_is_told_of",
        "race",
        """NAME(int *lock) {
  if (blockIdx.x == 0) {
    while (acquired(lock) < 1) {}
    lock[0] = 0;
    /* no fence */
    atomicExch(lock + 1, 1);
  } else {
    if (blockIdx.x == 2) while (acquired(lock + 1) == 0) {}
    add_release(lock);
  }
}
""",
        (("/* no fence */", "__threadfence();"),),
        lambda: (engine.zeros(2, "i4"),),
        grid=3,
        block=1,
        array="lock",
        index=0,
    ),
    Bug(
        "seen_by_a_volatile_read",
        "race",
        """NAME(int *lock) {
  if (blockIdx.x == 0) {
    atomicAdd(lock, 1);  // there
  } else {
    while (*(volatile int *)(lock + 1)) {}  // of lock itself
    lock[0] = 0;  // here
  }
}
""",
        (("(lock + 1)) {}", "(lock) == 0) {}"),),
        lambda: (engine.zeros(2, "i4"),),
        grid=2,
        block=1,
        array="lock",
        index=0,
    ),
    Bug(
        "an_add_that_releases_nothing",
        "race",
        """NAME(int *lock, float *box, float *out) {
  if (blockIdx.x == 0) {
    box[0] = 1;  // there
    add_relaxed(lock);
  } else {
    while (acquired(lock) == 0) {}
    out[0] = box[0];  // here
    lock[0] = 0;
  }
}
""",
        (("add_relaxed", "add_release"),),
        lambda: (engine.zeros(1, "i4"), out(1), out(1)),
        grid=2,
        block=1,
        array="box",
    ),
]

SAME_VALUE = [
    Bug(
        "a_flag_by_two_warps",
        "same value",
        """NAME(const float *in, int *found) {
  if (in[threadIdx.x] > 30) found[0] = 1;  // here // there
}
""",
        (("> 30", "> 31"),),
        lambda: (some(64), engine.zeros(1, "i4")),
        array="found",
        index=0,
        at_thread=32,
    ),
    Bug(
        "a_flag_by_two_blocks",
        "same value",
        """NAME(const float *in, int *found) {
  if (threadIdx.x == 0) found[0] = 1;  // here // there
}
""",
        (("found[0] = 1;", "atomicExch(&found[0], 1);"),),
        lambda: (some(64), engine.zeros(1, "i4")),
        grid=2,
        array="found",
        at_block=1,
    ),
    Bug(
        "two_lines_with_one_value",
        "same value",
        """NAME(const float *in, float *out) {
  __shared__ float4 total;
  if (threadIdx.x == 3) total = make_float4(1, 2, 3, in[0]);  // there
  if (threadIdx.x == 7) total = make_float4(1, 2, 3, in[1]);  // here
  __syncthreads();
  out[threadIdx.x] = total.x + total.w;
}
""",
        (("if (threadIdx.x == 7)", "__syncthreads();\n  if (threadIdx.x == 7)"),),
        lambda: (engine.ones(64, "f4"), out(64)),
        array="total",
        at_thread=7,
    ),
]

MODULES = {"groups": GROUP_BARRIERS, "copies": COPIES, "volatile": VOLATILE, "seen": SEEN, "values": SAME_VALUE}
ZOO = [pytest.param(group, bug, id=bug.name) for group, bugs in MODULES.items() for bug in bugs]


@functools.cache
def module(group: str) -> engine.RawModule:
    return zoo.module(MODULES[group], {"groups": GROUPS, "seen": PTX}.get(group, ""))


def look(group: str, bug: Bug, *, fixed: bool) -> Report:
    return zoo.look(module(group), bug, fixed=fixed)


@pytest.mark.parametrize("group", MODULES)
def test_nvrtc_takes_the_kernels(group: str) -> None:
    assert nvrtc.refusal(module(group).code, ("-std=c++17",)) == ""


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_each_bug_is_found_where_it_is(group: str, bug: Bug) -> None:
    zoo.assert_found(look(group, bug, fixed=False), bug)


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_the_fixed_twin_is_clean(group: str, bug: Bug) -> None:
    assert look(group, bug, fixed=True).findings == []


BY_ANOTHER_THREAD = """
extern "C" __global__ void k(int *lock) {
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) add_release(lock);
  } else {
    if (threadIdx.x == 0) while (acquired(lock) == 0) {}
    __syncthreads();
    if (threadIdx.x == 32) lock[0] = 0;
  }
}
"""


def test_who_meets_the_one_that_looked_may_reset() -> None:
    """By a barrier; without one, the reset races with the addition and with the look."""
    lock = engine.zeros(1, "i4")
    xray(engine.RawKernel(PTX + BY_ANOTHER_THREAD, "k"), (2,), (64,), (lock,)).assert_clean()
    code = PTX + BY_ANOTHER_THREAD.replace("__syncthreads();", "")
    report = xray(engine.RawKernel(code, "k"), (2,), (64,), (engine.zeros(1, "i4"),))
    assert [(f.kind, f.array) for f in report.findings] == [("race", "lock")] * 2


LOOKED_AT = """#line 1 "k.cu"
extern "C" __global__ void several(const float *in, float *out, int *flag) {
  flag[0] = threadIdx.x < 64 ? 1 : 2;
  out[threadIdx.x] = in[threadIdx.x];
}
extern "C" __global__ void turns(volatile int *turn, volatile float *box, float *out) {  // two blocks take turns
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    box[0] = 5;
    __threadfence();
    turn[0] = 1;
  } else {
    while (turn[0] == 0) __nanosleep(100);
    out[0] = box[0];
  }
}
"""


def test_a_race_of_other_values_too_is_a_race() -> None:
    function = engine.RawModule(code=LOOKED_AT).get_function("several")
    (found,) = xray(function, (1,), (96,), (some(96), out(96), engine.zeros(1, "i4"))).findings
    assert (found.kind, found.line, found.other_line, found.array) == ("race", 2, 2, "flag")
    assert "same value" not in found.message


def test_what_the_messages_say() -> None:
    report = look("values", SAME_VALUE[0], fixed=False)
    assert str(report.findings[0]).endswith("; both wrote the same value, so it is the same whichever comes last")
    report = look("volatile", VOLATILE[0], fixed=False)
    assert "both are volatile, which orders nothing between threads" in report.findings[0].message
    assert "both are" not in look("volatile", VOLATILE[4], fixed=False).findings[0].message


def test_blocks_that_signal_by_volatile_are_clean() -> None:
    function = engine.RawModule(code=LOOKED_AT).get_function("turns")
    xray(function, (2,), (32,), (engine.zeros(1, "i4"), engine.zeros(1, "f4"), out(1))).assert_clean()
