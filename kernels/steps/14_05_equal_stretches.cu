// 14, step 5, equal stretches: a block for each multiprocessor takes an equal share of the key
// tiles of all units. The ring of copies goes on across the ends of units.
//
// Launch   grid (blocks or, with num_splits, parts of units; tiles of 16 rows), block 32 WARPS
// Shapes   Q, O (sequences, N, heads, HEAD_DIM); K, V (sequences, N_kv, kv_heads, HEAD_DIM),
//          float16 or bfloat16; lse (sequences, heads, N) or null; cache_seqlens (sequences)
// Needs    sm_80; HEAD_DIM 64, 128 or 256, strides multiples of 16 bytes; tickets that are 0
// Traffic  K and V once for each tile of 16 rows; what is cut, twice
#ifndef STAGES
#define STAGES 3  // tiles of K and V of a warp that are in shared memory, or on their way
#endif

#include "cache_copies.cuh"  // Cache, Copies: the ring of a warp, across the ends of units
#include "decode_tile.cuh"   // sizes; Rows, Keys, Parts: which rows, which keys, results
#include "stream_k.cuh"      // StreamK: the stretch of key tiles of a block

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) split_kv(
    const T* __restrict__ Q, T* K, T* V, T* __restrict__ O,
    float* __restrict__ lse,                // [sequences, heads, N]; or null
    const int* __restrict__ cache_seqlens,  // [sequences]
    float* partial_o,                       // [slots, STATE_ROWS, HEAD_DIM]
    float2* partial_ml,                     // [slots, STATE_ROWS]
    int* tickets,                           // [blocks]: 0 before and after a launch
    const DecodeParams params) {
  // ---- prologue: the block's stretch, and the first copies of each warp
  const AttentionParams& a = params.attention;
  const Rows rows(a, a.heads / a.kv_heads);
  StreamK stretch(params, rows, cache_seqlens, false, blockIdx.x, gridDim.x);
  if (stretch.empty()) return;  // the whole block, before any barrier
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const Parts partial = {partial_o, partial_ml};
  const unsigned Q_smem = smem_address(dynamic_smem);
  const int warp = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const unsigned ring = Q_smem + RING_BEGIN<T> + warp * STAGES * 2 * TILE_BYTES<T>;  // of this warp
  const Cache<T> cache = {K, V, nullptr, nullptr, nullptr, params};
  Copies<T> copies(cache, stretch);
  for (int s = 0; s < STAGES; ++s) {
    const unsigned stage = ring + s * 2 * TILE_BYTES<T>;
    copies.issue(stage, stage + TILE_BYTES<T>);
    cp_async_commit();
  }
  const unsigned q_lane = Q_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const unsigned k_lane = swizzle<CHUNKS>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const unsigned v_lane = swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const float softmax_scale_log2 = fmaxf(a.softmax_scale, 1e-30f) * LOG2_E;

  int stage_of_ring = 0;
  do {
    // ---- a piece: the rows of its unit
    const int sequence = stretch.sequence, kv_head = stretch.kv_head;
    const Keys keys = stretch.keys;
    rows.load(dynamic_smem, Q, sequence, kv_head);
    __syncthreads();  // hazard: Q could be read before it is there
    Output acc = {};
    Statistics l_i = {};
    Maxima maxima = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) maxima.m_i[i] = maxima.limit[i] = M_INIT;

    // ---- one pass over this warp's tiles, as in 07
    for (int tile = stretch.first + warp; tile < stretch.end; tile += WARPS) {
      const unsigned K_smem = ring + stage_of_ring * 2 * TILE_BYTES<T>;
      const unsigned V_smem = K_smem + TILE_BYTES<T>;
      stage_of_ring = stage_of_ring + 1 == STAGES ? 0 : stage_of_ring + 1;
      const int first_key = keys.first_key(tile);
      cp_async_wait<STAGES - 1>();
      __syncwarp();  // hazard: other lanes' copies could be read before they land
      Scores S = {};
      gemm_qk<T>(S, q_lane, K_smem + k_lane);
      mask_tile(S, keys, rows, first_key);
      online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2);
      gemm_pv<T>(acc, S, maxima.m_i, l_i, softmax_scale_log2, V_smem + v_lane);
      __syncwarp();  // hazard: the stage could be overwritten while another lane reads it
      copies.issue(K_smem, V_smem);
      cp_async_commit();
    }

    // ---- the warps' results become the block's
    store_state<T>(dynamic_smem, maxima, l_i, acc);
    __syncthreads();  // hazard: results could be read before they are there, Q overwritten in use
    const int first_block = stretch.first_block(), parts = stretch.parts();
    // A block begins with the last part of a unit or one in the middle, and ends with a first part.
    const auto slot_of = [&](int block, bool first_part) {
      return (blockIdx.y * gridDim.x + block) * 2 + first_part;
    };
    for (int i = threadIdx.x; i < rows.count * (HEAD_DIM / 4); i += THREADS) {
      const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
      const State sum = merge(min(WARPS, stretch.end - stretch.first), [&](int w) {
        return load_state<T>(dynamic_smem, w, row, column);
      });
      if (parts == 1) rows.store(O, lse, sequence, kv_head, row, column, sum);
      else partial.store(slot_of(blockIdx.x, stretch.first == 0), row, column, sum);
    }
    if (parts == 1) continue;

    // ---- a unit that is cut: the block that comes last merges its parts
    if (!comes_last(tickets + blockIdx.y * gridDim.x + first_block, parts)) continue;
    for (int i = threadIdx.x; i < rows.count * (HEAD_DIM / 4); i += THREADS) {
      const int row = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
      const State sum = merge(parts, [&](int part) {
        return partial.load(slot_of(first_block + part, part == 0), row, column);
      });
      rows.store(O, lse, sequence, kv_head, row, column, sum);
    }
  } while (stretch.advance());
}
