// Masks as bits: which keys of a thread a row sees. Written out in steps/07_16_lazy_rescale.cu and
// 07_mma.cu, explained in 07's notebook.

#pragma once
#include "softmax.cuh"

// One bit for each of a thread's keys 8 n and 8 n + 1 of KEYS: set for those before `limit`. The
// compiler moves up to seven such bits into predicates by one instruction, R2P, instead of
// comparing each key with both ends of the window.
template <int KEYS>
__device__ __forceinline__ unsigned keys_before(int limit) {
  static_assert(KEYS <= 128, "one bit per key of a thread");
  const int keys = min(max(limit, 0), KEYS);
  return (1ull << (keys / 8 * 2 + min(keys % 8, 2))) - 1;
}

// A key that a row does not see scores -inf, so that its weight is exactly 0. row_pos, the thread's
// first row, and end are relative to its first key; lo and hi have the shift to the row's position.
// S: the accumulators of M x N products of 16 rows and 8 keys.
template <int M, int N>
__device__ __forceinline__ void mask(float (&S)[M][N][4], int row_pos, int end, int lo, int hi) {
#pragma unroll
  for (int i = 0; i < 2 * M; ++i) {
    const int low = row_pos + 8 * i + lo, high = row_pos + 8 * i + hi;
    const unsigned seen = keys_before<8 * N>(min(high + 1, end)) & ~keys_before<8 * N>(low);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!(seen >> (2 * n + e) & 1)) S[i / 2][n][i % 2 * 2 + e] = NEG_INF;
  }
}
