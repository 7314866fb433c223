// 14, step 4, merged by the last block: each part draws a ticket, and the block that draws the last
// one merges, in the same launch.
//
// Launch   grid (sequences kv_heads num_splits, tiles of 16 rows), block 32 WARPS
// Shapes   Q, O (sequences, N, heads, HEAD_DIM); K, V (sequences, N_kv, kv_heads, HEAD_DIM),
//          float16 or bfloat16; lse (sequences, heads, N) or null; cache_seqlens (sequences)
// Needs    sm_80; HEAD_DIM 64, 128 or 256, strides multiples of 16 bytes; tickets that are 0
// Traffic  K and V once for each tile of 16 rows; what is cut, twice
#ifndef STAGES
#define STAGES 3  // tiles of K and V of a warp that are in shared memory, or on their way
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
    float* partial_o,                       // [slots, STATE_ROWS, HEAD_DIM]
    float2* partial_ml,                     // [slots, STATE_ROWS]
    int* tickets,                           // [units]: 0 before and after a launch
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
  __shared__ bool is_last;
  const Parts partial = {partial_o, partial_ml};
  const unsigned Q_smem = smem_address(dynamic_smem);
  const int warp = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const unsigned ring = Q_smem + RING_BEGIN<T> + warp * STAGES * 2 * TILE_BYTES<T>;  // of this warp
  K += sequence * a.k.batch + kv_head * a.k.head;
  V += sequence * a.v.batch + kv_head * a.v.head;
  const unsigned q_lane = Q_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const unsigned k_lane = swizzle<CHUNKS>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const unsigned v_lane = swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const float softmax_scale_log2 = fmaxf(a.softmax_scale, 1e-30f) * LOG2_E;
  const auto issue = [&](int tile, int s) {
    const unsigned stage = ring + s * 2 * TILE_BYTES<T>;
    if (tile < end) {
      copy_tile(stage, K, a.k.row, keys, keys.first_key(tile));
      copy_tile(stage + TILE_BYTES<T>, V, a.v.row, keys, keys.first_key(tile));
    }
    cp_async_commit();  // of nothing, at the end: so that waiting counts tiles
  };
  for (int s = 0; s < STAGES; ++s) issue(first + warp + s * WARPS, s);
  rows.load(dynamic_smem, Q, sequence, kv_head);
  __syncthreads();  // hazard: Q could be read before it is there
  Output acc = {};
  Statistics l_i = {};
  Maxima maxima = {};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) maxima.m_i[i] = maxima.limit[i] = M_INIT;

  // ---- one pass over this warp's tiles, as in 07
  int stage_of_ring = 0;
  for (int tile = first + warp; tile < end; tile += WARPS) {
    const unsigned K_smem = ring + stage_of_ring * 2 * TILE_BYTES<T>;
    const unsigned V_smem = K_smem + TILE_BYTES<T>;
    const int first_key = keys.first_key(tile);
    cp_async_wait<STAGES - 1>();
    __syncwarp();  // hazard: other lanes' copies could be read before they land
    Scores S = {};
    gemm_qk<T>(S, q_lane, K_smem + k_lane);
    mask_tile(S, keys, rows, first_key);
    online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2);
    gemm_pv<T>(acc, S, maxima.m_i, l_i, softmax_scale_log2, V_smem + v_lane);
    __syncwarp();  // hazard: the stage could be overwritten while another lane reads it
    issue(tile + STAGES * WARPS, stage_of_ring);
    stage_of_ring = stage_of_ring + 1 == STAGES ? 0 : stage_of_ring + 1;
  }

  // ---- the warps' results become the block's
  const int parts = params.num_splits;
  store_state<T>(dynamic_smem, maxima, l_i, acc);
  __syncthreads();  // hazard: results could be read before they are there
  for (int i = threadIdx.x; i < rows.count * (HEAD_DIM / 4); i += THREADS) {
    const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
    const State sum =
        merge(WARPS, [&](int w) { return load_state<T>(dynamic_smem, w, row, column); });
    if (parts == 1) rows.store(O, lse, sequence, kv_head, row, column, sum);
    else partial.store(slot_of(blockIdx.x, gridDim.x), row, column, sum);
  }
  if (parts == 1) return;

  // ---- the block that comes last merges the parts
  __threadfence();  // hazard: the ticket could be seen before this part
  __syncthreads();  // hazard: the ticket could be drawn before all threads have written
  const int unit = blockIdx.x / parts;
  if (threadIdx.x == 0) {
    // atomicInc goes back to 0 with the last part: ready for the next launch.
    int* ticket = tickets + slot_of(unit, gridDim.x / parts);
    is_last = atomicInc(reinterpret_cast<unsigned*>(ticket), parts - 1) == parts - 1;
  }
  __syncthreads();  // hazard: is_last could be read before it is there
  if (!is_last) return;
  __threadfence();  // hazard: parts could be read before the ticket
  for (int i = threadIdx.x; i < rows.count * (HEAD_DIM / 4); i += THREADS) {
    const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
    const State sum = merge(parts, [&](int part) {
      return partial.load(slot_of(unit * parts + part, gridDim.x), row, column);
    });
    rows.store(O, lse, sequence, kv_head, row, column, sum);
  }
}
