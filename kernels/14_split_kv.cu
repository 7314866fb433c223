// 14 split_kv: decoding. A few new tokens of each sequence attend to all of its cache.
//
// Since 07: each new token reads the whole cache once, so the memory's speed is all that counts.
// The heads that share a head of K and V are rows of one tile, so that it is read once for all of
// them. The key tiles of all sequences are cut into equal stretches, one for each multiprocessor;
// each warp takes its own tiles of them and has its own ring of copies, which never waits for
// another warp. A unit that is cut leaves partial results; the block that comes last merges them.
// K and V may lie in pages, and may be in e4m3.
//
// Launch   grid (blocks, tiles of 16 rows), or with num_splits (sequences kv_heads num_splits,
//          tiles), block 32 WARPS; SHARED_BYTES of dynamic shared memory
// Shapes   Q, O (sequences, N, heads, HEAD_DIM); K, V (sequences, N_kv, kv_heads, HEAD_DIM) or,
//          with PAGED, (pages, page size, kv_heads, HEAD_DIM) and block_table; K_new, V_new
//          (sequences, N, kv_heads, HEAD_DIM) or null; float32, float16 or bfloat16, strides in
//          elements, and with CACHE_E4M3 K and V are bytes; lse (sequences, heads, N) or null; cache_seqlens (sequences)
// Needs    sm_80, with CACHE_E4M3 sm_89; HEAD_DIM 64, 128 or 256, strides multiples of 16 bytes; tickets that are 0
// Traffic  K and V once for each tile of 16 rows; 16 rows of float32 for each cut of a unit,
//          twice
#ifndef PAGED
#define PAGED 0  // 1: K and V lie in pages, which block_table finds; 2: not of a power of two keys
#endif

#include "cache_copies.cuh"  // Cache, Copies: a ring of copies for each warp
#include "decode_tile.cuh"   // sizes; Rows, Keys, Parts: which rows, which keys, results
#include "e4m3_cache.cuh"    // products with a cache of any type
#include "hooks.cuh"         // nothing, until a caller gives it a function of scores
#include "stream_k.cuh"      // StreamK: the stretch of key tiles of a block

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) split_kv(
    const T* __restrict__ Q, Cached<T>* K, Cached<T>* V, const T* K_new, const T* V_new,
    T* __restrict__ O,
    float* __restrict__ lse,                // [sequences, heads, N]; or null
    const int* __restrict__ cache_seqlens,  // [sequences]: keys in the cache before this launch
    const int* __restrict__ block_table,    // [sequences, pages]; or null
    const float* k_descale,                 // [sequences, kv_heads], of a cache in e4m3; or null
    const float* v_descale,                 // the same
    float* partial_o,                       // [blocks, 2, STATE_ROWS, HEAD_DIM]
    float2* partial_ml,                     // [blocks, 2, STATE_ROWS]
    int* tickets,                           // [blocks]: 0 before and after a launch
    const DecodeParams params HOOK_PARAMETERS) {
  // ---- prologue: the block's stretch, and the first copies of each warp
  const AttentionParams& a = params.attention;
  const Rows rows(a, a.heads / a.kv_heads);
  StreamK stretch(params, rows, cache_seqlens, K_new != nullptr, blockIdx.x, gridDim.x);
  if (stretch.empty()) return;  // the whole block, before any barrier
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem);
  const int warp = threadIdx.x / 32, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const unsigned ring = RING_BEGIN<T> + warp * STAGES * 2 * TILE_BYTES<T>;  // of this warp
  const Cache<T> cache = {K,      V,         K_new,     V_new,       block_table,
                          params, k_descale, v_descale, dynamic_smem};
  const Parts partial = {partial_o, partial_ml};
  Copies<T> copies(cache, stretch);
  for (int s = 0; s < STAGES; ++s) {
    const unsigned stage = Q_smem + ring + s * 2 * TILE_BYTES<T>;
    copies.issue(stage, stage + TILE_BYTES<T>);
    cp_async_commit();
  }
  const unsigned q_lane = Q_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16);
  const unsigned k_lane = swizzle<KV_CHUNKS>(lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);
  const unsigned v_lane = swizzle<KV_CHUNKS>(lane_id % 16, lane_id / 16);
  const float scale = fmaxf(a.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale_log2_of(scale);

  int stage_of_ring = 0;
  do {
    // ---- a piece: the rows of its unit
    const int sequence = stretch.sequence, kv_head = stretch.kv_head;
    const Keys keys = stretch.keys;
    const float* row_scale = load_rows(rows, dynamic_smem, Q, sequence, kv_head);
    __syncthreads();  // hazard: Q could be read before it is there
    const int kv_len = keys.q_pos + a.N;
    const Hooks hooks[2] = {
        {HOOK_ARGUMENTS sequence, rows.head(kv_head, g), kv_head, a.N, kv_len},
        {HOOK_ARGUMENTS sequence, rows.head(kv_head, g + 8), kv_head, a.N, kv_len}};
    const Factors factors = factors_of(row_scale, cache.descale(k_descale, sequence, kv_head));
    Output acc = {};
    Statistics l_i;
    Maxima maxima = {};
    const bool begins = stretch.first == 0;  // the unit: a sink counts once
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      maxima.m_i[i] = M_INIT;
      l_i[i] = 0.0f;
      if (begins && warp == 0) hook_start(maxima.m_i[i], l_i[i], hooks[i], t == 0);
      maxima.limit[i] = maxima.m_i[i];
    }

    // ---- one pass over this warp's tiles, as in 07
    for (int tile = stretch.first + warp; tile < stretch.end; tile += WARPS) {
      const unsigned stage = ring + stage_of_ring * 2 * TILE_BYTES<T>;
      const unsigned K_smem = Q_smem + stage, V_smem = K_smem + TILE_BYTES<T>;
      stage_of_ring = stage_of_ring + 1 == STAGES ? 0 : stage_of_ring + 1;
      const int first_key = keys.first_key(tile);
      cp_async_wait<STAGES - 1>();
      __syncwarp();  // hazard: other lanes' copies could be read before they land
      Scores S = {};
      product_qk<T>(S, dynamic_smem, q_lane, stage, k_lane, factors);
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        hook_scores_of_row(
            S, i, hooks[i], scale, keys.q_pos + rows.token(g + 8 * i), first_key + 2 * t);
      mask_tile(S, keys, rows, first_key);
      online_softmax_rescale(S, maxima, l_i, acc, softmax_scale_log2);
      product_pv<T>(
          acc, S, maxima.m_i, l_i, softmax_scale_log2, dynamic_smem, stage + TILE_BYTES<T>, v_lane);
      __syncwarp();  // hazard: the stage could be overwritten while another lane reads it
      copies.issue(K_smem, V_smem);
      cp_async_commit();
    }

    // ---- the warps' results become the block's
    const float v_scale = cache.descale(v_descale, sequence, kv_head);
    store_state_of<T>(dynamic_smem, maxima, l_i, acc, v_scale);
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
      else partial.store(slot_of(blockIdx.x, begins), row, column, sum);
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
