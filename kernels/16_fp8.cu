// 16 fp8: attention in 8 bits, by consumers that take turns, and leave tiles that they do not see.
//
// Since 16_06: consumers that have their scores at the same time need the pipe of exponentials at the same
// time, and then the tensor cores. So they take turns at issuing products. And a consumer leaves tiles that
// only later rows of the block see: tiles of rows cost less where a mask or the end of a sequence cuts
// them, and 10_order.cu deals by that.
//
// Launch   16_transpose.cu; then as 10, after its 10_order.cu. See also 16_background.cu
// Shapes   as 10, in e4m3; O in half types or float32. V_image: tiles of V^T, see 16_transpose.cu.
//          descales [sequences, heads], float32: what elements are multiplied by; or null, for 1. With
//          DESCALE_ROWS [sequences, heads, blocks of so many rows or keys], not packed
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 16, pointers of 16 bytes
// Traffic  as 10, with half the bytes of Q, K, V; V is read and written once more
#define QUARTERS 1
#ifndef TURNS
#define TURNS 1  // whether consumers take turns
#endif
#include "fp8_descales.cuh"  // what scores and results are multiplied by
#include "fp8_epilogue.cuh"  // lse, O
#include "fp8_tiles.cuh"     // sizes, the two products, weights
#include "v_background.cuh"  // V^T by this launch; where a tile of it is

constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : HEAD_DIM > 64 ? 32 : 56;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : HEAD_DIM > 64 ? 160 : 152;
constexpr int TURN = 1;  // named barriers: the turns, one for each consumer
constexpr unsigned K_AT = CONSUMERS * Q8_BYTES, V_AT = K_AT + STAGES * K8_BYTES;
constexpr unsigned Q_RING_AT = V_AT + STAGES * V8_BYTES;
constexpr unsigned K_RING_AT = Q_RING_AT + Ring<CONSUMERS>::BYTES;
constexpr unsigned V_RING_AT = K_RING_AT + Ring<STAGES>::BYTES;
constexpr unsigned BACKGROUND_AT = V_RING_AT + Ring<STAGES>::BYTES;
constexpr unsigned SHARED_BYTES = BACKGROUND_AT + BACKGROUND_BYTES;

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) fp8(
    const __grid_constant__ TensorMap q_map,  // boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    unsigned char* V_image, T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const float* __restrict__ q_descale,   // [sequences, heads], or null
    const float* __restrict__ k_descale,   // [sequences, kv_heads], or null
    const float* __restrict__ v_descale,   // the same
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int4* __restrict__ schedule,     // [rounds, blocks], see next_tile
    const int rounds, const AttentionParams params BACKGROUND_PARAMETERS) {
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

  const Background background{V_image BACKGROUND_ARGUMENTS};

  // ---- producer: a thread for K, one for V and one for Q; a warp for V^T in the background
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32;
    if (warp_id == 3) background.run(dynamic_smem + BACKGROUND_AT, params);
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
        const bool has_head = background.has_head(tile, params);
        for (; first >= tile.begin; first -= BLOCK_N, stage.advance()) {
          background.wait(tile, first, has_head, params);
          v_ring.wait_empty(stage);  // hazard: as above
          const unsigned full = v_ring.expect(stage, V8_BYTES);
          bulk_load(
              V_smem + stage.index * V8_BYTES, image + (long long)first * V_ROWS, full, V8_BYTES);
        }
      }
    }
    if (warp_id == 1) background.leave(params);
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
      // hazard: the leader could release tiles that other warps, still in the epilogue, have not waited for,
      // and their wait would never end: so it hung on an H200
      named_barrier_sync(my_turn, TURNS ? 256 : 128);
      if (leader) k_ring.release(stage);
      if (leader) v_ring.release(stage);
      if (TURNS) named_barrier_arrive(next_turn, 256);
      stage.advance();
      first -= BLOCK_N;
    }

    if (TURNS) named_barrier_sync(my_turn, 256);
    k_ring.wait_full(stage);
    while (true) {
      // ---- S = Q K^T
      Scores S;
      start_qk(S, q, advance_tiles(k, stage.index, K8_BYTES));
      if (TURNS) named_barrier_arrive(next_turn, 256);
      wgmma_wait<0>();
      wgmma_registers(S);
      if (leader) k_ring.release(stage);

      // ---- masks, maxima, weights
      const float softmax_scale_log2 = scale_of_tile(of_rows, tile, first, k_descale, params);
      const int q_idx = tile.first_pos + warp_row + g, kv_idx = first + 2 * t;  // this lane's first
      const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
      if (first < last_pos - params.window_left ||
          first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end))
        mask(S, q_idx - kv_idx, tile.end - kv_idx, params);
      Statistics rescale;
      const bool moved = move_maxima_by_bits(S, m_i, rescale, softmax_scale_log2);
      if (HEAD_DIM > 128) {  // at fewer columns it lost
        if (moved) rescale_now(acc, l_i, rescale);
        rescale[0] = rescale[1] = 1.0f;  // outside of the branch, so that the compiler knows it
      }
      Weights8 P;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 32; ++i) weights_of_group(P, S, m_i, softmax_scale_log2, i);

      // ---- O_tile = P V, then acc = rescale acc + O_tile; its last column is the sum of the weights
      const float descale = descale_of_tile(tile, first, v_descale, params);
      v_ring.wait_full(stage);
      if (TURNS) named_barrier_sync(my_turn, 256);
      float O_tile[PART_COLUMNS / 2 + 4];  // of the last part
      add_parts(acc, rescale, P, advance_tiles(v, stage.index, V8_BYTES), O_tile, descale);
      PipelineState<STAGES> next_stage = stage;
      next_stage.advance();
      first -= BLOCK_N;
      if (first >= tile.begin) k_ring.wait_full(next_stage);  // while products run
      wgmma_wait<0>();
      wgmma_registers(O_tile);
      if (leader) v_ring.release(stage);
      add_part(acc, rescale, O_tile, PARTS - 1, descale);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        l_i[i] = fmaf(l_i[i], rescale[i], O_tile[PART_COLUMNS / 2 + 2 * i]);
      stage = next_stage;
      if (first < tile.begin) break;
    }
    if (TURNS) named_barrier_arrive(next_turn, 256);
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
