// What hooks.cuh is to the backward: derivatives of score functions, weights that a mask_mod hides, and
// lists of tiles of rows. Without functions it leaves a kernel as it is. Explained in 11's notebook.

#pragma once
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

// Register tiles (08).
template <int GROUPS, int COLUMNS, int M, int N>
__device__ __forceinline__ void hook_scores(
    float (&s)[M][N], HookGradient<M, N>& grad, const Hooks& hooks, float scale, int q_idx,
    int kv_idx) {
  modify<M, N>(
      hooks, scale, 1.0f, [&](int i, int j) -> float& { return s[i][j]; },
      [&](int i) { return hook_row<GROUPS>(q_idx, i); },
      [&](int j) { return kv_idx + j * COLUMNS; }, false,
      [&](int i, int j) { return grad.of(i, j); });
}

// The log-sum-exp of a row, which may not exist. With functions of scores, weights could be infinite in
// such a row, and in one that sees no key: now they are 0.
__device__ __forceinline__ float hook_lse(float lse, bool exists) {
  return SCORE_MOD && (!exists || lse == NEG_INF) ? 1e38f : lse;
}

template <int GROUPS, int COLUMNS, int M, int N>
__device__ __forceinline__ void hook_weights(
    float (&p)[M][N], const Hooks& hooks, int q_idx, int kv_idx, bool partial) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (MASK_MOD && partial && is_hidden(hooks, hook_row<GROUPS>(q_idx, i), kv_idx + j * COLUMNS))
        p[i][j] = 0.0f;
}

template <int M, int N>
__device__ __forceinline__ void hook_gradients(float (&ds)[M][N], HookGradient<M, N>& grad) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j)
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

// Of rows 8 n .. 8 n + 7 alone.
template <int N>
__device__ __forceinline__ void hook_gradients(float (&ds)[4], HookGradient<1, N, 4>& grad, int n) {
#pragma unroll
  for (int i = 0; SCORE_GRAD && i < 4; ++i) ds[i] *= *grad.of(0, n, i);
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
