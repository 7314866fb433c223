"""The bug zoo: small kernels with one planted bug each, which the x-ray names with its lines; fixed twins are clean."""

from __future__ import annotations

import functools
import re
import signal
import threading
from typing import Any

import numpy as np
import pytest
import zoo
from zoo import SYNC, Bug, out, some, zeros

from helpers import engine
from helpers.attention import kernel, reference
from helpers.attention.check import check, make_inputs
from helpers.attention.ladder import FORWARD, LADDER
from helpers.xray import Finding, Report, xray

SHARED_RACES = [
    Bug(
        "read_too_early",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  s[threadIdx.x] = in[threadIdx.x];  // here
  /* no barrier */
  out[threadIdx.x] = s[(threadIdx.x + 1) % 64];  // there
}
""",
        (SYNC,),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "written_too_early",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  float sum = 0;
  for (int tile = 0; tile < 3; ++tile) {
    s[threadIdx.x] = in[tile * 64 + threadIdx.x];  // here
    __syncthreads();
    for (int i = 0; i < 64; ++i) sum += s[i];  // there
    /* no barrier */
  }
  out[threadIdx.x] = sum;
}
""",
        (SYNC,),
        lambda: (some(192), out(64)),
        array="s",
    ),
    Bug(
        "tree_reduction",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (t < half) s[t] += s[t + half];  // here // there
    /* no barrier */
  }
  if (t == 0) out[0] = s[0];
}
""",
        (SYNC,),
        lambda: (some(64), out(1)),
        array="s",
    ),
    Bug(
        "no_syncwarp",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];  // here
  /* no barrier */
  out[t] = s[t ^ 1];  // there
}
""",
        (("/* no barrier */", "__syncwarp();"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "shuffle_is_no_barrier",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[32];
  int t = threadIdx.x;
  s[t] = in[t];  // there
  float other = __shfl_xor_sync(0xffffffffu, in[t], 16); /* no barrier */
  out[t] = other + s[t ^ 16];  // here
}
""",
        (("/* no barrier */", "__syncwarp();"),),
        lambda: (some(32), out(32)),
        block=32,
        array="s",
    ),
    Bug(
        "half_a_syncwarp",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[32];
  int t = threadIdx.x;
  s[t] = in[t];  // here
  if (t < 16) __syncwarp(0x0000ffffu);
  else __syncwarp(0xffff0000u);
  /* no barrier */
  out[t] = s[t ^ 16];  // there
}
""",
        (("/* no barrier */", "__syncwarp();"),),
        lambda: (some(32), out(32)),
        block=32,
        array="s",
    ),
    Bug(
        "between_warps",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];  // here
  __syncwarp();
  out[t] = s[t ^ 32];  // there
}
""",
        (("__syncwarp();", "__syncthreads();"),),
        lambda: (some(64), out(64)),
        array="s",
    ),
    Bug(
        "flag",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ int large;
  if (threadIdx.x == 0) large = in[0] > 0.5f;  // there
  /* no barrier */
  out[threadIdx.x] = large ? 1.0f : 0.0f;  // here
}
""",
        (SYNC,),
        lambda: (some(64), out(64)),
        array="large",
        index=0,
        at_thread=1,
    ),
    Bug(
        "double_buffer",
        "race",
        """NAME(const float *in, float *out) {
  __shared__ float buffer[2][64];
  int t = threadIdx.x;
  float sum = 0;
  buffer[0][t] = in[t];
  __syncthreads();
  for (int tile = 0; tile < 4; ++tile) {
    if (tile < 3) buffer[(tile + 1) % 2][t] = in[(tile + 1) * 64 + t];  // here
    sum += buffer[tile % 2][63 - t];  // there
    /* no barrier */
  }
  out[t] = sum;
}
""",
        (SYNC,),
        lambda: (some(256), out(64)),
        array="buffer",
    ),
    Bug(
        "shared_histogram",
        "race",
        """NAME(const int *in, int *out) {
  __shared__ int bins[8];
  if (threadIdx.x < 8) bins[threadIdx.x] = 0;
  __syncthreads();
  bins[in[threadIdx.x] % 8] += 1;  // here // there
  __syncthreads();
  if (threadIdx.x < 8) out[threadIdx.x] = bins[threadIdx.x];
}
""",
        (("bins[in[threadIdx.x] % 8] += 1;", "atomicAdd(&bins[in[threadIdx.x] % 8], 1);"),),
        lambda: (some(64, np.int32), zeros(8)),
        array="bins",
    ),
    Bug(
        "half_neighbours",  # the twin's neighbours share a word of 4 bytes, which is no race
        "race",
        """#include <cuda_fp16.h>
NAME(const float *in, float *out) {
  __shared__ __half s[64];
  int t = threadIdx.x;
  s[t / 2] = __float2half(in[t]);  // here // there
  __syncthreads();
  out[t] = __half2float(s[t / 2]);
}
""",
        (("s[t / 2] = ", "s[t] = "),),
        lambda: (some(64), out(64)),
        array="s",
        at_thread=1,
    ),
    Bug(
        "byte_neighbours",
        "race",
        """NAME(const signed char *in, float *out) {
  __shared__ signed char s[64];
  int t = threadIdx.x;
  s[t & 62] = in[t];  // here // there
  __syncthreads();
  out[t] = s[t & 62];
}
""",
        (("s[t & 62] = ", "s[t] = "),),
        lambda: (some(64, np.int8), out(64)),
        array="s",
        at_thread=1,
    ),
    Bug(
        "row_of_another",
        "race",
        """NAME(const float *in, float *out) {
  extern __shared__ float tile[];
  int x = threadIdx.x % 8, y = threadIdx.x / 8;
  tile[y * 8 + x] = in[threadIdx.x];  // here
  /* no barrier */
  out[threadIdx.x] = tile[x * 8 + y];  // there
}
""",
        (SYNC,),
        lambda: (some(64), out(64)),
        shared_mem=256,
        array="dynamic shared memory",
    ),
]

GLOBAL_RACES = [
    Bug(
        "within_a_block",
        "race",
        """NAME(const float *in, float *out, float *sums) {
  int t = threadIdx.x;
  out[t] = in[t];  // here
  /* no barrier */
  sums[t] = out[t] + out[(t + 1) % 64];  // there
}
""",
        (SYNC,),
        lambda: (some(64), zeros(64, np.float32), out(64)),
        array="out",
    ),
    Bug(
        "between_blocks",
        "race",
        """NAME(const float *in, float *out, float *sums) {
  int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = in[i];  // there
  __syncthreads();
  sums[i] = i > 0 ? out[i - 1] : 0;  // here
}
""",
        (("out[i - 1]", "in[i - 1]"),),
        lambda: (some(128), out(128), out(128)),
        grid=2,
        array="out",
        index=63,
        at_block=1,
        at_thread=0,
    ),
    Bug(
        "overlapping_blocks",
        "race",
        """NAME(const float *in, float *out) {
  int i = blockIdx.x * 63 + threadIdx.x;
  out[i] = in[i] + blockIdx.x;  // here // there
}
""",
        (("* 63", "* 64"),),
        lambda: (some(192), zeros(192, np.float32)),
        grid=3,
        array="out",
        index=63,
        at_block=1,
        at_thread=0,
    ),
    Bug(
        "counter",
        "race",
        """NAME(const float *in, int *count) {
  if (in[threadIdx.x] > 3) count[0] += 1;  // here // there
}
""",
        (("count[0] += 1;", "atomicAdd(&count[0], 1);"),),
        lambda: (some(64), zeros(1)),
        array="count",
        index=0,
        at_thread=5,
    ),
    Bug(
        "histogram",
        "race",
        """NAME(const int *in, int *bins) {
  int i = blockIdx.x * 64 + threadIdx.x;
  bins[in[i] / 64] += 1;  // here // there
}
""",
        (("bins[in[i] / 64] += 1;", "atomicAdd(&bins[in[i] / 64], 1);"),),
        lambda: (some(128, np.int32), zeros(2)),
        grid=2,
        array="bins",
    ),
    *(
        Bug(
            name,
            "race",
            """NAME(const float *in, float *part, float *out, unsigned *count) {
  __shared__ float s[64];
  __shared__ bool last;
  int t = threadIdx.x;
  s[t] = in[blockIdx.x * 64 + t];
  __syncthreads();
  if (t == 0) {
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += s[i];
    part[blockIdx.x] = sum;  // there
    FENCE
    last = atomicInc(count, gridDim.x) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 32) {
    float sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += part[b];  // here
    out[0] = sum;
    count[0] = 0;
  }
}
""".replace("FENCE", fence),
            ((fence, "__threadfence();"),),
            lambda: (some(256), out(4), out(1), zeros(1, np.uint32)),
            grid=4,
            array="part",
            index=0,
            at_block=3,
            at_thread=32,
        )
        for name, fence in (
            ("last_block_no_fence", "/* no fence */"),
            ("last_block_small_fence", "__threadfence_block();"),
        )
    ),
    Bug(
        "lock_let_go_too_early",
        "race",
        """NAME(const float *in, float *sum, int *lock) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) __nanosleep(100);
    sum[0] += in[blockIdx.x];  // here // there
    /* no fence */
    atomicExch(lock, 0);
  }
}
""",
        (("/* no fence */", "__threadfence();"),),
        lambda: (some(4), zeros(1, np.float32), zeros(1)),
        grid=4,
        array="sum",
        index=0,
        at_block=1,
    ),
    Bug(
        "flag_between_threads",
        "race",
        """NAME(const float *in, float *box, float *out, int *flag) {
  if (threadIdx.x == 0) {
    box[0] = in[0];  // there
    /* no fence */
    atomicExch(flag, 1);
  }
  if (threadIdx.x == 40) {
    while (atomicAdd(flag, 0) == 0) __nanosleep(100);
    out[0] = box[0];  // here
  }
}
""",
        (("/* no fence */", "__threadfence_block();"),),
        lambda: (some(4), out(1), out(1), zeros(1)),
        array="box",
        at_thread=40,
    ),
    Bug(
        "atomic_and_plain",
        "race",
        """NAME(const int *in, int *total, int *out) {
  atomicAdd(total, in[threadIdx.x]);  // here
  /* no barrier */
  if (threadIdx.x == 0) out[0] = total[0];  // there
}
""",
        (SYNC,),
        lambda: (some(64, np.int32), zeros(1), zeros(1)),
        array="total",
        index=0,
    ),
]

BOUNDS = [
    Bug(
        "one_too_many",
        "out of bounds",
        """NAME(const float *in, float *out, int n) {
  int i = blockIdx.x * 64 + threadIdx.x;
  if (i <= n) out[i] = in[i % 64];  // here
}
""",
        (("i <= n", "i < n"),),
        lambda: (some(64), out(100), np.int32(100)),
        grid=2,
        array="out",
        index=100,
        at_block=1,
        at_thread=36,
    ),
    Bug(
        "before_the_first",
        "out of bounds",
        """NAME(const float *in, float *out) {
  int i = threadIdx.x;
  out[i] = in[i] - in[i - 1];  // here
}
""",
        (("in[i - 1]", "in[max(i - 1, 0)]"),),
        lambda: (some(64), out(64)),
        array="in",
        index=-1,
        at_thread=0,
    ),
    Bug(
        "bytes",
        "out of bounds",
        """NAME(const signed char *in, float *out) {
  out[threadIdx.x] = in[threadIdx.x];  // here
}
""",
        (("in[threadIdx.x]", "in[min(threadIdx.x, 60)]"),),
        lambda: (some(61, np.int8), out(64)),
        array="in",
        index=61,
        at_thread=61,
    ),
    Bug(
        "halves",
        "out of bounds",
        """#include <cuda_fp16.h>
NAME(__half *a) {
  int i = threadIdx.x;
  a[i] = __float2half(2.0f);  // here
}
""",
        (("a[i] = ", "if (i < 63) a[i] = "),),
        lambda: (engine.full(63, np.nan, dtype=np.float16),),
        array="a",
        index=63,
        at_thread=63,
    ),
    Bug(
        "dynamic_shared",
        "out of bounds",
        """NAME(const float *in, float *out) {
  extern __shared__ float s[];
  s[threadIdx.x + 1] = in[threadIdx.x];  // here
  __syncthreads();
  out[threadIdx.x] = s[1 + threadIdx.x / 2];
}
""",
        (("s[threadIdx.x + 1]", "s[(threadIdx.x + 1) % 64]"),),
        lambda: (some(64), out(64)),
        shared_mem=256,
        array="dynamic shared memory",
        index=64,
        at_thread=63,
    ),
    Bug(
        "into_the_next_array",
        "out of bounds",
        """NAME(const float *in, float *out) {
  __shared__ float first[64];
  __shared__ float second[64];
  int t = threadIdx.x;
  first[t] = in[t];
  second[t] = 0;
  __syncthreads();
  out[t] = first[t + 1] + second[t];  // here
}
""",
        (("first[t + 1]", "first[t]"),),
        lambda: (some(64), out(64)),
        array="first",
        index=64,
        at_thread=63,
    ),
    Bug(
        "before_a_shared_array",
        "out of bounds",
        """NAME(const float *in, float *out) {
  __shared__ float first[32][2];
  __shared__ float second[64];
  int t = threadIdx.x;
  first[t / 2][t % 2] = in[t];
  second[t] = 0;
  if (t == 0) second[t - 1] = 0;  // here
  __syncthreads();
  out[t] = first[t / 2][t % 2] + second[63 - t];
}
""",
        (("if (t == 0) second[t - 1] = 0;  // here", ""),),
        lambda: (some(64), out(64)),
        array="second",
        index=-1,
        at_thread=0,
    ),
    Bug(
        "a_row_too_many",
        "out of bounds",
        """NAME(const float *in, float *out) {
  __shared__ float tile[8][64];
  for (int row = 0; row <= 8; ++row) tile[row][threadIdx.x] = in[threadIdx.x];  // here
  __syncthreads();
  out[threadIdx.x] = tile[7][63 - threadIdx.x];
}
""",
        (("row <= 8", "row < 8"),),
        lambda: (some(64), out(64)),
        array="tile",
        index=512,
        at_thread=0,
    ),
    Bug(
        "template_static",
        "out of bounds",
        """template <int N>
__device__ float turned(const float *in) {
  __shared__ float kept[N];
  __shared__ float beside[N];
  kept[threadIdx.x] = in[threadIdx.x];
  beside[threadIdx.x] = 1;
  __syncthreads();
  return kept[N - threadIdx.x] + beside[threadIdx.x];  // here
}
NAME(const float *in, float *out) {
  out[threadIdx.x] = turned<64>(in);
}
""",
        (("N - threadIdx.x", "N - 1 - threadIdx.x"), ("turned", "turned_right")),
        lambda: (some(64), out(64)),
        array="kept",
        index=64,
        at_thread=0,
    ),
    Bug(
        "vector_over_the_end",
        "out of bounds",
        """NAME(const float *in, float *out, int n) {
  int i = threadIdx.x;
  if (4 * i < n) {
    float4 v = ((const float4 *)in)[i];  // here
    out[i] = v.x + v.w;
  }
}
""",
        (("4 * i < n", "4 * i + 3 < n"),),
        lambda: (some(66), zeros(17, np.float32), np.int32(66)),
        array="in",
        at_thread=16,
    ),
    Bug(
        "far_away",
        "out of bounds",
        """NAME(const float *in, float *out, int far) {
  out[threadIdx.x] = threadIdx.x == 7 ? in[far] : 0;  // here
}
""",
        (("in[far]", "in[far % 64]"),),
        lambda: (some(64), out(64), np.int32(400_000)),
        array="in",
        index=400_000,
        at_thread=7,
    ),
]

UNINITIALISED = [
    Bug(
        "last_of_a_tile",
        "uninitialised",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t < 63) s[t] = in[t];
  __syncthreads();
  out[t] = s[63 - t];  // here
}
""",
        (("t < 63", "t < 64"),),
        lambda: (some(64), out(64)),
        array="s",
        index=63,
        at_thread=0,
    ),
    Bug(
        "sum_in_shared",
        "uninitialised",
        """NAME(const float *in, float *out) {
  extern __shared__ float sums[];
  int t = threadIdx.x;
  /* nothing */
  for (int i = 0; i < 4; ++i) sums[t] += in[i * 64 + t];  // here
  out[t] = sums[t];
}
""",
        (("/* nothing */", "sums[t] = 0;"),),
        lambda: (some(256), out(64)),
        shared_mem=256,
        array="dynamic shared memory",
        index=0,
        at_thread=0,
    ),
    Bug(
        "from_the_block_before",
        "uninitialised",
        """NAME(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (blockIdx.x == 0) s[t] = in[t];
  __syncthreads();
  out[blockIdx.x * 64 + t] = s[63 - t];  // here
}
""",
        (("if (blockIdx.x == 0) ", ""),),
        lambda: (some(64), out(128)),
        grid=2,
        array="s",
        index=63,
        at_block=1,
        at_thread=0,
    ),
    Bug(
        "added_to_nothing",
        "uninitialised",
        """NAME(const float *in, float *out) {
  out[threadIdx.x] += in[threadIdx.x];  // here
}
""",
        (("+=", "="),),
        lambda: (some(64), out(64)),
        array="out",
        index=0,
        at_thread=0,
    ),
    Bug(
        "added_to_nothing_in_half",
        "uninitialised",
        """#include <cuda_fp16.h>
NAME(const float *in, __half *out) {
  int t = threadIdx.x;
  if (t != 5) out[t] = __float2half(in[t]);
  out[t] = __hadd(out[t], __float2half(1));  // here
}
""",
        (("if (t != 5) ", ""),),
        lambda: (some(64), out(64, np.float16)),
        array="out",
        index=5,
        at_thread=5,
    ),
]

MISALIGNED = [
    Bug(
        "float4_at_one",
        "misaligned",
        """NAME(const float *in, float *out) {
  float4 v = *(const float4 *)(in + 4 * threadIdx.x + 1);  // here
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
""",
        (("+ 1)", "+ 0)"),),
        lambda: (some(64), out(8)),
        block=8,
        array="in",
        at_thread=0,
    ),
    Bug(
        "int2_at_one",
        "misaligned",
        """NAME(const int *in, int *out) {
  int2 v = *(const int2 *)(in + 2 * threadIdx.x + 1);  // here
  out[threadIdx.x] = v.x + v.y;
}
""",
        (("+ 1)", "+ 0)"),),
        lambda: (some(64, np.int32), zeros(8)),
        block=8,
        array="in",
        at_thread=0,
    ),
    Bug(
        "double_between_floats",
        "misaligned",
        """NAME(const float *in, double *out) {
  extern __shared__ float s[];
  double *wide = (double *)(s + 1);
  wide[threadIdx.x] = in[threadIdx.x];  // here
  out[threadIdx.x] = in[threadIdx.x];
}
""",
        (("s + 1", "s + 2"),),
        lambda: (some(8), out(8, np.float64)),
        block=8,
        shared_mem=128,
        array="dynamic shared memory",
        at_thread=0,
    ),
]

WAITING = [
    Bug(
        "barrier_of_some",
        "barrier divergence",
        """NAME(const float *in, float *out, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t < n) {
    s[t] = in[t];
    __syncthreads();  // there
    out[t] = s[n - 1 - t];
  }
  __syncthreads();  // here
  if (t >= n) out[t] = s[t - n];
}
""",
        (
            ("    __syncthreads();  // there\n    out[t] = s[n - 1 - t];\n  }\n", "  }\n"),
            ("if (t >= n) out[t] = s[t - n]", "out[t] = s[t % n]"),
        ),
        lambda: (some(64), out(64), np.int32(50)),
    ),
    Bug(
        "two_barriers",
        "barrier divergence",
        """NAME(const float *in, float *out) {
  if (threadIdx.x % 32 < 16) {
    out[threadIdx.x] = in[threadIdx.x];
    __syncthreads();  // here
  } else {
    out[threadIdx.x] = 0;
    __syncthreads();  // there
  }
}
""",
        (("    __syncthreads();  // here\n", ""), ("    __syncthreads();  // there\n", "")),
        lambda: (some(64), out(64)),
    ),
    Bug(
        "barrier_in_a_loop",
        "barrier divergence",
        """NAME(const float *in, float *out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += 64) {
    sum += in[i];
    __syncthreads();  // here
  }
  __syncthreads();  // there
  out[threadIdx.x] = sum;
}
""",
        (("    __syncthreads();  // here\n", ""),),
        lambda: (some(100), out(64), np.int32(100)),
    ),
    Bug(
        "half_a_shuffle",
        "deadlock",
        """NAME(const float *in, float *out) {
  float x = in[threadIdx.x];
  if (threadIdx.x < 16) x += __shfl_xor_sync(0xffffffffu, x, 1);  // here
  __syncthreads();  // there
  out[threadIdx.x] = x;
}
""",
        (("0xffffffffu", "0x0000ffffu"),),
        lambda: (some(64), out(64)),
    ),
    Bug(
        "two_operations",
        "deadlock",
        """NAME(const float *in, float *out) {
  float x = in[threadIdx.x];
  if (threadIdx.x < 16)
    x += __shfl_xor_sync(0xffffffffu, x, 1);  // there
  else
    x += __ballot_sync(0xffffffffu, x > 3);  // here
  out[threadIdx.x] = x;
}
""",
        (("0xffffffffu, x, 1", "0x0000ffffu, x, 1"), ("0xffffffffu, x > 3", "0xffff0000u, x > 3")),
        lambda: (some(32), out(32)),
        block=32,
    ),
    Bug(
        "mask_without_me",
        "deadlock",
        """NAME(const float *in, float *out) {
  float x = in[threadIdx.x];
  x += __shfl_xor_sync(0x0000ffffu, x, 1);  // here
  out[threadIdx.x] = x;
}
""",
        (("0x0000ffffu", "0xffffffffu"),),
        lambda: (some(32), out(32)),
        block=32,
        at_thread=16,
    ),
]

LOOPS = [
    Bug(
        "no_step",
        "endless loop",
        """NAME(const float *in, float *out, int step) {
  float sum = 0;
  for (int i = 0; i < 64; i += step) sum += in[i];  // here
  out[threadIdx.x] = sum;
}
""",
        (("i += step)", "i += step + 1)"),),
        lambda: (some(64), out(64), np.int32(0)),
    ),
    Bug(
        "waits_for_nobody",
        "endless loop",
        """NAME(volatile int *flag, float *out) {
  while (flag[0] == 0) __nanosleep(100);  // here
  out[threadIdx.x] = 1;
}
""",
        (("flag[0] == 0", "flag[0] == 1"),),
        lambda: (zeros(1), out(64)),
    ),
    Bug(
        "barrier_for_ever",
        "endless loop",
        """NAME(const float *in, float *out) {
  __shared__ float left;
  if (threadIdx.x == 0) left = in[0];
  __syncthreads();
  while (left < 3) __syncthreads();  // here
  out[threadIdx.x] = left;
}
""",
        (("left < 3", "left < 0"),),
        lambda: (some(64), out(64)),
    ),
]

NEVER_WRITTEN = [
    Bug(
        "grid_too_small",
        "never written",
        """NAME(const float *in, float *out, int n) {
  int i = blockIdx.x * 64 + threadIdx.x;
  if (i < n - 4) out[i] = in[i];
}
""",
        (("n - 4", "n"),),
        lambda: (some(128), out(128), np.int32(128)),
        grid=2,
        array="out",
        index=124,
    ),
    Bug(
        "every_other",
        "never written",
        """NAME(const float *in, float *out) {
  if (threadIdx.x % 2 == 0) out[threadIdx.x] = in[threadIdx.x];
}
""",
        (("if (threadIdx.x % 2 == 0) ", ""),),
        lambda: (some(64), out(64)),
        array="out",
        index=1,
    ),
]

MODULES = {
    "shared": SHARED_RACES,
    "global": GLOBAL_RACES,
    "bounds": BOUNDS,
    "values": UNINITIALISED + MISALIGNED + NEVER_WRITTEN,
    "waiting": WAITING + LOOPS,
}
ZOO = [pytest.param(group, bug, id=bug.name) for group, bugs in MODULES.items() for bug in bugs]


@functools.cache
def module(group: str) -> engine.RawModule:
    return zoo.module(MODULES[group])


def look(group: str, bug: Bug, *, fixed: bool) -> Report:
    return zoo.look(module(group), bug, fixed=fixed)


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_each_bug_is_found_where_it_is(group: str, bug: Bug) -> None:
    zoo.assert_found(look(group, bug, fixed=False), bug)


@pytest.mark.parametrize(("group", "bug"), ZOO)
def test_the_fixed_twin_is_clean(group: str, bug: Bug) -> None:
    assert look(group, bug, fixed=True).findings == []


def test_the_zoo_is_large_enough() -> None:
    assert len(ZOO) >= 30
    assert {bug.values[1].kind for bug in ZOO} == {
        "race",
        "out of bounds",
        "uninitialised",
        "misaligned",
        "barrier divergence",
        "deadlock",
        "endless loop",
        "never written",
    }


# ---------------------------------------------------------------- what is no bug, and what is counted

OTHERS = r"""
#line 1 "others.cu"
extern "C" __global__ void branches(const float *even, const float *odd, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t % 2 == 0) {
    s[t] = even[t];
  } else {
    s[t] = odd[t];
    s[t] += 1;
  }
  __syncthreads();
  out[t] = s[t ^ 1];
}
extern "C" __global__ void trips(const float *in, float *out) {
  int t = threadIdx.x;
  float sum = 0;
  for (int i = 0; i <= t; ++i) {
    sum += in[i * 32 + t];
  }
  out[t] = sum;
}
extern "C" __global__ void leavers(const float *in, float *out, int n) {
  int t = threadIdx.x;
  if (t >= n) return;
  float x = in[t];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(__activemask(), x, 0);
  __syncwarp(__activemask());
  out[t] = x;
}
extern "C" __global__ void halves(const unsigned short *in, unsigned short *out) {
  __shared__ unsigned short s[64];
  s[63 - threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
template <int N>
__global__ void turned(const float *in, float *out) {
  __shared__ float s[N];
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[N - 1 - threadIdx.x];
}
extern "C" __global__ void tile_of(const float *in, float *out, int n) {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = in[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = tile[n - 1 - i];
}
extern "C" __global__ void same_value(const float *in, float *out) {
  __shared__ float sums[2];
  float x = in[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  sums[threadIdx.x / 32] = x;  // all lanes of the warp write what all have
  __syncthreads();
  out[threadIdx.x] = sums[0] + sums[1];
}
extern "C" __global__ void own_value(const float *in, float *out) {
  __shared__ float sums[2];
  sums[threadIdx.x / 32] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = sums[0] + sums[1];
}
extern "C" __global__ void guess(unsigned *sum) {
  unsigned old = *sum, assumed;
  do {
    assumed = old;
    old = atomicCAS(sum, assumed, assumed + 1);
  } while (old != assumed);
}
extern "C" __global__ void no_guess(unsigned *sum, unsigned *out) {
  atomicAdd(sum, 1);
  out[blockIdx.x * blockDim.x + threadIdx.x] = *sum;
}
struct alignas(16) Packed {
  Packed() = default;
  __device__ explicit Packed(int4 bits) { memcpy(&x, &bits, sizeof bits); }
  float x[4];
};
__device__ Packed load(const float *from) { return Packed{*reinterpret_cast<const int4 *>(from)}; }
extern "C" __global__ void packed(const float *in, float *out) {
  extern __shared__ char bytes[];
  Packed *s = reinterpret_cast<Packed *>(bytes);
  s[threadIdx.x] = load(in + 4 * threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1].x[0];
}
__shared__ float4 of_the_module[64];
extern "C" __global__ void late(const float *in, float *out, int n) {
  float x = in[threadIdx.x];
  if (threadIdx.x % 2) x += in[threadIdx.x + 64];
  of_the_module[threadIdx.x] = make_float4(x, x, x, x);
  __syncthreads();
  if (threadIdx.x >= 32)
    for (int i = 0; i < n; ++i) x += of_the_module[threadIdx.x ^ i].x;
  __syncthreads();
  out[threadIdx.x] = x;
}
extern "C" __global__ void neighbour(float *a) {
  a[threadIdx.x + 1] += 1;
}
"""


@functools.cache
def others() -> engine.RawModule:
    names = ("turned<32>", "turned<64>")
    return engine.RawModule(code=OTHERS, options=("-std=c++17",), name_expressions=names)


def test_lanes_that_write_the_same_value_do_not_race() -> None:
    xray(others().get_function("same_value"), (1,), (64,), (some(64), out(64))).assert_clean()
    report = xray(others().get_function("own_value"), (1,), (64,), (some(64), out(64)))
    assert [(f.kind, f.array) for f in report.findings] == [("race", "sums")]


def test_a_guess_that_atomic_cas_checks_is_no_race() -> None:
    total = zeros(1, np.uint32)
    xray(others().get_function("guess"), (3,), (64,), (total,)).assert_clean()
    assert total[0] == 192
    report = xray(others().get_function("no_guess"), (3,), (64,), (zeros(1, np.uint32), zeros(192, np.uint32)))
    assert {f.kind for f in report.findings} == {"race"}


def test_constants_of_the_host_are_there() -> None:
    code = """__constant__ float c[2];
    extern "C" __global__ void constants(float *out) { out[threadIdx.x] = c[threadIdx.x % 2]; }"""
    module = engine.RawModule(code=code)
    module.get_global("c").view(np.float32)[...] = [3, 4]
    got = out(32)
    xray(module.get_function("constants"), (1,), (32,), (got,)).assert_clean()
    assert got.tolist() == [3, 4] * 16


def test_a_struct_copied_by_memcpy_is_seen() -> None:
    report = xray(others().get_function("packed"), (1,), (64,), (some(256), out(64)), 1024)
    report.assert_clean()
    assert report.shared["dynamic shared memory"].written == 1024


def test_the_timeline_tells_who_waits() -> None:
    report = xray(others().get_function("late"), (2,), (64,), (some(128), zeros(64, np.float32), np.int32(8)))
    first = OTHERS.splitlines().index('extern "C" __global__ void late(const float *in, float *out, int n) {') - 1
    got = [(s.interval, s.warp, s.line - first, s.what, len(s.threads), s.count) for s in report.steps(1)]
    before = [(1, "read global", 32), (2, "read global", 16), (3, "write shared", 32)]
    assert got == [
        *((0, warp, line, what, lanes, 1) for warp in (0, 1) for line, what, lanes in before),
        (1, 1, 6, "read shared", 32, 8),
        (2, 0, 8, "write global", 32, 1),
        (2, 1, 8, "write global", 32, 1),
    ]
    assert [s.barrier and s.barrier - first for s in report.steps((1, 0))[::3]] == [4, 4, 7]
    assert report.steps(0)[1].threads == tuple(range(1, 32, 2))
    assert "(warp 1 is the last)" in repr(report.timeline(1))
    assert report.timeline(1).png() == report.timeline(1).png()
    with pytest.raises(IndexError, match="blocks 0 to 1; asked for 2"):
        report.timeline(2)


def test_branches_are_requests_of_their_own_and_race_with_nobody() -> None:
    got = out(64)
    report = xray(others().get_function("branches"), (1,), (64,), (some(64), some(64), got))
    report.assert_clean()
    for array in ("even", "odd"):
        assert (report.traffic[array].loads, report.traffic[array].read) == (2, 32 * 4)
    assert np.array_equal(engine.asnumpy(got), [t + 2 if t % 2 == 0 else t - 1 for t in range(64)])
    assert (report.barriers, report.traffic["out"].stores) == (1, 2)


def test_loops_of_different_lengths_are_as_many_requests_as_the_longest() -> None:
    report = xray(others().get_function("trips"), (1,), (32,), (some(1024), out(32)))
    report.assert_clean()
    assert report.traffic["in"].loads == 32
    assert report.traffic["in"].read == 4 * 32 * 33 // 2
    assert np.array_equal(report.fetches["in"].reshape(32, 32), np.triu(np.ones((32, 32))))


def test_lanes_that_left_are_not_waited_for() -> None:
    report = xray(others().get_function("leavers"), (1,), (32,), (some(32), out(7), np.int32(7)))
    report.assert_clean()
    assert (report.traffic["in"].loads, report.traffic["in"].read) == (1, 28)


def test_half_types_are_counted_in_their_bytes() -> None:
    report = xray(others().get_function("halves"), (1,), (64,), (some(64, np.uint16), zeros(64, np.uint16)))
    report.assert_clean()
    assert (report.traffic["in"].read, report.traffic["in"].loads, report.traffic["in"].sectors) == (128, 2, 4)
    assert (report.shared["s"].read, report.shared["s"].written, report.shared["s"].conflicts) == (128, 128, 0)


@pytest.mark.parametrize("n", [32, 64])
def test_arrays_of_templates_have_their_own_names_and_sizes(n: int) -> None:
    got = out(n)
    report = xray(others().get_function(f"turned<{n}>"), (1,), (n,), (some(n), got))
    report.assert_clean()
    assert np.array_equal(engine.asnumpy(got), np.arange(n)[::-1])
    assert (report.shared["s"].read, report.shared["s"].written) == (4 * n, 4 * n)


@pytest.mark.parametrize("n", [1, 64, 100, 12_000])
def test_dynamic_shared_memory_of_any_size(n: int) -> None:
    got = out(n)
    report = xray(others().get_function("tile_of"), (1,), (64,), (some(n), got, np.int32(n)), 4 * n)
    report.assert_clean()
    assert np.array_equal(engine.asnumpy(got), np.arange(n)[::-1])
    assert report.shared["dynamic shared memory"].read == 4 * n


def test_launches_in_a_row_do_not_know_of_each_other() -> None:
    bug = SHARED_RACES[0]
    first = look("shared", bug, fixed=False)
    assert look("shared", bug, fixed=True).clean
    again = look("shared", bug, fixed=False)
    assert again.findings == first.findings
    assert str(again) == str(first)


def test_two_threads_of_python_get_a_report_each() -> None:
    reports: dict[int, list[Report]] = {0: [], 1: []}
    plain = []

    def work(which: int) -> None:
        for _ in range(6):
            reports[which].append(look("shared", SHARED_RACES[which], fixed=False))
            got = out(64)
            others().get_function("turned<64>")((1,), (64,), (some(64), got))  # a launch like any other in between
            plain.append(bool(np.array_equal(engine.asnumpy(got), np.arange(64)[::-1])))

    threads = [threading.Thread(target=work, args=(which,)) for which in reports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(plain) and len(plain) == 12
    for which, seen in reports.items():
        alone = look("shared", SHARED_RACES[which], fixed=False)
        assert [str(report) for report in seen] == [str(alone)] * 6


def test_findings_are_counted_not_repeated() -> None:
    bug = next(bug for bug in BOUNDS if bug.name == "bytes")
    (found,) = look("bounds", bug, fixed=False).findings
    assert found.count == 3  # threads 61, 62 and 63
    assert str(found).endswith("(3 times)")
    bug = next(bug for bug in GLOBAL_RACES if bug.name == "histogram")
    (found,) = look("global", bug, fixed=False).findings
    assert found.count >= 126


def test_an_endless_loop_can_be_interrupted() -> None:
    bug = next(bug for bug in LOOPS if bug.name == "no_step")
    kernel = module("waiting").get_function(bug.name)
    interrupt = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
    with pytest.raises(KeyboardInterrupt):  # and not what it says when its time is up
        interrupt.start()
        xray(kernel, (1,), (64,), bug.args(), timeout=60)
    interrupt.join()
    assert look("waiting", bug, fixed=True).clean


def test_results_are_copied_back_and_neighbours_stay_whole() -> None:
    whole = engine.zeros(96, np.float32)
    report = xray(others().get_function("neighbour"), (1,), (64,), (whole[:64],))
    assert [(f.kind, f.index, f.count) for f in report.findings] == [("out of bounds", 64, 2)]  # read and written
    assert np.array_equal(engine.asnumpy(whole), [0] + [1] * 63 + [0] * 32)


def test_assert_clean_tells_what_was_found() -> None:
    look("shared", SHARED_RACES[0], fixed=True).assert_clean()
    with pytest.raises(AssertionError, match=r"read_too_early: 1 finding\nrace: "):
        look("shared", SHARED_RACES[0], fixed=False).assert_clean()


def test_a_race_in_words() -> None:
    (found,) = look("shared", SHARED_RACES[0], fixed=False).findings
    assert found == Finding(
        kind="race",
        message="write of word 1 of __shared__ s by block (0,0,0) thread (1,0,0) at read_too_early.cu:3 races with "
        "read by block (0,0,0) thread (0,0,0) at read_too_early.cu:5",
        file="read_too_early.cu",
        line=3,
        block=(0, 0, 0),
        thread=(1, 0, 0),
        array="s",
        index=1,
        other_file="read_too_early.cu",
        other_line=5,
        other_block=(0, 0, 0),
        other_thread=(0, 0, 0),
        count=64,
    )


def test_a_report_fits_a_hundred_columns() -> None:
    for group, bugs in MODULES.items():
        if group != "waiting":
            for bug in bugs:
                text = str(look(group, bug, fixed=False))
                assert max(map(len, text.splitlines())) <= 100, text
                assert re.match(rf"{bug.name}: 1 finding\n", text)
    assert str(look("shared", SHARED_RACES[0], fixed=True)).startswith("read_too_early_fixed: 0 findings\n")


@pytest.mark.exhaustive(each_value=())
@pytest.mark.usefixtures("only_x_rayed")
@pytest.mark.parametrize("name", [name for name, stage in FORWARD.items() if "float32" in stage.dtypes])
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 31, 3), (65, 63, 8), (127, 257, 64), (65, 33, 128)], ids=str)
def test_the_stages_are_clean(name: str, shape: tuple[int, int, int], cpu_engine: Any) -> None:
    reports = []

    def checked(self: kernel.Kernel, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        reports.append(xray(self, grid, block, args, shared_mem))

    n, n_kv, d = shape
    d = -(-d // LADDER[name].head_dim_step) * LADDER[name].head_dim_step
    q, k, v = make_inputs(n, n_kv, d)
    with kernel.launches_replaced(checked):
        got = engine.asnumpy(LADDER[name](q, k, v))
    assert not any(report.findings for report in reports)
    assert reports[-1].traffic["O"].written == 4 * n * d
    assert check(name, got, reference.attention(q, k, v)).passed


UNTOUCHED = """extern "C" __global__ void k(TYPE *out, int n) {
  __shared__ TYPE s[64];
  __shared__ TYPE left_out[64];
  if (n) s[threadIdx.x] = 1;
  out[threadIdx.x] = s[threadIdx.x];
}
"""


@pytest.mark.parametrize("dtype", ["float", "int", "double"])
@pytest.mark.parametrize("store", [True, False])
def test_a_shared_array_that_no_line_writes(dtype: str, store: bool) -> None:
    """A compiler that sees no store might take the array for zeros."""
    code = UNTOUCHED.replace("TYPE", dtype).replace("if (n)", "if (n)" if store else "//")
    function = engine.RawModule(code=code).get_function("k")
    a = engine.zeros(64, dtype={"float": "f4", "int": "i4", "double": "f8"}[dtype])
    function((1,), (64,), (a, np.int32(0)))
    assert (a == -1).all() if dtype == "int" else np.isnan(a).all()
    assert function.shared_size_bytes == 64 * a.itemsize
    report = xray(function, (1,), (64,), (a, np.int32(0)))
    assert [(f.kind, f.array, f.line) for f in report.findings] == [("uninitialised", "s", 5)]
    assert list(report.shared) == ["s"]
    if store:
        xray(function, (1,), (64,), (a, np.int32(1))).assert_clean()
