"""More of the zoo: what orders accesses and what does not (groups of threads, volatile), and values that meet."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import zoo
from zoo import SYNC, Bug, out, some

from helpers import cpu
from helpers.xray import Report

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
  auto tile = cooperative_groups::tiled_partition<8>(cooperative_groups::tiled_partition<16>(block));
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
        lambda: (some(64, "i4"), cpu.zeros(64, "i4"), np.int32(256)),
        shared_mem=256,
        array="dynamic shared memory",
        index=63,
        at_thread=63,
    ),
    Bug(
        "memmove_over_its_neighbour",
        "race",
        """NAME(float *a, int bytes) {
  memmove(a + 2 * threadIdx.x, a + 2 * threadIdx.x + 1, bytes);  // here // there
}
""",
        (("1, bytes)", "1, bytes - 4)"),),
        lambda: (some(130), np.int32(8)),
        array="a",
    ),
]

MODULES = {"groups": GROUP_BARRIERS, "copies": COPIES}
ZOO = [pytest.param(group, bug, id=bug.name) for group, bugs in MODULES.items() for bug in bugs]


@functools.cache
def module(group: str) -> cpu.RawModule:
    return zoo.module(MODULES[group], GROUPS if group == "groups" else "")


def look(group: str, bug: Bug, *, fixed: bool) -> Report:
    return zoo.look(module(group), bug, fixed=fixed)


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_each_bug_is_found_where_it_is(group: str, bug: Bug) -> None:
    zoo.assert_found(look(group, bug, fixed=False), bug)


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_the_fixed_twin_is_clean(group: str, bug: Bug) -> None:
    assert look(group, bug, fixed=True).findings == []
