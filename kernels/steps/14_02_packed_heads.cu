// 14, step 2, packed heads: those that share a head of K and V are rows of one tile, so that its
// keys are read once for all of them.
//
// Launch   grid (sequences kv_heads num_splits, tiles of 16 rows), block 32 WARPS;
//          merge_parts: grid (sequences kv_heads, tiles), the same block
// Shapes   Q, O (sequences, N, heads, HEAD_DIM); K, V (sequences, N_kv, kv_heads, HEAD_DIM),
//          float16 or bfloat16; lse (sequences, heads, N) or null; cache_seqlens (sequences)
// Needs    sm_80; HEAD_DIM 64, 128 or 256, strides multiples of 16 bytes
// Traffic  K and V once for each tile of 16 rows; the parts, twice
#ifndef STAGES
#define STAGES 1  // tiles of K and V of a warp that are in shared memory
#endif

#include "decode_tile.cuh"  // sizes; Rows, Keys, Parts: which rows, which keys, results

// Starts a warp's copies of a tile of K or V. What no row sees becomes zeros: it may be NaN.
template <typename T>
__device__ __forceinline__ void copy_tile(
    unsigned target, const T* source, long long row_stride, const Keys& keys, int first_key) {
  constexpr int LANES = ROW_CHUNKS<T>;  // of a row
#pragma unroll
  for (int i = 0; i < BLOCK_N; i += 32 / LANES) {
    const int row = i + threadIdx.x % 32 / LANES, chunk = threadIdx.x % LANES;
    const T* from = source + (first_key + row) * row_stride + 8 * chunk;
    cp_async(target + swizzle<CHUNKS>(row, chunk), from, keys.is_seen(first_key + row) ? 16 : 0);
  }
}

__device__ __forceinline__ int slot_of(int block, int blocks) {
  return blockIdx.y * blocks + block;
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) split_kv(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V, T* __restrict__ O,
    float* __restrict__ lse,                // [sequences, heads, N]; or null
    const int* __restrict__ cache_seqlens,  // [sequences]
    float* partial_o,                       // [blocks, STATE_ROWS, HEAD_DIM]
    float2* partial_ml,                     // [blocks, STATE_ROWS]
    const DecodeParams params) {
  // ---- prologue: the block's head of K and V, its part, and the keys that its rows see
  const AttentionParams& a = params.attention;
  const Rows rows(a, a.heads / a.kv_heads);
  const int sequence = blockIdx.x / params.num_splits / a.kv_heads;
  const int kv_head = blockIdx.x / params.num_splits % a.kv_heads;
  const Keys keys(params, rows, cache_seqlens, false, sequence);
  const int share = (keys.tiles + params.num_splits - 1) / params.num_splits;
  const int first = blockIdx.x % params.num_splits * share, end = min(first + share, keys.tiles);
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem);
  const int warp = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const unsigned ring = Q_smem + RING_BEGIN<T> + warp * STAGES * 2 * TILE_BYTES<T>;  // of this warp
  K += sequence * a.k.batch + kv_head * a.k.head;
  V += sequence * a.v.batch + kv_head * a.v.head;
  const unsigned q_lane = Q_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const unsigned k_lane = swizzle<CHUNKS>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const unsigned v_lane = swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const float softmax_scale_log2 = fmaxf(a.softmax_scale, 1e-30f) * LOG2_E;
  rows.load(dynamic_smem, Q, sequence, kv_head);
  __syncthreads();  // hazard: Q could be read before it is there
  Output acc = {};
  Statistics l_i = {};
  Maxima maxima = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) maxima.m_i[i] = maxima.limit[i] = M_INIT;

  // ---- one pass over this warp's tiles, as in 07
  for (int tile = first + warp; tile < end; tile += WARPS) {
    const unsigned K_smem = ring, V_smem = K_smem + TILE_BYTES<T>;
    const int first_key = keys.first_key(tile);
    copy_tile(K_smem, K, a.k.row, keys, first_key);
    copy_tile(V_smem, V, a.v.row, keys, first_key);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();  // hazard: other lanes' copies could be read before they land
    Scores S = {};
    gemm_qk<T>(S, q_lane, K_smem + k_lane);
    mask_tile(S, keys, rows, first_key);
    online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2);
    gemm_pv<T>(acc, S, maxima.m_i, l_i, softmax_scale_log2, V_smem + v_lane);
    __syncwarp();  // hazard: the tile could be overwritten while another lane reads it
  }

  // ---- the warps' results become the block's
  store_state<T>(dynamic_smem, maxima, l_i, acc);
  __syncthreads();  // hazard: results could be read before they are there
  for (int i = threadIdx.x; i < rows.count * (HEAD_DIM / 4); i += THREADS) {
    const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
    const State sum =
        merge(WARPS, [&](int w) { return load_state<T>(dynamic_smem, w, row, column); });
    if (params.num_splits == 1) rows.store(O, lse, sequence, kv_head, row, column, sum);
    else Parts{partial_o, partial_ml}.store(slot_of(blockIdx.x, gridDim.x), row, column, sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) merge_parts(
    T* __restrict__ O, float* __restrict__ lse, float* partial_o, float2* partial_ml,
    const DecodeParams params) {
  const AttentionParams& a = params.attention;
  const Rows rows(a, a.heads / a.kv_heads);
  const int splits = params.num_splits, first = blockIdx.x * splits;
  for (int i = threadIdx.x; i < rows.count * (HEAD_DIM / 4); i += THREADS) {
    const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
    const State sum = merge(splits, [&](int part) {
      const int slot = slot_of(first + part, gridDim.x * splits);
      return Parts{partial_o, partial_ml}.load(slot, row, column);
    });
    rows.store(O, lse, blockIdx.x / a.kv_heads, blockIdx.x % a.kv_heads, row, column, sum);
  }
}
