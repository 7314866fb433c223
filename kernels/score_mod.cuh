// Score functions: score_mod makes another score of each score, between the scale and the softmax;
// mask_mod says which keys a row sees. A caller writes them in CUDA, under FlexAttention's names
// (Dong et al., 2024): helpers/attention/ladder/score_mod.py puts a struct Mod with their texts
// before the text of a kernel. Without one this header leaves a kernel as it is. Explained in 11's
// notebook.

#pragma once
#include "softmax.cuh"

#ifndef MOD_PARAMETERS
#define MOD_PARAMETERS  // of a kernel, behind its own: what the functions read
#define MOD_ARGUMENTS   // the same, to begin a Mod with
#define SCORE_MOD 0     // 1: there is a score_mod
#define SCORE_GRAD 0    // 1: there is its derivative
#define MASK_MOD 0      // 1: there is a mask_mod, and a block mask: see 11_block_mask.cu
#define SINK 0          // 1: a sum of weights begins with exp(mod.sink())
#define BIAS_BYTES 0    // of an element, where there is a bias that is loaded in pairs
struct Mod {
  int batch, head, kv_head, q_len, kv_len;
};
#endif

// With a score_mod, scores are scaled before it, and in units of e.
__device__ __forceinline__ float scale_log2_of(float softmax_scale) {
  return SCORE_MOD ? LOG2_E : softmax_scale * LOG2_E;
}

// Whether mask_mod hides a key from a row; both may be past the ends of a tile that is cut short.
__device__ __forceinline__ bool is_hidden(const Mod& mod, int q_idx, int kv_idx) {
#if MASK_MOD
  return !mod.mask_mod(min(q_idx, mod.kv_len - 1), min(kv_idx, mod.kv_len - 1));
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
    const Mod& mod, float scale, float unit, const Score& score, const Row& q_idx,
    const Key& kv_idx, const Grad& grad) {
  const float distance = q_idx(0) - kv_idx(0);  // one conversion: the others differ by constants
  const auto modified = [&](int i, int j, float loaded) {
    return unit * mod.score_mod(
                      scale * score(i, j), min(q_idx(i), mod.kv_len - 1),
                      CUT ? min(kv_idx(j), mod.kv_len - 1) : kv_idx(j),
                      distance + (q_idx(i) - q_idx(0) - (kv_idx(j) - kv_idx(0))), loaded,
                      grad(i, j));
  };
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < KEYS; j += 2) {
      const int row = min(q_idx(i), mod.kv_len - 1),
                key = CUT ? min(kv_idx(j), mod.kv_len - 2) : kv_idx(j);
      const float2 loaded = mod.load_pair(row, key);  // zeros, but of a bias
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
    const Mod& mod, float scale, float unit, const Score& score, const Row& q_idx,
    const Key& kv_idx, bool partial, const Grad& grad = {}) {
#if SCORE_MOD || MASK_MOD
  if (mod.kv_len == 0) return;
#endif
#if SCORE_MOD
  if (kv_idx(KEYS - 1) < mod.kv_len)
    score_all<ROWS, KEYS, false>(mod, scale, unit, score, q_idx, kv_idx, grad);
  else score_all<ROWS, KEYS, true>(mod, scale, unit, score, q_idx, kv_idx, grad);
#endif
#if MASK_MOD
  if (!partial) return;
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < KEYS; ++j)
      if (is_hidden(mod, q_idx(i), kv_idx(j))) score(i, j) = NEG_INF;
#endif
}

// A bias of ROWS rows and KEYS keys on its way into the L1 cache, a line by each lane: scores come out
// of registers, and would wait for it.
template <int ROWS, int KEYS>
__device__ __forceinline__ void prefetch_bias(const Mod& mod, int q_idx, int kv_idx) {
#if BIAS_BYTES
  constexpr int LINES = (KEYS * BIAS_BYTES + 127) / 128;  // of a row
  for (int i = threadIdx.x % 32; i < ROWS * LINES; i += 32)
    mod.prefetch(
        min(q_idx + i / LINES, mod.kv_len - 1),
        min(kv_idx + i % LINES * (128 / BIAS_BYTES), mod.kv_len - 1));
#endif
}

// The maximum of a row before its first key, in units of log2, and the sum of its weights. A sink is
// a score whose value is 0 (gpt-oss).
__device__ __forceinline__ float first_maximum(const Mod& mod) {
#if SINK
  return fmaxf(LOG2_E * mod.sink(), M_INIT);
#else
  return M_INIT;
#endif
}

__device__ __forceinline__ float first_sum(const Mod& mod) {
#if SINK
  return mod.sink() == NEG_INF ? 0.0f : 1.0f + 0.0f * mod.sink();  // 1, or NaN as the sink
#else
  return 0.0f;
#endif
}

// The key tiles of a tile of rows, STEP keys each, up or (STEP < 0) down: those of the block mask, or
// all from the first one to `limit`.
template <int STEP>
struct KeyTiles {
#if MASK_MOD
  const int* entry;
  int left, current, next;

  __device__ __forceinline__ KeyTiles(const Mod& mod, int tile, int, int) {
    entry = mod.entries(tile);
    left = *entry;
    entry += STEP > 0 ? 1 : left;
    current = *entry;
    load_next();
  }
  __device__ __forceinline__ void load_next() {  // long before it is needed
    entry += STEP > 0 ? 1 : -1;
    next = left > 1 ? *entry : 0;
  }
  __device__ __forceinline__ bool more() const { return left > 0; }
  __device__ __forceinline__ bool has_next() const { return left > 1; }
  __device__ __forceinline__ int first() const { return current / 2 * (STEP > 0 ? STEP : -STEP); }
  __device__ __forceinline__ int step() const {
    return (next / 2 - current / 2) * (STEP > 0 ? STEP : -STEP);
  }
  __device__ __forceinline__ bool partial() const { return current % 2; }
  __device__ __forceinline__ void advance() {
    --left;
    current = next;
    load_next();
  }
#else
  int at, limit;

  __device__ __forceinline__ KeyTiles(const Mod&, int, int first, int limit)
      : at(BIAS_BYTES ? first / 2 * 2 : first), limit(limit) {}  // a pair begins at an even key
  __device__ __forceinline__ bool more() const { return STEP > 0 ? at < limit : at >= limit; }
  __device__ __forceinline__ bool has_next() const {
    return STEP > 0 ? at + STEP < limit : at + STEP >= limit;
  }
  __device__ __forceinline__ int first() const { return at; }
  __device__ __forceinline__ int step() const { return STEP; }
  __device__ __forceinline__ bool partial() const { return false; }
  __device__ __forceinline__ void advance() { at += STEP; }
#endif
};

// The tiles of rows that a block of the backward needs, of all heads of its group: where there is a
// block mask, its lists take the place of the next tile and head in a range, which the block knows.
struct RowLists {
#if MASK_MOD
  const int* entry;
  int left, partial = 1;
#endif

  __device__ __forceinline__ bool is_partial() const {
#if MASK_MOD
    return partial;
#else
    return false;
#endif
  }
  // The first tile of the list of a head, from the last row on.
  template <typename ModOf>
  __device__ __forceinline__ void begin(const ModOf& mod_of, int head, int tile, int& row_tile) {
#if MASK_MOD
    if (mod_of(head).block_mask == nullptr) return;
    entry = mod_of(head).entries(tile);
    left = *entry;
    entry += left;
    row_tile = *entry / 2;
    partial = *entry % 2;
#endif
  }
  template <typename ModOf>
  __device__ __forceinline__ void advance(
      const ModOf& mod_of, int head, int tile, int group, int& next_head, int& next_tile) {
#if MASK_MOD
    if (mod_of(head).block_mask == nullptr) return;
    next_head = --left > 0 ? head : head + 1;
    if (left > 0) {
      next_tile = *--entry / 2;
      partial = *entry % 2;
    } else if (next_head < group) {
      begin(mod_of, next_head, tile, next_tile);
    }
#endif
  }
};
