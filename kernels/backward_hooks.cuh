// What hooks.cuh is to the backward: the derivative of a score function, weights that a mask_mod hides,
// and the tiles of rows that a block goes through. Explained in 11's notebook. Without functions the
// tiles are those that see a key of the block, and nothing else is left.

#pragma once
#include "backward_blocks.cuh"
#include "hooks.cuh"

// ---- functions of scores, and their derivatives

// The derivative at each score of a thread's M x N fragments of E elements.
template <int M, int N, int E = 1>
struct HookGradient {
#if SCORE_GRAD
  float at[M][N][E];
  __device__ __forceinline__ float* of(int m, int n, int e = 0) { return &at[m][n][e]; }
#else
  __device__ __forceinline__ float* of(int, int, int = 0) { return nullptr; }
#endif
};

// For each layout of a thread's scores three functions: hook_scores, what the functions make of the
// scores, and their derivatives; hook_weights, which makes the weights 0 that mask_mod hides; and
// hook_gradients, which multiplies dP or dS by the derivatives. A derivative may be infinite where the
// weight is 0. q_idx and kv_idx: the position of the thread's first row among the keys, and its first key.

// Register tiles (08): rows in groups of four, 4 THREADS_Y apart; keys THREADS_X apart.
template <int THREADS_Y>
__device__ __forceinline__ int hook_row(int q_idx, int i) {
  return q_idx + i / 4 * (4 * THREADS_Y) + i % 4;
}

template <int THREADS_Y, int THREADS_X, int TILE_M, int TILE_N>
__device__ __forceinline__ void hook_scores(
    float (&s)[TILE_M][TILE_N], HookGradient<TILE_M, TILE_N>& grad, const Hooks& hooks, float scale,
    int q_idx, int kv_idx) {
  modify<TILE_M, TILE_N>(
      hooks, scale, 1.0f, [&](int i, int j) -> float& { return s[i][j]; },
      [&](int i) { return hook_row<THREADS_Y>(q_idx, i); },
      [&](int j) { return kv_idx + j * THREADS_X; }, false,
      [&](int i, int j) { return grad.of(i, j); });
}

template <int THREADS_Y, int THREADS_X, int TILE_M, int TILE_N>
__device__ __forceinline__ void hook_weights(
    float (&p)[TILE_M][TILE_N], const Hooks& hooks, int q_idx, int kv_idx, bool partial) {
#pragma unroll
  for (int i = 0; i < TILE_M; ++i)
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
      if (MASK_MOD && partial &&
          is_hidden(hooks, hook_row<THREADS_Y>(q_idx, i), kv_idx + j * THREADS_X))
        p[i][j] = 0.0f;
}

template <int TILE_M, int TILE_N>
__device__ __forceinline__ void hook_gradients(
    float (&ds)[TILE_M][TILE_N], HookGradient<TILE_M, TILE_N>& grad) {
#pragma unroll
  for (int i = 0; i < TILE_M; ++i)
#pragma unroll
    for (int j = 0; j < TILE_N; ++j)
      if (SCORE_GRAD && ds[i][j] != 0.0f) ds[i][j] *= *grad.of(i, j);
}

// Accumulators of S^T by mma.sync (08): keys 8 apart; pairs of rows, 8 apart.
template <int M, int N>
__device__ __forceinline__ void hook_scores(
    float (&S)[M][N][4], HookGradient<M, N, 4>& grad, const Hooks& hooks, float scale, int q_idx,
    int kv_idx) {
  modify<2 * N, 2 * M>(
      hooks, scale, 1.0f,
      [&](int i, int j) -> float& { return S[j / 2][i / 2][j % 2 * 2 + i % 2]; },
      [&](int i) { return q_idx + i / 2 * 8 + i % 2; }, [&](int j) { return kv_idx + 8 * j; },
      false, [&](int i, int j) { return grad.of(j / 2, i / 2, j % 2 * 2 + i % 2); });
}

template <int M, int N>
__device__ __forceinline__ void hook_weights(
    float (&P)[M][N][4], HookGradient<M, N, 4>& grad, const Hooks& hooks, int q_idx, int kv_idx,
    bool partial) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (MASK_MOD && partial &&
            is_hidden(hooks, q_idx + 8 * n + i % 2, kv_idx + 16 * m + i / 2 * 8))
          P[m][n][i] = 0.0f;
        if (SCORE_GRAD && P[m][n][i] == 0.0f) *grad.of(m, n, i) = 0.0f;
      }
}

template <int M, int N>
__device__ __forceinline__ void hook_gradients(float (&dP)[M][N][4], HookGradient<M, N, 4>& grad) {
#pragma unroll
  for (int i = 0; SCORE_GRAD && i < M * N * 4; ++i)
    dP[i / 4 / N][i / 4 % N][i % 4] *= *grad.of(i / 4 / N, i / 4 % N, i % 4);
}

// ---- the tiles of rows of a block

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
  template <typename HooksOf>
  __device__ __forceinline__ void begin(
      const HooksOf& hooks_of, int head, int tile, int& row_tile) {
#if MASK_MOD
    if (hooks_of(head).block_mask == nullptr) return;
    entry = hooks_of(head).entries(tile);
    left = *entry;
    entry += left;
    row_tile = *entry / 2;
    partial = *entry % 2;
#endif
  }
  template <typename HooksOf>
  __device__ __forceinline__ void advance(
      const HooksOf& hooks_of, int head, int tile, int group, int& next_head, int& next_tile) {
#if MASK_MOD
    if (hooks_of(head).block_mask == nullptr) return;
    next_head = --left > 0 ? head : head + 1;
    if (left > 0) {
      next_tile = *--entry / 2;
      partial = *entry % 2;
    } else if (next_head < group) {
      begin(hooks_of, next_head, tile, next_tile);
    }
#endif
  }
};

// Hooks of a head of the group.
struct GroupHooks {
  Hooks first;  // of the first head

  __device__ __forceinline__ Hooks operator()(int head) const {
    Hooks hooks = first;
    hooks.head += head;
    return hooks;
  }
};

// A tile of rows of a block that has some (see RowRange), in the order in which it goes through them: all
// heads of the group, and of each the tiles from the last to the first; with a block mask, those of its
// lists.
struct MBlock {
  KeyBlock block;
  RowRange rows;
  GroupHooks hooks_of;
  int head = 0, m_block;  // of the group; of the sequence
  RowLists lists;

  __device__ __forceinline__ MBlock(const KeyBlock& block, const RowRange& rows, const Hooks& hooks)
      : block(block), rows(rows), hooks_of{hooks}, m_block(rows.last_tile) {
    lists.begin(hooks_of, 0, block.tile, m_block);
  }
  __device__ __forceinline__ bool exists() const { return head < block.group; }
  __device__ __forceinline__ void advance() {
    int next = m_block > rows.first_tile ? m_block - 1 : rows.last_tile;
    int next_head = m_block > rows.first_tile ? head : head + 1;
    lists.advance(hooks_of, head, block.tile, block.group, next_head, next);
    m_block = next;
    head = next_head;
  }
  // The number of the tile in the scratch arrays, from the sequence's first one of the first head on.
  __device__ __forceinline__ int slot() const { return head * rows.tiles.of_head + m_block; }

  __device__ __forceinline__ Hooks hooks() const { return hooks_of(head); }
  // Whether hook_weights has something to do: mask_mod hides a key, or there are rows past the end.
  __device__ __forceinline__ bool partial() const {
    return lists.is_partial() || (SCORE_GRAD && (m_block + 1) * BLOCK_M > block.q_len);
  }
};
