// What the backward in half types does before its loop: lse, delta and zeros for dQ_accum. Notebook 08
// explains delta.

#pragma once
#include "backward_blocks.cuh"
#include "half2.cuh"
#include "softmax.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // d, the length of a row: a multiple of 8
#endif

// lse_delta: for each tile of rows, the log-sum-exp in units of log2 and then delta = rowsum(dO O).
// dQ_accum, whose rows have DQ_COLUMNS columns, becomes zero, unless ZEROS is false.
template <int THREADS, int DQ_COLUMNS, bool ZEROS = true, typename T>
__device__ __forceinline__ void prepare_rows(
    const RowBlock& block, const RowTiles& tiles, const T* O, const T* dO, const float* lse,
    float* lse_delta, float* dQ_accum, const BackwardParams& params) {
  const AttentionParams& forward = params.forward;
  const long long slot = block.slot(tiles);
  O += block.of_rows(forward.o);
  dO += block.of_rows(params.d_o);
  lse += ((long long)(block.packed ? 0 : block.sequence) * forward.heads + block.head) * forward.N +
         block.q_first + block.first_row;
  lse_delta += slot * 2 * BLOCK_M;
  dQ_accum += slot * BLOCK_M * DQ_COLUMNS;
  for (int i = threadIdx.x; ZEROS && i < BLOCK_M * DQ_COLUMNS / 4; i += THREADS)
    reinterpret_cast<float4*>(dQ_accum)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  constexpr int LANES = 8;  // of a row
#pragma unroll
  for (int row = threadIdx.x / LANES; row < BLOCK_M; row += THREADS / LANES) {
    const bool exists = block.first_row + row < block.q_len;
    float sum = 0.0f;
#pragma unroll
    for (int chunk = threadIdx.x % LANES; exists && chunk < HEAD_DIM / 8; chunk += LANES) {
      const uint4 x = *reinterpret_cast<const uint4*>(O + row * forward.o.row + 8 * chunk);
      const uint4 y = *reinterpret_cast<const uint4*>(dO + row * params.d_o.row + 8 * chunk);
      const unsigned xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack(T(), xs[i]), b = unpack(T(), ys[i]);
        sum += a.x * b.x + a.y * b.y;
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (threadIdx.x % LANES == 0) {
      const float l = exists ? lse[row] : NEG_INF;
      // A row that sees no key: its weights are exp(-inf) = 0. From 2^25 on lse is rounded by so
      // many powers of 2 that weights could overflow float16: it is raised by more than that.
      const float l_log2 = l * LOG2_E, raised = fabsf(l_log2) < 0x1p25f ? 0.0f : 0x1p-21f;
      lse_delta[row] = l == NEG_INF ? -NEG_INF : l_log2 + raised * fabsf(l_log2);
      lse_delta[BLOCK_M + row] = sum;
    }
  }
}
