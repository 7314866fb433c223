"""Count the cycles that instructions take on an H100 or H200 while the tensor cores work, and while they do not.

Two warpgroups repeat an instruction, alone or while two others multiply e4m3 continuously. So each of the four
partitions of a multiprocessor has two warps of either kind.

    python3 -m helpers.bench.study pipes FILE
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from helpers.attention import kernel
from helpers.bench import records
from helpers.bench.harness import Study
from helpers.device import ON_GPU, cp, describe

recorded = records.reader("nvidia-h200-pipes.json")

CODE = r"""
// One instruction for each of 64 floats (MAX3_INT: for each two, CVT_E4M3: two for each four).
__device__ __forceinline__ void work(float (&x)[64], float a, float b) {
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (WORK == 0) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
    if (WORK == 1) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(a), "f"(b));
    if (WORK == 2) asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(x[(i + 4) % 64]));
    if (WORK == 3 && i % 2 == 0) {
      int m = __float_as_int(x[i]);
      asm volatile("{\n.reg .s32 t;\nmax.s32 t, %0, %1;\nmax.s32 %0, t, %2;\n}"
                   : "+r"(m) : "r"(__float_as_int(x[i + 1])), "r"(__float_as_int(x[(i + 4) % 64])));
      x[i] = __int_as_float(m);
    }
    if (WORK == 4 && i % 4 == 0) x[i] = __uint_as_float(pack_e4m3(x[i], x[i + 1], x[i + 2], x[i + 3]));
  }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    pipes(long long* cycles, float* sink, int repeats, int products, float a, float b) {
  __shared__ __align__(1024) unsigned char operands[64 * 128 + 128 * 128];
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  for (int i = threadIdx.x; i < sizeof(operands); i += blockDim.x) operands[i] = 0x30 + i % 16;
  async_proxy_fence();
  __syncthreads();  // hazard: operands are not there yet
  float sum = 0;
  if (warpgroup >= 2) {
    float d[64] = {};
    const unsigned long long q = wgmma_descriptor_of_rows<128>(smem_address(operands));
    const unsigned long long k = wgmma_descriptor_of_rows<128>(smem_address(operands) + 64 * 128);
    for (int n = 0; n < products; ++n) {
      wgmma_registers(d);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma_ss(e4m3(), d, advance_bytes<128>(q, i, 64), advance_bytes<128>(k, i, 128), true);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_registers(d);
    }
    for (int i = 0; i < 64; ++i) sum += d[i];
  } else {
    float x[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) x[i] = -0.001f * (threadIdx.x + i);
    const long long begin = clock64();
#pragma unroll 1
    for (int n = 0; n < repeats; ++n) work(x, a, b);
    if (threadIdx.x == 0 && blockIdx.x == 0) *cycles = clock64() - begin;
#pragma unroll
    for (int i = 0; i < 64; ++i) sum += x[i];
  }
  sink[threadIdx.x] = sum;
}
"""

# How many of each instruction one call of `work` executes.
INSTRUCTIONS = {
    "exp2 (MUFU.EX2)": 64,
    "a x + b (FFMA)": 64,
    "maximum of two floats (FMNMX)": 64,
    "maximum of three integers (VIMNMX3)": 32,
    "two floats to e4m3 (F2FP)": 32,
}
WARPS, REPEATS, PRODUCTS = 2, 400, 4  # products per repeat, so that they outlast the work


def rows(repeats: int = REPEATS, blocks: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the cycles that a warp's instruction takes, with the tensor cores idle and busy."""
    if blocks is None:
        blocks = cp.cuda.Device().attributes["MultiProcessorCount"]
    for work, (name, of_work) in enumerate(INSTRUCTIONS.items()):
        measure = kernel.load(kernel.source("fp8.cuh") + CODE, "pipes", defines={"WORK": work})
        cycles, sink = cp.zeros(1, cp.int64), cp.empty(512, cp.float32)
        row: dict[str, Any] = {"name": name}
        counts = np.int32([repeats, PRODUCTS * repeats])
        for state, threads in (("alone", 256), ("beside", 512)):
            for _ in range(2 if ON_GPU else 1):  # the first warms up
                measure((blocks,), (threads,), (cycles, sink, *counts, *np.float32([1, 0])))
            row[state] = int(cycles[0]) / repeats / of_work / WARPS
        yield row


STUDY = Study("pipes", {"rows": rows}, lambda: {"device": describe()})
take = STUDY.take


@records.shown
def table(record: Mapping[str, Any] | None = None) -> str:
    """Format a record as text, an instruction a line."""
    lines = [f"{'cycles of a warp instruction':36}{'tensor cores idle':>18}{'busy':>8}"]
    for row in record["rows"]:
        lines.append(f"{row['name']:36}{row['alone']:18.1f}{row['beside']:8.1f}")
    return "\n".join(lines)
