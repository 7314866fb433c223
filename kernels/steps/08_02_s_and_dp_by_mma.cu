// 08, step 2, S and dP by mma.sync: both are A B^T of tiles of the same layout.
//
// Since step 1: a warp has its part of S = Q K^T and of dP = dO V^T in the fragments of 07. A lane
// has the same elements of both, and computes P and dS from them.
//
// Launch, shapes, traffic: see backward_tiles.cuh, without dq_semaphore
// Spills   by NVRTC 12.9 for sm_90: 16 bytes at HEAD_DIM = 128

// The skeleton, which notebook 08b explains. backward_tiles.cuh: sizes of tiles, KeyBlock and Warp
// (what a block and a warp has), load_tile, gemm_abt and gemm_ab; lse, delta and zeros for dQ_accum
// before the loop. backward_convert.cuh: dQ after it.
#include "backward_convert.cuh"
#include "backward_tiles.cuh"

// Shared memory: K, V, Q and dO, dS, P, lse and delta.
constexpr unsigned Q_OFFSET = 2 * KEYS_BYTES, DS_OFFSET = Q_OFFSET + STAGE_BYTES;
constexpr unsigned P_OFFSET = DS_OFFSET + SCORES_BYTES, LSE_OFFSET = P_OFFSET + SCORES_BYTES;
constexpr unsigned SHARED_BYTES = LSE_OFFSET + LSE_DELTA_BYTES;

// Element (i, j) of a tile in shared memory, whose rows of ROW chunks are swizzled.
template <typename T, int ROW>
struct Tile {
  unsigned char* begin;
  __device__ __forceinline__ T& at(int i, int j) const {
    return *reinterpret_cast<T*>(begin + swizzle<ROW>(i, j / 8) + 2 * (j % 8));
  }
  __device__ __forceinline__ float operator()(int i, int j) const { return at(i, j); }
};

// term(0) + term(1) + ... + term(LENGTH - 1). Below, i is a row of the tile of rows, j a key of the
// tile of keys, c a column of HEAD_DIM.
template <int LENGTH, typename Term>
__device__ __forceinline__ float sum(const Term& term) {
  float total = 0.0f;
#pragma unroll 1  // more would take registers that the accumulators need
  for (int k = 0; k < LENGTH; ++k) total += term(k);
  return total;
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
  const unsigned lse_smem = K_smem + LSE_OFFSET;
  const Tile<T, CHUNKS> K_tile{dynamic_smem};
  const Tile<T, CHUNKS> Q_tile{dynamic_smem + Q_OFFSET}, dO_tile{Q_tile.begin + ROWS_BYTES};
  const Tile<T, KEY_CHUNKS> dS_tile{dynamic_smem + DS_OFFSET}, P_tile{dynamic_smem + P_OFFSET};
  const Warp warp;
  const int lane_id = warp.lane_id, g = warp.g, t = warp.t;
  const unsigned q_lane =
      Q_smem + swizzle<CHUNKS>(warp.row + lane_id % 16, lane_id / 16);  // A of S
  const unsigned k_lane =
      K_smem + swizzle<CHUNKS>(warp.key + lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);  // B

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

  // Of dK and dV, a thread has OWN columns of a key.
  constexpr int OWN = BLOCK_N * HEAD_DIM / THREADS;
  static_assert(THREADS % BLOCK_N == 0 && BLOCK_N * HEAD_DIM % THREADS == 0, "equal shares");
  const int own_key = threadIdx.x % BLOCK_N, own_column = threadIdx.x / BLOCK_N * OWN;
  float dK_acc[OWN] = {}, dV_acc[OWN] = {};
  const float softmax_scale_log2 = forward.softmax_scale * LOG2_E;

  // dQ += dS K for one tile of rows.
  const auto add_dq = [&](int slot) {
    float* const target = dQ_accum + (long long)slot * (BLOCK_M * DQ_COLUMNS);
    for (int e = threadIdx.x; e < BLOCK_M * HEAD_DIM; e += THREADS) {
      const int i = e / HEAD_DIM, c = e % HEAD_DIM;
      const float dq = sum<BLOCK_N>([&](int j) { return dS_tile(i, j) * K_tile(j, c); });
      atomicAdd(target + i * DQ_COLUMNS + c, dq);
    }
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

    const float* const own_lse = reinterpret_cast<const float*>(dynamic_smem + LSE_OFFSET);
    // P = exp(S - lse), or 0 where a row does not see a key, and dS = P (dP - delta).
    const auto store_scores = [&](int i, int j, float s, float dp) {
      const int key = first_key + j, distance = key - (first_row + i);
      const bool seen = distance >= rows.window_lo && distance <= rows.window_hi && key < kv_len;
      const float p = seen ? exp2f(fmaf(s, softmax_scale_log2, -own_lse[i])) : 0.0f;
      P_tile.at(i, j) = p;
      dS_tile.at(i, j) = p * (dp - own_lse[BLOCK_M + i]);
    };
#pragma unroll 1  // unrolled, the addresses of two chunks would spill
    for (int c = 0; c < WARP_ROWS / SLICE_M; ++c) {
      float S[SLICE_M / 16][2 * KEY_TILES][4] = {}, dP[SLICE_M / 16][2 * KEY_TILES][4] = {};
      gemm_abt(T(), S, q_lane + 2 * c * SLICE_M * HEAD_DIM_PADDED, k_lane);
      gemm_abt(
          T(), dP, q_lane + ROWS_BYTES + 2 * c * SLICE_M * HEAD_DIM_PADDED, k_lane + KEYS_BYTES);
#pragma unroll
      for (int m = 0; m < SLICE_M / 16; ++m)
#pragma unroll
        for (int n = 0; n < 2 * KEY_TILES; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int i = warp.row + c * SLICE_M + 16 * m + e / 2 * 8 + g;
            const int j = warp.key + 8 * n + 2 * t + e % 2;
            store_scores(i, j, S[m][n][e], dP[m][n][e]);
          }
    }

    __syncthreads();  // without it, P and dS could be read before other warps have written them
    for (int i = 0; i < BLOCK_M; ++i) {
      const float p = P_tile(i, own_key), ds = dS_tile(i, own_key);
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
        dV_acc[n] += p * dO_tile(i, own_column + n);
        dK_acc[n] += ds * Q_tile(i, own_column + n);
      }
    }
    add_dq(slot);
    head = next_head;
    row_tile = next_tile;
  }

  // ---- epilogue
  cp_async_wait<0>();  // K and V, where no row has seen these keys
  if (first_key + own_key >= kv_len) return;
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
    dK[own_key * params.d_k.row + own_column + n] = dK_acc[n] * forward.softmax_scale;
    dV[own_key * params.d_v.row + own_column + n] = dV_acc[n];
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_mma_convert(
    const float* __restrict__ dQ_accum, T* __restrict__ dQ, const int* __restrict__ cu_seqlens_q,
    const BackwardParams params) {
  const RowBlock block(params.forward, cu_seqlens_q);
  if (block.first_row < block.q_len) convert_rows(block, dQ_accum, dQ, params);
}
