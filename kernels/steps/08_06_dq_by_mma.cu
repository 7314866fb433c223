// 08, step 6, dQ by mma.sync: now tensor cores compute all five products.
//
// Since step 5: each warp multiplies its rows of dS by its columns of K, and adds the fragments to
// dQ_accum.
//
// Launch, shapes, traffic: see backward_tiles.cuh, without dq_semaphore
// Spills   by NVRTC 12.9 for sm_90: none

// The skeleton, which notebook 08b explains. backward_tiles.cuh: sizes of tiles, KeyBlock and Warp
// (what a block and a warp has), load_tile, gemm_abt and gemm_ab; lse, delta and zeros for dQ_accum
// before the loop. backward_convert.cuh: dQ after it. backward_epilogue.cuh: dK and dV from
// registers.
#include "backward_epilogue.cuh"
#include "backward_convert.cuh"
#include "backward_tiles.cuh"

// Shared memory: K, V, Q and dO, dS, P, lse and delta.
constexpr unsigned Q_OFFSET = 2 * KEYS_BYTES, DS_OFFSET = Q_OFFSET + STAGE_BYTES;
constexpr unsigned P_OFFSET = DS_OFFSET + SCORES_BYTES, LSE_OFFSET = P_OFFSET + SCORES_BYTES;
constexpr unsigned SHARED_BYTES = LSE_OFFSET + LSE_DELTA_BYTES;

// Four floats of dQ_accum: the two neighbours that a lane has in each of two rows.
__device__ __forceinline__ void atomic_add(float* dQ_accum, const float (&d)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(dQ_accum + i / 2 * 8 * DQ_COLUMNS + i % 2, d[i]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_mma_preprocess(
    const T* __restrict__ O, const T* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ lse_delta, float* __restrict__ dQ_accum,
    const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- lse and delta of a tile of rows
  const RowBlock block(params.forward, cu_seqlens_q);
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  if (block.first_row >= block.q_len) return;
  prepare_rows<THREADS, DQ_COLUMNS>(block, tiles, O, dO, lse, lse_delta, dQ_accum, params);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward_mma(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
    const T* __restrict__ dO, const float* __restrict__ lse_delta, float* __restrict__ dQ_accum,
    T* __restrict__ dK, T* __restrict__ dV,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BackwardParams params) {
  // ---- prologue: the keys of this block, and the tiles of rows that see one of them
  const AttentionParams& forward = params.forward;
  const KeyBlock block(
      forward.window_right < UNLIMITED, block_number, forward, cu_seqlens_q, cu_seqlens_k);
  const int first_key = block.first_key, q_len = block.q_len, kv_len = block.kv_len;
  if (first_key >= kv_len) return;  // the whole block: its sequence is shorter than the longest
  Q += block.of_rows(forward.q);
  dO += block.of_rows(params.d_o);
  K += block.of_keys(forward.k);
  V += block.of_keys(forward.v);
  dK += block.of_keys(params.d_k);
  dV += block.of_keys(params.d_v);
  const RowRange rows(block, forward);
  lse_delta += rows.first_slot * (2 * BLOCK_M);
  dQ_accum += rows.first_slot * (BLOCK_M * DQ_COLUMNS);

  // Each lane passes the address of one row to ldmatrix; *_lane is its address in the warp's first
  // fragment.
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const unsigned K_smem = smem_address(dynamic_smem), V_smem = K_smem + KEYS_BYTES,
                 Q_smem = K_smem + Q_OFFSET;
  const unsigned dS_smem = K_smem + DS_OFFSET, P_smem = K_smem + P_OFFSET,
                 lse_smem = K_smem + LSE_OFFSET;
  const Warp warp;
  const int lane_id = warp.lane_id, g = warp.g, t = warp.t;
  const unsigned q_lane =
      Q_smem + swizzle<CHUNKS>(warp.row + lane_id % 16, lane_id / 16);  // A of S
  const unsigned k_lane =
      K_smem + swizzle<CHUNKS>(warp.key + lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);  // B
  const unsigned scores_lane =
      swizzle<KEY_CHUNKS>(warp.row + g, warp.key / 8) + 4 * t;  // P and dS are written
  const unsigned scores_dkv = swizzle<KEY_CHUNKS>(
      lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 + warp.dkv_key / 8);  // A of dV and dK
  const unsigned q_dkv =
      Q_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16 + 2 * warp.dkv_block);  // B, with dO
  const unsigned dS_dq =
      dS_smem + swizzle<KEY_CHUNKS>(warp.dq_row + lane_id % 16, lane_id / 16);  // A of dQ
  const unsigned k_dq =
      K_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16 + 2 * warp.dq_block);  // B

  const int copy_row = threadIdx.x / COPY_CHUNKS,
            copy_chunk = threadIdx.x % COPY_CHUNKS;  // this thread copies
  const unsigned copy_offset = swizzle<CHUNKS>(copy_row, copy_chunk);
  Q += copy_row * forward.q.row + 8 * copy_chunk;
  dO += copy_row * params.d_o.row + 8 * copy_chunk;
  const auto load_rows = [&](int head, int row_tile) {
    const int row = row_tile * BLOCK_M;
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_smem + copy_offset, Q + head * forward.q.head + row * forward.q.row, forward.q.row,
        q_len - row - copy_row, HEAD_DIM);
    if (threadIdx.x < BLOCK_M / 2)
      cp_async(
          lse_smem + 16 * threadIdx.x,
          lse_delta + (head * rows.tiles.of_head + row_tile) * (2 * BLOCK_M) + 4 * threadIdx.x, 16);
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_smem + ROWS_BYTES + copy_offset, dO + head * params.d_o.head + row * params.d_o.row,
        params.d_o.row, q_len - row - copy_row, HEAD_DIM);
    cp_async_commit();
  };

  float dK_acc[DKV_TILES][2 * DKV_BLOCKS][4] = {}, dV_acc[DKV_TILES][2 * DKV_BLOCKS][4] = {};
  const float softmax_scale_log2 = forward.softmax_scale * LOG2_E;

  // dQ += dS K for one tile of rows.
  const auto add_dq = [&](int slot) {
    float dQ_acc[DQ_TILES][2 * DQ_BLOCKS][4] = {};
    gemm_ab<BLOCK_N / 16, WARPS_DQ_D>(
        T(), dQ_acc, FromTile<KEY_CHUNKS>{dS_dq}, k_dq, warp.dq_blocks);
    float* const target = dQ_accum + (long long)slot * (BLOCK_M * DQ_COLUMNS) +
                          (warp.dq_row + g) * DQ_COLUMNS + 16 * warp.dq_block + 2 * t;
#pragma unroll
    for (int m = 0; m < DQ_TILES; ++m)
#pragma unroll
      for (int n = 0; n < 2 * DQ_BLOCKS; ++n)
        if (COLUMN_BLOCKS % WARPS_DQ_D == 0 || n / 2 < warp.dq_blocks)
          atomic_add(
              target + 16 * m * DQ_COLUMNS + 16 * (n / 2) * WARPS_DQ_D + 8 * (n % 2), dQ_acc[m][n]);
  };

  load_tile<BLOCK_N, CHUNKS, THREADS>(
      K_smem + copy_offset, K + copy_row * forward.k.row + 8 * copy_chunk, forward.k.row,
      kv_len - first_key - copy_row, HEAD_DIM);
  load_tile<BLOCK_N, CHUNKS, THREADS>(
      V_smem + copy_offset, V + copy_row * forward.v.row + 8 * copy_chunk, forward.v.row,
      kv_len - first_key - copy_row, HEAD_DIM);
  cp_async_commit();

  // ---- all heads of the group, and their tiles of rows from the last to the first
  for (int head = 0, row_tile = rows.last_tile;
       rows.first_tile <= rows.last_tile && head < block.group;) {
    const int slot = head * rows.tiles.of_head + row_tile;
    const int first_row = row_tile * BLOCK_M;
    const int next_tile = row_tile > rows.first_tile ? row_tile - 1 : rows.last_tile;
    const int next_head = row_tile > rows.first_tile ? head : head + 1;
    __syncthreads();  // without it, tiles could be overwritten while other warps still read them
    load_rows(head, row_tile);
    cp_async_wait<0>();
    __syncthreads();  // without it, tiles could be read before the other threads' copies land

    const bool masked = first_key + BLOCK_N > min(first_row + rows.window_hi + 1, kv_len) ||
                        first_key < first_row + BLOCK_M - 1 + rows.window_lo;
    const float* const own_lse = reinterpret_cast<const float*>(dynamic_smem + LSE_OFFSET);
#pragma unroll
    for (int c = 0; c < WARP_ROWS / SLICE_M; ++c) {
      float S[SLICE_M / 16][2 * KEY_TILES][4] = {}, dP[SLICE_M / 16][2 * KEY_TILES][4];
      gemm_abt(T(), S, q_lane + 2 * c * SLICE_M * HEAD_DIM_PADDED, k_lane);
#pragma unroll
      for (int m = 0; m < SLICE_M / 16; ++m) {
        const float* const own = own_lse + warp.row + c * SLICE_M + 16 * m + g;
        const float lse[2] = {own[0], own[8]}, delta[2] = {own[BLOCK_M], own[BLOCK_M + 8]};
#pragma unroll
        for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            S[m][n][i] = exp2f(fmaf(S[m][n][i], softmax_scale_log2, -lse[i / 2]));
            dP[m][n][i] = -delta[i / 2];  // so that the product adds to -delta
          }
      }
      if (masked) {  // a key that a row does not see has the weight 0
        const int key = first_key + warp.key + 2 * t, row = first_row + warp.row + c * SLICE_M + g;
#pragma unroll
        for (int m = 0; m < SLICE_M / 16; ++m)
#pragma unroll
          for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int j = key + 8 * n + i % 2, distance = j - (row + 16 * m + i / 2 * 8);
              if (distance < rows.window_lo || distance > rows.window_hi || j >= kv_len)
                S[m][n][i] = 0.0f;
            }
      }
      gemm_abt(
          T(), dP, q_lane + ROWS_BYTES + 2 * c * SLICE_M * HEAD_DIM_PADDED, k_lane + KEYS_BYTES);

#pragma unroll
      for (int m = 0; m < SLICE_M / 16; ++m)
#pragma unroll
        for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float *const p = &S[m][n][2 * i], *const dp = &dP[m][n][2 * i];
            const unsigned place = swizzle_advance<KEY_CHUNKS>(scores_lane, n) +
                                   2 * (c * SLICE_M + 16 * m + 8 * i) * BLOCK_N;
            store_pair(dynamic_smem + P_OFFSET, place, pack(T(), p[0], p[1]));
            store_pair(dynamic_smem + DS_OFFSET, place, pack(T(), p[0] * dp[0], p[1] * dp[1]));
          }
    }

    __syncthreads();  // without it, P and dS could be read before other warps have written them
    const FromTransposedTile<KEY_CHUNKS> P_dv{P_smem + scores_dkv}, dS_dk{dS_smem + scores_dkv};
    gemm_ab<BLOCK_M / 16, WARPS_DKV_D>(T(), dV_acc, P_dv, q_dkv + ROWS_BYTES, warp.dkv_blocks);
    gemm_ab<BLOCK_M / 16, WARPS_DKV_D>(T(), dK_acc, dS_dk, q_dkv, warp.dkv_blocks);
    add_dq(slot);
    head = next_head;
    row_tile = next_tile;
  }

  // ---- epilogue: a lane has two neighbouring columns of its keys
  cp_async_wait<0>();  // K and V, where no row has seen these keys
  store_from_registers(dK, dV, dK_acc, dV_acc, block, warp, params);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_mma_convert(
    const float* __restrict__ dQ_accum, T* __restrict__ dQ, const int* __restrict__ cu_seqlens_q,
    const BackwardParams params) {
  const RowBlock block(params.forward, cu_seqlens_q);
  if (block.first_row < block.q_len) convert_rows(block, dQ_accum, dQ, params);
}
