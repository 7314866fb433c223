// 11 bias gradient on tensor cores: as 11_bias_gradient.cu, in half types.
//
// S = Q K^T and dP = dO V^T of a tile by mma.sync, as in 08_backward_mma.cu; neither P nor dS is rounded
// to half, since no further product takes them: dS is added in registers in float32. While one
// product runs, the inputs of the other one for the next tile of scores are copied. Those that do not
// change from one tile to the next stay where they are.
//
// Launch   bias_gradient_mma: grid tiles * splits * heads * batches of the bias, block 32 WARPS,
//          SHARED_BYTES of dynamic shared memory; the other kernels as in bias_gradient.cuh
// Shapes   as 08_backward_mma, with lse and delta as 08
// Needs    sm_80; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  Q, K, dO, V: for each tile of scores, once at most; dBias once

#ifndef BLOCK
#define BLOCK 128  // rows, and keys, of a tile
#endif
#define BLOCK_M BLOCK
#define BLOCK_N BLOCK
#ifndef WARPS_KEYS
#define WARPS_KEYS 2  // the warps along the keys of a tile; the others are along its rows
#endif
#define WARPS_DKV WARPS_KEYS
#define WARPS_DQ 1
#define SLICE_M 16
#include "backward_tiles.cuh"  // Warp, gemm_abt, and the sizes of tiles
#define BIAS_THREADS THREADS
#include "bias_gradient.cuh"  // BiasTile, ScoreTile: which tiles a block has; the sums over a tile

static_assert(THREADS >= BLOCK, "a thread for each row of lse and delta, and for each sum");

constexpr int TILES_M = WARP_ROWS / 16, TILES_N = BLOCK_N / (8 * WARPS_KEYS);  // of a warp
using Scores = float[TILES_M][TILES_N][4];
constexpr unsigned TILE_BYTES = 2 * BLOCK * HEAD_DIM_PADDED, LSE_OFFSET = 4 * TILE_BYTES;
constexpr unsigned LOOP_BYTES = LSE_OFFSET + 8 * BLOCK;  // Q, K, dO, V, lse and delta
constexpr unsigned SHARED_BYTES = LOOP_BYTES > sizeof(Sums) ? LOOP_BYTES : sizeof(Sums);

// This thread's share of rows first .. first + BLOCK - 1, from row 0 of `source` on, by cp.async; zeros
// outside of 0 .. end - 1. `first` may be below 0. target: of its first chunk.
template <typename T>
__device__ __forceinline__ void load_rows(
    unsigned target, const T* source, long long stride, int first, int end) {
  const int chunk = threadIdx.x % COPY_CHUNKS;
#pragma unroll
  for (int i = 0; i < BLOCK; i += THREADS / COPY_CHUNKS) {
    const int r = i + threadIdx.x / COPY_CHUNKS, row = first + r;
    if (r >= BLOCK) break;
    const bool exists = row >= 0 && row < end;
    const T* const from = source + (exists ? row : 0) * stride;
#pragma unroll
    for (int j = 0; j < CHUNKS; j += COPY_CHUNKS)
      cp_async(
          target + 16 * (i * CHUNKS + j), from + 8 * (chunk + j),
          exists && 8 * (chunk + j) < HEAD_DIM ? 16 : 0);
  }
}

// Result: the type of the bias; float where it is split, and dBias is the array of partial sums.
template <typename T, typename Result>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) bias_gradient_mma(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
    const T* __restrict__ dO, const float* __restrict__ lse, const float* __restrict__ delta,
    Result* __restrict__ dBias,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BiasParams params, int sequences HOOK_PARAMETERS) {
  // ---- prologue: the tile of the bias, and this block's share of the tiles of scores that read it
  const AttentionParams& forward = params.forward;
  const BiasTile bias(params);
  ScoreTile tile(bias, params, sequences, cu_seqlens_q, cu_seqlens_k);
  const int group = forward.heads / forward.kv_heads;

  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + TILE_BYTES,
                 dO_smem = K_smem + TILE_BYTES, V_smem = dO_smem + TILE_BYTES;
  float* const lse_smem = reinterpret_cast<float*>(dynamic_smem + LSE_OFFSET);
  float* const delta_smem = lse_smem + BLOCK;
  const Warp warp;
  const int lane_id = warp.lane_id, g = warp.g, t = warp.t;
  const unsigned rows_lane = swizzle<CHUNKS>(warp.row + lane_id % 16, lane_id / 16);  // of A
  const unsigned keys_lane =
      swizzle<CHUNKS>(warp.key + lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);  // of B
  const unsigned copy_offset =
      swizzle<CHUNKS>(threadIdx.x / COPY_CHUNKS, threadIdx.x % COPY_CHUNKS);

  // Of a tile of scores: Q and K, dO and V. Those that the tile before has had are in shared memory.
  float row_lse = 0.0f, row_delta = 0.0f;  // of this thread's row
  const auto load_scores = [&](const ScoreTile& at, bool new_rows, bool new_keys) {
    if (new_rows) {
      load_rows(
          Q_smem + copy_offset,
          Q + at.sequence * forward.q.batch + at.q_first * forward.q.row + at.head * forward.q.head,
          forward.q.row, at.first_row, at.q_len);
      const int row = at.first_row + threadIdx.x;
      const bool exists = threadIdx.x < BLOCK && row < at.q_len;
      const long long i =
          ((long long)(cu_seqlens_q ? 0 : at.sequence) * forward.heads + at.head) * forward.N +
          at.q_first + row;
      const float l = exists ? lse[i] : NEG_INF;
      row_lse = l == NEG_INF ? 1e38f : LOG2_E * l;  // a row that sees no key: weights of 0
      row_delta = exists ? delta[i] : 0.0f;
    }
    if (new_keys)
      load_rows(
          K_smem + copy_offset,
          K + at.sequence * forward.k.batch + at.k_first * forward.k.row +
              at.head / group * forward.k.head,
          forward.k.row, at.first_key, at.kv_len);
  };
  const auto load_gradients = [&](const ScoreTile& at, bool new_rows, bool new_keys) {
    if (new_rows)
      load_rows(
          dO_smem + copy_offset,
          dO + at.sequence * params.d_o.batch + at.q_first * params.d_o.row +
              at.head * params.d_o.head,
          params.d_o.row, at.first_row, at.q_len);
    if (new_keys)
      load_rows(
          V_smem + copy_offset,
          V + at.sequence * forward.v.batch + at.k_first * forward.v.row +
              at.head / group * forward.v.head,
          forward.v.row, at.first_key, at.kv_len);
  };
  if (tile.exists()) load_scores(tile, true, true);
  cp_async_commit();
  if (tile.exists()) load_gradients(tile, true, true);
  cp_async_commit();

  // ---- the tiles of scores, in the same order in every run: dS of each, added in registers
  const float scale = forward.softmax_scale, scale_log2 = scale_log2_of(scale);
  Scores acc = {};
  for (ScoreTile next = tile; tile.exists(); tile = next) {
    next.advance(bias, params, cu_seqlens_q, cu_seqlens_k);
    const bool more = next.exists();
    const bool other_head = next.head != tile.head || next.sequence != tile.sequence;
    const bool new_rows = more && (other_head || next.first_row != tile.first_row);
    const bool new_keys =
        more && (next.head / group != tile.head / group || next.sequence != tile.sequence ||
                 next.first_key != tile.first_key);
    if (threadIdx.x < BLOCK) {
      lse_smem[threadIdx.x] = row_lse;
      delta_smem[threadIdx.x] = row_delta;
    }
    cp_async_wait<1>();
    __syncthreads();  // hazard: Q, K, lse or delta could be read before they are there
    const int row = tile.first_row + warp.row + g, key = tile.first_key + warp.key + 2 * t;
    const Hooks hooks = {
        HOOK_ARGUMENTS tile.sequence, tile.head, tile.head / group, tile.q_len, tile.kv_len};
    hook_prefetch<WARP_ROWS, BLOCK / WARPS_KEYS>(
        hooks, tile.first_row + warp.row + tile.shift, tile.first_key + warp.key);
    Scores S = {}, dP;
    gemm_abt(T(), S, Q_smem + rows_lane, K_smem + keys_lane);
    __syncthreads();  // hazard: Q and K could be overwritten while another warp reads them
    load_scores(next, new_rows, new_keys);
    cp_async_commit();

    // Scores as the forward had them, with all that is added to them. A thread has rows g and g + 8 of
    // each 16, and keys 2 t and 2 t + 1 of each 8.
    modify<2 * TILES_M, 2 * TILES_N>(
        hooks, scale, 1.0f,
        [&](int i, int j) -> float& { return S[i / 2][j / 2][i % 2 * 2 + j % 2]; },
        [&](int i) { return row + 8 * i + tile.shift; },
        [&](int j) { return max(key + j / 2 * 8 + j % 2, 0); }, false);
#pragma unroll
    for (int i = 0; i < 2 * TILES_M; ++i) {
      const int r = warp.row + g + 8 * i;
      const float of_row = lse_smem[r], minus_delta = -delta_smem[r];
#pragma unroll
      for (int j = 0; j < 2 * TILES_N; ++j) {
        const int e = i % 2 * 2 + j % 2;
        S[i / 2][j / 2][e] = weight(S[i / 2][j / 2][e], scale_log2, of_row);
        dP[i / 2][j / 2][e] = minus_delta;  // so that the product adds to -delta
      }
    }
    if (MASK_MOD || tile.first_key < 0 || tile.first_row + BLOCK > tile.q_len ||
        tile.first_key + BLOCK > min(tile.first_row + tile.window_hi + 1, tile.kv_len) ||
        tile.first_key < tile.first_row + BLOCK - 1 + tile.window_lo) {
#pragma unroll
      for (int i = 0; i < 2 * TILES_M; ++i)
#pragma unroll
        for (int j = 0; j < 2 * TILES_N; ++j)
          if (!is_seen(tile, hooks, row + 8 * i, key + j / 2 * 8 + j % 2))
            S[i / 2][j / 2][i % 2 * 2 + j % 2] = 0.0f;
    }
    cp_async_wait<1>();
    __syncthreads();  // hazard: dO and V could be read before their copies land
    gemm_abt(T(), dP, dO_smem + rows_lane, V_smem + keys_lane);
    __syncthreads();  // hazard: dO, V, lse or delta could be overwritten while another warp reads them
    load_gradients(next, new_rows, new_keys);
    cp_async_commit();

#pragma unroll
    for (int i = 0; i < 2 * TILES_M; ++i)
#pragma unroll
      for (int j = 0; j < 2 * TILES_N; ++j) {
        const int e = i % 2 * 2 + j % 2;
        float p = S[i / 2][j / 2][e];
        // Weights of 0 add nothing, also where dP is infinite or NaN.
        if (FORM == SLOPES) p *= -fabsf(row + 8 * i + tile.shift - (key + j / 2 * 8 + j % 2));
        if (p != 0.0f) acc[i / 2][j / 2][e] = fmaf(p, dP[i / 2][j / 2][e], acc[i / 2][j / 2][e]);
      }
  }
  cp_async_wait<0>();

  // ---- epilogue: each number of the bias by one thread
  const bool is_full = FORM == BIAS && !bias.sum_rows && !bias.sum_keys;
  Sums& sums = *reinterpret_cast<Sums*>(dynamic_smem);
  if (is_full) dBias = of_bias(dBias, bias, params);
  else __syncthreads();  // hazard: tiles could be overwritten while another warp reads them
#pragma unroll
  for (int i = 0; i < 2 * TILES_M; ++i)
#pragma unroll
    for (int j = 0; j < 2 * TILES_N; ++j) {
      const int r = warp.row + g + 8 * i, c = warp.key + 2 * t + j / 2 * 8 + j % 2;
      const float sum = acc[i / 2][j / 2][i % 2 * 2 + j % 2];
      if (is_full) {
        const int row = bias.row_tile(params) * BLOCK + r, key = bias.key_tile(params) * BLOCK + c;
        if (row < params.rows && key < params.keys)
          from_float(dBias[(long long)row * params.keys + key], sum);
      } else {
        sums[r][c] = sum;
      }
    }
  if (!is_full) add_and_store(sums, dBias, bias, params);
}
