// dK and dV from fragments, as the steps to 08_backward_mma.cu store them from "mma.sync for dV and dK"
// on, until "wide stores"; and as 08_backward_mma.cu stores results that are not rounded.

#pragma once
#include "backward_tiles.cuh"
#include "results.cuh"

// A lane has two neighbouring columns of its keys, 4 bytes, at a time. dK and dV begin at the
// block's first key.
template <typename T>
__device__ __forceinline__ void store_from_registers(
    T* dK, T* dV, const float (&dK_acc)[DKV_TILES][2 * DKV_BLOCKS][4],
    const float (&dV_acc)[DKV_TILES][2 * DKV_BLOCKS][4], const KeyBlock& block, const Warp& warp,
    const BackwardParams& params) {
  const float softmax_scale = params.forward.softmax_scale;
  dK += (warp.dkv_key + warp.g) * params.d_k.row + 16 * warp.dkv_block + 2 * warp.t;
  dV += (warp.dkv_key + warp.g) * params.d_v.row + 16 * warp.dkv_block + 2 * warp.t;
#pragma unroll
  for (int m = 0; m < DKV_TILES; ++m)
#pragma unroll
    for (int n = 0; n < 2 * DKV_BLOCKS; ++n) {
      const int column = 16 * (n / 2) * WARPS_DKV_D + 8 * (n % 2);
      if (16 * warp.dkv_block + column >= HEAD_DIM) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float *x = &dK_acc[m][n][2 * h], *y = &dV_acc[m][n][2 * h];
        const int key = 16 * m + 8 * h;
        if (block.first_key + warp.dkv_key + warp.g + key >= block.kv_len) continue;
        store2(dK + key * params.d_k.row + column, x[0] * softmax_scale, x[1] * softmax_scale);
        store2(dV + key * params.d_v.row + column, y[0], y[1]);
      }
    }
}
