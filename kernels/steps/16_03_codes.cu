// 16.3 codes: no exp2 for most weights. The byte of an e4m3 is nearly a logarithm: 8 (x + 7) is that of
// 2^x, but for a mantissa that is linear in between.
//
// Since 16_fp8.cu: a weight is one saturated FFMA, which gives (x + 7) / 16 from 0 to 1, and half an
// HFMA2, whose addition of 1536 rounds to an integer in the lowest byte. The weights differ from exp2's by
// up to 3 %; half of what rounding to e4m3 does anyway. But subnormals are not linear: weights below
// 2^-15 of the largest become 0, where exp2's go down to 2^-18. At head_dim 64 one group of keys in three
// still has exponentials, whose pipe would do nothing otherwise.
//
// Launch   16_transpose.cu; then as 10, after its 10_order.cu
// Shapes   as 10, in e4m3; O in half types or float32. V_image: tiles of V^T, see 16_transpose.cu.
//          descales [sequences, heads], float32: what elements are multiplied by; or null, for 1. With
//          DESCALE_ROWS [sequences, heads, blocks of so many rows or keys], not packed
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 16, pointers of 16 bytes
// Traffic  as 10, with half the bytes of Q, K, V; V is read and written once more by the first launch
#ifndef TURNS
#define TURNS (HEAD_DIM <= 64)  // whether consumers take turns: on an H200 they lost above
#endif
#include <cuda_fp16.h>

#include "fp8_descales.cuh"  // what scores and results are multiplied by
#include "fp8_epilogue.cuh"  // lse, O
#include "fp8_tiles.cuh"     // sizes, the two products, weights
#include "v_image.cuh"       // where a tile of V^T is

constexpr float CODE_SHIFT = -0.35f;  // makes the weights right on average

constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : HEAD_DIM > 64 ? 32 : 56;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : HEAD_DIM > 64 ? 160 : 152;
constexpr int TURN = 1;  // named barriers: the turns, one for each consumer
constexpr unsigned K_AT = CONSUMERS * Q8_BYTES, V_AT = K_AT + STAGES * K8_BYTES;
constexpr unsigned Q_RING_AT = V_AT + STAGES * V8_BYTES;
constexpr unsigned K_RING_AT = Q_RING_AT + Ring<CONSUMERS>::BYTES;
constexpr unsigned V_RING_AT = K_RING_AT + Ring<STAGES>::BYTES;
constexpr unsigned SHARED_BYTES = V_RING_AT + Ring<STAGES>::BYTES;

// Bytes (x + 7) 8 + CODE_SHIFT of two weights 2^x, each the lowest of a half.
__device__ __forceinline__ unsigned codes_of(float x, float y) {
  const __half2 codes =
      __hfma2(__floats2half2_rn(x, y), __float2half2_rn(128.0f), __float2half2_rn(1536.0f));
  return reinterpret_cast<const unsigned&>(codes);
}

// As weights_of_group: e4m3 by its bits.
__device__ __forceinline__ void codes_of_group(
    Weights8& P, const Scores& S, const Statistics& m_i, float softmax_scale_log2, int group) {
  Statistics offset;
#pragma unroll
  for (int i = 0; i < 2; ++i) offset[i] = fmaf(m_i[i], -1.0f / 16, 7.0f / 16 + CODE_SHIFT / 128);
  const auto fraction = [&](float s, int i) {
    return __saturatef(fmaf(s, softmax_scale_log2 / 16, offset[i]));
  };
#pragma unroll
  for (int n = 4 * group; n < 4 * group + 4; n += 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const s = S + 4 * n + 2 * i;
      const unsigned first = codes_of(fraction(s[0], i), fraction(s[1], i));
      const unsigned second = codes_of(fraction(s[4], i), fraction(s[5], i));
      P[n / 4][n % 4 + i] = __byte_perm(first, second, 0x6420);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) fp8(
    const __grid_constant__ TensorMap q_map,  // boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    const unsigned char* __restrict__ V_image, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const float* __restrict__ q_descale,   // [sequences, heads], or null
    const float* __restrict__ k_descale,   // [sequences, kv_heads], or null
    const float* __restrict__ v_descale,   // the same
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int4* __restrict__ schedule,     // [rounds, blocks], see next_tile
    const int rounds, const AttentionParams params) {
  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + K_AT,
                 V_smem = Q_smem + V_AT;
  const Ring<CONSUMERS> q_ring(Q_smem + Q_RING_AT);  // a stage for each consumer
  const Ring<STAGES> k_ring(Q_smem + K_RING_AT), v_ring(Q_smem + V_RING_AT);
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const bool packed = cu_seqlens_q != nullptr;
  if (threadIdx.x == 0) {
    q_ring.init(1);
    k_ring.init(CONSUMERS);
    v_ring.init(CONSUMERS);
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised
  Tile tile;
  int round = 0;
  int4 item = schedule[blockIdx.x];
  const auto next = [&] {
    const int consumers = item.z >> 16;  // that have rows, of a tile that 10_order.cu cut; else 0
    item.z &= 0xffff;
    const bool found =
        next_tile(tile, item, round, rounds, schedule, cu_seqlens_q, cu_seqlens_k, params);
    if (consumers > 0) tile.rows = min(tile.rows, 64 * consumers);
    tile.begin = tile.begin / BLOCK_N * BLOCK_N;  // key tiles are those of V_image
    return found;
  };

  // ---- producer: a thread for K, one for V and one for Q
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || warp_id == 3) return;
    PipelineState<CONSUMERS> q_stage;
    PipelineState<STAGES> stage;
    while (next()) {
      const int batch = packed ? 0 : tile.sequence;
      if (warp_id == 2) {
        for (int i = 0; i < CONSUMERS; ++i, q_stage.advance()) {
          q_ring.wait_empty(q_stage);  // hazard: products still read Q
          const unsigned full = q_ring.expect(q_stage, Q8_BYTES);
          for (int panel = 0; panel < QK_PANELS; ++panel)
            tma_load(
                Q_smem + i * Q8_BYTES + panel * 64 * ROW_BYTES, q_map, full, panel * ROW_BYTES,
                tile.row + 64 * i, tile.head, batch);
        }
        continue;
      }
      int first = last_tile_begin(tile);  // the first key of the last tile; then downwards
      if (warp_id == 0) {
        for (; first >= tile.begin; first -= BLOCK_N, stage.advance()) {
          k_ring.wait_empty(stage);  // hazard: products still read the tile before
          const unsigned full = k_ring.expect(stage, K8_BYTES);
          for (int panel = 0; panel < QK_PANELS; ++panel)
            tma_load(
                K_smem + stage.index * K8_BYTES + panel * BLOCK_N * ROW_BYTES, k_map, full,
                panel * ROW_BYTES, tile.k_first + first, tile.kv_head, batch);
        }
      } else {
        const unsigned char* const image =
            V_image + V8_BYTES * first_v_tile(
                                     BLOCK_N, tile.kv_head, params.kv_heads, tile.sequence,
                                     tile.k_first, params.N_kv, params.sequences);
        for (; first >= tile.begin; first -= BLOCK_N, stage.advance()) {
          v_ring.wait_empty(stage);  // hazard: as above
          const unsigned full = v_ring.expect(stage, V8_BYTES);
          bulk_load(
              V_smem + stage.index * V8_BYTES, image + (long long)first * V_ROWS, full, V8_BYTES);
        }
      }
    }
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = 64 * consumer + threadIdx.x / 32 % 4 * 16;  // of the tile's rows
  const bool leader = threadIdx.x % 128 == 0;  // releases for its warpgroup, as in CUTLASS
  const unsigned long long q = wgmma_descriptor_of_rows<ROW_BYTES>(Q_smem + consumer * Q8_BYTES);
  const unsigned long long k = wgmma_descriptor_of_rows<ROW_BYTES>(K_smem);
  const unsigned long long v = wgmma_descriptor_of_rows<KEY_BYTES>(V_smem);
  Output acc;
  Statistics m_i, l_i;  // l_i in lane 4 g, 0 in others: the epilogue adds them
  PipelineState<STAGES> stage;
  const int my_turn = TURN + consumer, next_turn = TURN + (consumer + 1) % CONSUMERS;
  // The first turn is the first consumer's.
  if (TURNS && consumer == CONSUMERS - 1) named_barrier_arrive(next_turn, 256);

  for (PipelineState<CONSUMERS> q_stage{consumer}; next(); q_stage.phase ^= 1) {
    const float of_rows =
        scale_of_rows(tile, tile.row + 64 * consumer, q_descale, k_descale, params);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m_i[i] = M_INIT;
      l_i[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    q_ring.wait_full(q_stage);

    // ---- tiles of keys that none of this consumer's rows sees: it leaves all but the last of them
    int first = last_tile_begin(tile);
    const int own_rows = min(64, tile.rows - 64 * consumer);  // none, if not above 0
    const int own_end =
        own_rows > 0 ? tile.first_pos + 64 * consumer + own_rows + params.window_right : 0;
    while (first > tile.begin && first >= own_end) {
      k_ring.wait_full(stage);
      v_ring.wait_full(stage);
      // hazard: the leader could release tiles before other warps, still in the epilogue, wait for them
      named_barrier_sync(my_turn, TURNS ? 256 : 128);
      if (leader) k_ring.release(stage);
      if (leader) v_ring.release(stage);
      if (TURNS) named_barrier_arrive(next_turn, 256);
      stage.advance();
      first -= BLOCK_N;
    }

    while (true) {
      // ---- S = Q K^T
      Scores S;
      k_ring.wait_full(stage);
      start_qk(S, q, advance_tiles(k, stage.index, K8_BYTES));
      wgmma_wait<0>();
      wgmma_registers(S);
      if (leader) k_ring.release(stage);

      // ---- masks, maxima, weights
      if (TURNS) named_barrier_sync(my_turn, 256);
      const float softmax_scale_log2 = scale_of_tile(of_rows, tile, first, k_descale, params);
      const int q_idx = tile.first_pos + warp_row + g, kv_idx = first + 2 * t;  // this lane's first
      const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
      if (first < last_pos - params.window_left ||
          first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end))
        mask(S, q_idx - kv_idx, tile.end - kv_idx, params);
      Statistics rescale;
      move_maxima_by_bits(S, m_i, rescale, softmax_scale_log2);
      Weights8 P;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 32; ++i) {
        if (HEAD_DIM > 64 || i % 3 < 2) codes_of_group(P, S, m_i, softmax_scale_log2, i);
        else weights_of_group(P, S, m_i, softmax_scale_log2, i);
      }
      if (TURNS) named_barrier_arrive(next_turn, 256);

      // ---- O_tile = P V, then acc = rescale acc + O_tile; its last column is the sum of the weights
      const float descale = descale_of_tile(tile, first, v_descale, params);
      v_ring.wait_full(stage);
      float O_tile[PART_COLUMNS / 2 + 4];  // of the last part
      add_parts(acc, rescale, P, advance_tiles(v, stage.index, V8_BYTES), O_tile, descale);
      wgmma_wait<0>();
      wgmma_registers(O_tile);
      if (leader) v_ring.release(stage);
      add_part(acc, rescale, O_tile, PARTS - 1, descale);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        l_i[i] = fmaf(l_i[i], rescale[i], O_tile[PART_COLUMNS / 2 + 2 * i]);
      stage.advance();
      first -= BLOCK_N;
      if (first < tile.begin) break;
    }
    if (leader) q_ring.release(q_stage);

    // ---- epilogue: the rows' sums, lse; divide once
    Statistics inverse;
    finish_rows(tile, warp_row, m_i, l_i, inverse, lse, packed, params);
    const float of_v = descale_of_output(tile, v_descale, params);
    inverse[0] *= of_v;
    inverse[1] *= of_v;
    store_quads(tile, warp_row, acc, inverse, O, packed, params);
  }
}
