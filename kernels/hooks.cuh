// Hooks: what the library adds to kernels from 05 on, and 11 explains. Where the library adds
// nothing, a kernel stays as it is: hook_* do nothing, Tiles count up or down, Out is the type of the
// inputs.
//
// A caller writes functions of scores in CUDA, under FlexAttention's names (Dong et al., 2024):
// score_mod makes another score of each score, between the scale and the softmax; mask_mod says which
// keys a row sees. helpers/attention/ladder/score_mod.py puts a struct Hooks with their texts before
// the text of a kernel.

#pragma once
#include "packed_tiles.cuh"  // hook_tile: a block for each tile of packed sequences
#include "softmax.cuh"

#ifndef HOOK_PARAMETERS
#define HOOK_PARAMETERS  // of a kernel, behind its own: what the functions read
#define HOOK_ARGUMENTS   // the same, to begin a Hooks with
#define SCORE_MOD 0      // 1: there is a score_mod
#define SCORE_GRAD 0     // 1: there is its derivative
#define MASK_MOD 0       // 1: there is a mask_mod, and a block mask: see 11_block_mask.cu
#define SINK 0           // 1: a sum of weights begins with exp(hooks.sink())
#define BIAS_BYTES 0     // of an element, where there is a bias that is loaded in pairs
struct Hooks {
  int batch, head, kv_head, q_len, kv_len;
};
#endif

// The type of the results of a kernel whose inputs are of T. With -DFLOAT_OUT=1 they are not rounded: they
// are partial, and will be added to others (17).
#if FLOAT_OUT
template <typename T>
using Out = float;
#else
template <typename T>
using Out = T;
#endif

// The scale of the softmax in units of log2. With a score_mod, scores are scaled before it.
__device__ __forceinline__ float scale_log2_of(float softmax_scale) {
  return SCORE_MOD ? LOG2_E : softmax_scale * LOG2_E;
}

// What Q is multiplied by, where that comes first: then scores are in units of log2.
__device__ __forceinline__ float scale_of_q(float softmax_scale) {
  return SCORE_MOD ? softmax_scale : softmax_scale * LOG2_E;
}

// Whether mask_mod hides a key from a row; both may be past the ends of a tile that is cut short.
__device__ __forceinline__ bool is_hidden(const Hooks& hooks, int q_idx, int kv_idx) {
#if MASK_MOD
  return !hooks.mask_mod(min(q_idx, hooks.kv_len - 1), min(kv_idx, hooks.kv_len - 1));
#else
  return false;
#endif
}

struct NoGrad {
  __device__ __forceinline__ float* operator()(int, int) const { return nullptr; }
};

#if SCORE_MOD
template <int ROWS, int KEYS, bool CUT, typename Score, typename Row, typename Key, typename Grad>
__device__ __forceinline__ void score_all(
    const Hooks& hooks, float scale, float unit, const Score& score, const Row& q_idx,
    const Key& kv_idx, const Grad& grad) {
  const float distance = q_idx(0) - kv_idx(0);  // one conversion: the others differ by constants
  const auto modified = [&](int i, int j, float loaded) {
    return unit * hooks.score_mod(
                      scale * score(i, j), min(q_idx(i), hooks.kv_len - 1),
                      CUT ? min(kv_idx(j), hooks.kv_len - 1) : kv_idx(j),
                      distance + (q_idx(i) - q_idx(0) - (kv_idx(j) - kv_idx(0))), loaded,
                      grad(i, j));
  };
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < KEYS; j += 2) {
      const int row = min(q_idx(i), hooks.kv_len - 1),
                key = CUT ? min(kv_idx(j), hooks.kv_len - 2) : kv_idx(j);
      const float2 loaded = hooks.load_pair(row, key);  // zeros, but of a bias
      score(i, j) = modified(i, j, loaded.x);
      if (j + 1 < KEYS) score(i, j + 1) = modified(i, j + 1, loaded.y);
    }
}
#endif

// What the functions make of a thread's scores, score(i, j) of row q_idx(i) and key kv_idx(j). Those
// come in units of 1 / scale and leave in units of 1 / unit. Past the ends of a tile that is cut
// short, the functions see the last row and the last key, so that they never read out of bounds.
// partial: mask_mod hides some key of the tile from some row. grad(i, j): where the derivative goes.
template <int ROWS, int KEYS, typename Score, typename Row, typename Key, typename Grad = NoGrad>
__device__ __forceinline__ void modify(
    const Hooks& hooks, float scale, float unit, const Score& score, const Row& q_idx,
    const Key& kv_idx, bool partial, const Grad& grad = {}) {
#if SCORE_MOD || MASK_MOD
  if (hooks.kv_len == 0) return;
#endif
#if SCORE_MOD
  if (kv_idx(KEYS - 1) < hooks.kv_len)
    score_all<ROWS, KEYS, false>(hooks, scale, unit, score, q_idx, kv_idx, grad);
  else score_all<ROWS, KEYS, true>(hooks, scale, unit, score, q_idx, kv_idx, grad);
#endif
#if MASK_MOD
  if (!partial) return;
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
      if (is_hidden(hooks, q_idx(i), kv_idx(j))) score(i, j) = NEG_INF;
#endif
}

// What the functions make of a thread's scores: a function for each layout. q_idx and kv_idx: the
// position of the thread's first row among the keys, and its first key. scale: of the softmax; without
// it the scores are scaled already, see scale_of_q.

// Register tiles (05): rows in groups of four, 4 GROUPS apart; keys COLUMNS apart.
template <int GROUPS>
__device__ __forceinline__ int hook_row(int q_idx, int i) {
  return q_idx + i / 4 * (4 * GROUPS) + i % 4;
}

template <int GROUPS, int COLUMNS, int M, int N>
__device__ __forceinline__ void hook_scores(
    float (&s)[M][N], const Hooks& hooks, int q_idx, int kv_idx, bool partial) {
  modify<M, N>(
      hooks, 1.0f, LOG2_E, [&](int i, int j) -> float& { return s[i][j]; },
      [&](int i) { return hook_row<GROUPS>(q_idx, i); },
      [&](int j) { return kv_idx + j * COLUMNS; }, partial);
}

// Accumulators of mma.sync (07): rows 8 apart; pairs of keys, 8 apart.
template <int M, int N>
__device__ __forceinline__ void hook_scores(
    float (&S)[M][N][4], const Hooks& hooks, float scale, int q_idx, int kv_idx, bool partial,
    float unit = 1.0f) {
  modify<2 * M, 2 * N>(
      hooks, scale, unit,
      [&](int i, int j) -> float& { return S[i / 2][j / 2][i % 2 * 2 + j % 2]; },
      [&](int i) { return q_idx + 8 * i; }, [&](int j) { return kv_idx + j / 2 * 8 + j % 2; },
      partial);
}

template <int M, int N>
__device__ __forceinline__ void hook_scores(
    float (&S)[M][N][4], const Hooks& hooks, int q_idx, int kv_idx, bool partial) {
  hook_scores(S, hooks, 1.0f, q_idx, kv_idx, partial, LOG2_E);
}

// One row of such accumulators, where each has its own head (14).
template <int M, int N>
__device__ __forceinline__ void hook_scores_of_row(
    float (&S)[M][N][4], int row, const Hooks& hooks, float scale, int q_idx, int kv_idx) {
  modify<1, 2 * N>(
      hooks, scale, 1.0f,
      [&](int, int j) -> float& { return S[row / 2][j / 2][row % 2 * 2 + j % 2]; },
      [&](int) { return q_idx; }, [&](int j) { return kv_idx + j / 2 * 8 + j % 2; }, false);
}

// Accumulators of wgmma (10): two rows, 8 apart; pairs of keys, 8 apart.
template <int N>
__device__ __forceinline__ void hook_scores(
    float (&S)[N], const Hooks& hooks, float scale, int q_idx, int kv_idx, bool partial) {
  modify<2, N / 2>(
      hooks, scale, 1.0f, [&](int i, int j) -> float& { return S[j / 2 * 4 + 2 * i + j % 2]; },
      [&](int i) { return q_idx + 8 * i; }, [&](int j) { return kv_idx + j / 2 * 8 + j % 2; },
      partial);
}

// A bias of ROWS rows and KEYS keys on its way into the L1 cache, a line by each lane: scores come out
// of registers, and would wait for it.
template <int ROWS, int KEYS>
__device__ __forceinline__ void hook_prefetch(const Hooks& hooks, int q_idx, int kv_idx) {
#if BIAS_BYTES
  constexpr int LINES = (KEYS * BIAS_BYTES + 127) / 128;  // of a row
  for (int i = threadIdx.x % 32; i < ROWS * LINES; i += 32)
    hooks.prefetch(
        min(q_idx + i / LINES, hooks.kv_len - 1),
        min(kv_idx + i % LINES * (128 / BIAS_BYTES), hooks.kv_len - 1));
#endif
}

// Before a row's first key: its maximum, in units of log2, and the sum of its weights. A sink is a
// score whose value is 0 (gpt-oss). counts: of the threads that share a row, one has the sink.
__device__ __forceinline__ void hook_start(
    float& m_i, float& l_i, const Hooks& hooks, bool counts) {
#if SINK
  const float sink = hooks.sink();
  m_i = fmaxf(LOG2_E * sink, M_INIT);
  l_i = counts && sink != NEG_INF ? 1.0f + 0.0f * sink : 0.0f;  // 1, or NaN as the sink
#else
  m_i = M_INIT;
  l_i = 0.0f;
#endif
}

// The tiles of a block's loop, STEP keys each, up or (STEP < 0) down: those of the block mask, or all
// from `begin` on. Each is its first key. next() is asked once for each; partial(), whether mask_mod hides
// some key of it from some row, before that or after.
template <int STEP>
struct Tiles {
#if MASK_MOD
  const int* entry;
  int left, current, upcoming, later, limit;

  __device__ __forceinline__ Tiles(const Hooks& hooks, int tile, int, int limit) : limit(limit) {
    entry = hooks.entries(tile);
    left = *entry;
    entry += STEP > 0 ? 1 : left;
    upcoming = *entry;
    load_later();
  }
  __device__ __forceinline__ void load_later() {  // long before it is needed
    entry += STEP > 0 ? 1 : -1;
    later = left > 1 ? *entry : 0;
  }
  __device__ __forceinline__ int first() const {
    return left > 0 ? upcoming / 2 * (STEP > 0 ? STEP : -STEP) : STEP > 0 ? limit : STEP;
  }
  __device__ __forceinline__ int next(int) {
    current = upcoming;
    upcoming = later;
    --left;
    load_later();
    return first();
  }
  __device__ __forceinline__ bool more(int first) const {
    return STEP > 0 ? first < limit : first >= 0;
  }
  __device__ __forceinline__ bool partial(int tile) const {
    return (tile == first() ? upcoming : current) % 2;
  }
#else
  int begin, limit;

  __device__ __forceinline__ Tiles(const Hooks&, int, int begin, int limit)
      : begin(BIAS_BYTES ? begin / 2 * 2 : begin), limit(limit) {}  // a pair begins at an even key
  __device__ __forceinline__ int first() const { return begin; }
  __device__ __forceinline__ int next(int first) const { return first + STEP; }
  __device__ __forceinline__ bool more(int first) const {
    return STEP > 0 ? first < limit : first >= limit;
  }
  __device__ __forceinline__ bool partial(int) const { return false; }
#endif
};
