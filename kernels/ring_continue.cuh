// What ring attention (17) adds to 10, and without it nothing: a tile's O and lse are joined with those
// of keys that an earlier launch has seen, so that no pass merges them afterwards. As in 17_merge.cu,
// lse = log(e^lse_a + e^lse_b), and O is the mean of both with those weights.
// helpers/attention/ring_joined.py puts the definitions of parameters before the text of the kernel.

#pragma once
#include "hopper_tiles.cuh"
#include "softmax.cuh"

#ifndef CONTINUE_PARAMETERS
#define CONTINUE_PARAMETERS  // of a kernel, behind its own
#define CONTINUE_ARGUMENTS   // the same, in the order of Continuation
#define CONTINUES 0
#endif

struct Continuation {
#if CONTINUES
  // before: O of these rows, of the keys seen so far; null: none are. after: where O of the rows from
  // first_open on goes, for which more keys come; it may be the same memory, and both have O's strides.
  // lse: of the keys so far, changed in place; heads are lse_step apart.
  const float* before;
  float* after;
  float* lse;
  int lse_step, first_open;

  // Joins O of a warp's 16 rows, and leaves in `tile` the rows that are complete.
  template <typename M, int N>
  __device__ __forceinline__ void join(
      Tile& tile, int warp_row, const M& maxima, const float (&l_i)[2], float (&acc)[N],
      float (&inverse)[2], const AttentionParams& params) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int open = max(first_open - tile.row, 0);  // a row of the tile
    float* const tile_lse =
        lse + ((long long)tile.sequence * params.heads + tile.head) * lse_step + tile.row;
    float keep[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = warp_row + 8 * i + g;
      const float sum = row_allreduce(l_i[i], [](float a, float b) { return a + b; });
      float own = LN_2 * (maxima.m_i[i] + maxima.base[i] + log2f(sum));
      if (before && r < tile.rows) {
        const float a = tile_lse[r], larger = fmaxf(a, own);
        const float base = larger == NEG_INF ? 0.0f : larger;  // -inf - (-inf) is NaN
        const float join = expf(own - base);
        keep[i] = expf(a - base);
        const float both = keep[i] + join, share = both == 0.0f ? 0.0f : 1.0f / both;
        keep[i] *= share;
        inverse[i] *= join * share;
        own = base + logf(both);
      }
      __syncwarp();  // hazard: other lanes still read the row's lse
      if (t == 0 && r < tile.rows) tile_lse[r] = own;
    }
    const long long at = tile.sequence * params.o.batch + tile.row * params.o.row +
                         tile.head * params.o.head + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = warp_row + 8 * i + g;
      const bool joined = before && r < tile.rows;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        float2 p = make_float2(0.0f, 0.0f);
        if (joined) p = *reinterpret_cast<const float2*>(before + at + r * params.o.row + 8 * n);
        acc[4 * n + 2 * i] = acc[4 * n + 2 * i] * inverse[i] + p.x * keep[i];
        acc[4 * n + 2 * i + 1] = acc[4 * n + 2 * i + 1] * inverse[i] + p.y * keep[i];
      }
      if (r >= open && r < tile.rows)
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
          *reinterpret_cast<float2*>(after + at + (r - first_open) * params.o.row + 8 * n) =
              make_float2(acc[4 * n + 2 * i], acc[4 * n + 2 * i + 1]);
      inverse[i] = 1.0f;
    }
    tile.rows = min(tile.rows, open);
  }
#else
  template <typename... All>
  __device__ __forceinline__ void join(const All&...) const {}
#endif
};
