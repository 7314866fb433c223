// What 16's scores and results are multiplied by. A head of Q, K and V has a descale each; with
// DESCALE_ROWS, every DESCALE_ROWS rows or keys do: on an H200 a call then took 1.08 to 1.31 times as long,
// with tiles of as many keys.

#pragma once
#include "hopper_softmax.cuh"  // LOG2_E
#include "hopper_tiles.cuh"
#include "v_image.cuh"  // DESCALE_ROWS, descale_of

static_assert(DESCALE_ROWS % BLOCK_N == 0 && DESCALE_ROWS % 64 == 0, "tiles have one descale");

__device__ __forceinline__ int head_of_q(const Tile& tile, const AttentionParams& params) {
  return tile.sequence * params.heads + tile.head;
}

__device__ __forceinline__ int head_of_kv(const Tile& tile, const AttentionParams& params) {
  return tile.sequence * params.kv_heads + tile.kv_head;
}

// What all scores of 64 rows are multiplied by, in units of log2; with DESCALE_ROWS, without K's
// descale and not yet in those units. first_row: in their head.
__device__ __forceinline__ float scale_of_rows(
    const Tile& tile, int first_row, const float* q_descale, const float* k_descale,
    const AttentionParams& params) {
  const int head = head_of_q(tile, params);
#if DESCALE_ROWS
  return params.softmax_scale * descale_of(q_descale, head, first_row, params.N);
#else
  const float descale =
      descale_of(q_descale, head) * descale_of(k_descale, head_of_kv(tile, params));
  return fmaxf(params.softmax_scale * descale, 1e-30f) * LOG2_E;  // 0 times -inf would be NaN
#endif
}

// What the scores of a tile of keys are multiplied by, in units of log2.
__device__ __forceinline__ float scale_of_tile(
    float of_rows, const Tile& tile, int first_key, const float* k_descale,
    const AttentionParams& params) {
#if DESCALE_ROWS
  of_rows *= descale_of(k_descale, head_of_kv(tile, params), first_key, params.N_kv);
  return fmaxf(of_rows, 1e-30f) * LOG2_E;
#else
  return of_rows;
#endif
}

// What P V of a tile of keys is multiplied by.
__device__ __forceinline__ float descale_of_tile(
    const Tile& tile, int first_key, const float* v_descale, const AttentionParams& params) {
#if DESCALE_ROWS
  return descale_of(v_descale, head_of_kv(tile, params), first_key, params.N_kv);
#else
  return 1.0f;
#endif
}

// What O is multiplied by in the end.
__device__ __forceinline__ float descale_of_output(
    const Tile& tile, const float* v_descale, const AttentionParams& params) {
  return DESCALE_ROWS ? 1.0f : descale_of(v_descale, head_of_kv(tile, params));
}
