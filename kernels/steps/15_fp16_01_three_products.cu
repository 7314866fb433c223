// 15, step 1, three fp16 products: 10 in float32, by fp16.
//
// A first kernel scales each tile of Q, K or V and splits it into hi and lo, two fp16 arrays, as
// 15_fp16x3.cu says. A consumer waits for S, computes the weights, and waits for O, which is added to
// acc. In between, only the other consumer has products in flight.
//
// Launch, shapes, needs and traffic as in 15_fp16x3.cu
#include "fp16x3_split.cuh"     // the first launch
#include "fp16x3_tiles.cuh"     // sizes, three products, the softmax
#include "hooks.cuh"            // nothing, until the library adds something (11)
#include "hopper_epilogue.cuh"  // lse, stores of a warpgroup's rows
#include "tile_io.cuh"          // tiles in panels: copies by TMA, rows of zeros

#ifndef PINGPONG
#define PINGPONG 1  // 1: the consumers take turns at issuing products
#endif

constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr unsigned KV_BYTES = 2 * TILE_BYTES;  // hi and lo of a tile of K or V
constexpr unsigned KV_AT = CONSUMERS * 2 * Q_BYTES, Q_RING_AT = KV_AT + STAGES * KV_BYTES;
constexpr unsigned KV_RING_AT = Q_RING_AT + Ring<CONSUMERS>::BYTES;
constexpr unsigned SHARED_BYTES = KV_RING_AT + Ring<STAGES>::BYTES;
// Named barriers: the turns, one for each consumer; rows of V are cleared.
constexpr int TURN = 1, V_CLEARED = 8;

extern "C" __global__ void __launch_bounds__(THREADS, 1) fp16x3(
    const __grid_constant__ TensorMap q_map,  // of hi and lo: boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,  // boxes of BLOCK_N rows
    const int* __restrict__ q_exponents, const int* __restrict__ kv_exponents,
    float* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int4* __restrict__ schedule,     // [rounds, blocks], see next_tile
    const int rounds, const AttentionParams params HOOK_PARAMETERS) {
  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), KV_smem = Q_smem + KV_AT;
  const Ring<CONSUMERS> q_ring(Q_smem + Q_RING_AT);  // a stage for each consumer
  const Ring<STAGES> kv_ring(Q_smem + KV_RING_AT);
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const bool packed = cu_seqlens_q != nullptr;
  if (threadIdx.x == 0) {
    q_ring.init(1);
    kv_ring.init(CONSUMERS);
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised
  Tile tile;
  int round = 0;
  int4 item = schedule[blockIdx.x];
  const auto next = [&] {
    const bool found =
        next_tile(tile, item, round, rounds, schedule, cu_seqlens_q, cu_seqlens_k, params);
    tile.begin = tile.begin / BLOCK_N * BLOCK_N;  // key tiles are those that have an exponent
    return found;
  };
  const auto hooks_of_tile = [&] {
    return Hooks{HOOK_ARGUMENTS tile.sequence, tile.head, tile.kv_head, tile.q_len, tile.kv_len};
  };
  const auto key_tiles_of_tile = [&] {
    return Tiles<-BLOCK_N>(
        hooks_of_tile(), (tile.q_len - tile.rows) / BLOCK_M, last_tile_begin(tile), tile.begin);
  };

  // ---- producer: a thread for K and V, which take turns in the ring, and one for Q
  PipelineState<STAGES> stage;
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || warp_id > 1) return;
    PipelineState<CONSUMERS> q_stage;
    while (next()) {
      const int hi = packed ? 0 : 2 * tile.sequence, lo = hi + 1;
      if (warp_id == 1) {
        for (int i = 0; i < CONSUMERS; ++i, q_stage.advance()) {
          q_ring.wait_empty(q_stage);  // hazard: products still read Q
          const unsigned full = q_ring.expect(q_stage, 2 * Q_BYTES);
          const unsigned target = Q_smem + 2 * i * Q_BYTES;
          const int row = tile.row + 64 * i;
          tma_load_panels<64, PANELS>(target, q_map, full, row, tile.head, hi);
          tma_load_panels<64, PANELS>(target + Q_BYTES, q_map, full, row, tile.head, lo);
        }
      } else {
        auto key_tiles = key_tiles_of_tile();
        for (int first = key_tiles.first(); key_tiles.more(first); first = key_tiles.next(first))
          for (int i = 0; i < 2; ++i, stage.advance()) {
            kv_ring.wait_empty(stage);  // hazard: products still read the tile before
            const unsigned full = kv_ring.expect(stage, KV_BYTES);
            const TensorMap& map = i == 0 ? k_map : v_map;
            const unsigned target = KV_smem + stage.index * KV_BYTES;
            const int row = tile.k_first + first;
            tma_load_panels<BLOCK_N, PANELS>(target, map, full, row, tile.kv_head, hi);
            tma_load_panels<BLOCK_N, PANELS>(target + TILE_BYTES, map, full, row, tile.kv_head, lo);
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
  const unsigned long long q = wgmma_descriptor(Q_smem + 2 * consumer * Q_BYTES);
  Scores S;
  Weights P_hi, P_lo;
  Output acc, O_tile;
  Statistics m_i, l_i;  // l_i of this lane's keys only, until the epilogue

  const auto hooks_and_mask = [&](int first, bool partial, float scale) {     // of the keys of S
    const int q_idx = tile.first_pos + warp_row + g, kv_idx = first + 2 * t;  // this lane's first
    hook_scores(S, hooks_of_tile(), scale, q_idx, kv_idx, partial);
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end))
      mask(S, q_idx - kv_idx, tile.end - kv_idx, params);
  };
  const auto take_turn = [&] {
    if (PINGPONG) named_barrier_sync(TURN + consumer, 256);
  };
  const auto pass_turn = [&] {
    if (PINGPONG) named_barrier_arrive(consumer + 1 == CONSUMERS ? TURN : TURN + consumer + 1, 256);
  };
  int q_exponent, kv_index;  // the index of the first exponent of K and V in kv_exponents
  int2 exponent;             // of K and V of these keys
  const auto start_scores = [&](int first) {
    const int2* const exponents = reinterpret_cast<const int2*>(kv_exponents) + kv_index;
    exponent = first < tile.kv_len ? exponents[first / BLOCK_N] : make_int2(0, 0);
    kv_ring.wait_full(stage);
    start_qk(S, q, wgmma_descriptor(KV_smem + stage.index * KV_BYTES));
  };
  // Of S, whose tile's scale becomes part of the softmax's: not 0, as 0 times -inf is NaN.
  const auto compute_weights = [&](int first, bool partial) {
    const int unscale = min(max(-(q_exponent + exponent.x), -126), 127);
    const float scale = fminf(fmaxf(params.softmax_scale * power_of_two(unscale), 1e-37f), 3e38f);
    const float softmax_scale_log2 = scale_log2_of(scale);
    wgmma_wait<0>();
    wgmma_registers(S);
    if (leader) kv_ring.release(stage);
    stage.advance();
    hooks_and_mask(first, partial, scale);
    online_softmax_rescale(S, m_i, l_i, acc, softmax_scale_log2);
    online_softmax_weights(S, m_i, l_i, softmax_scale_log2, 0, BLOCK_N / 8);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        split(
            S[4 * n + 2 * i], S[4 * n + 2 * i + 1], P_hi[n / 2][n % 2 * 2 + i],
            P_lo[n / 2][n % 2 * 2 + i]);
  };
  const auto start_output = [&] {
    kv_ring.wait_full(stage);
    const unsigned v = KV_smem + stage.index * KV_BYTES;
    start_pv(O_tile, P_hi, P_lo, wgmma_descriptor(v, BLOCK_N * 128));
  };
  const auto clear_past_end = [&](int first) {
    if (!packed || first + BLOCK_N <= tile.kv_len) return;  // no row of the next sequence
    kv_ring.wait_full(stage);
    const int rows = tile.kv_len - first;
    unsigned char* const tile_smem = dynamic_smem + KV_AT + stage.index * KV_BYTES;
    clear_rows<BLOCK_N, PANELS>(tile_smem, rows, threadIdx.x - 128, 128 * CONSUMERS);
    clear_rows<BLOCK_N, PANELS>(tile_smem + TILE_BYTES, rows, threadIdx.x - 128, 128 * CONSUMERS);
    // hazard: products could read rows not cleared yet
    named_barrier_sync(V_CLEARED, 128 * CONSUMERS);
  };
  const auto add_output = [&](const PipelineState<STAGES>& v_stage, int v_exponent) {
    wgmma_registers(O_tile);
    if (leader) kv_ring.release(v_stage);
    const float of_tile = power_of_two(-v_exponent);
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = fmaf(of_tile, O_tile[i], acc[i]);
  };
  if (consumer == CONSUMERS - 1) pass_turn();  // the first turn is the first consumer's

  for (PipelineState<CONSUMERS> q_stage{consumer}; next(); q_stage.phase ^= 1) {
    const int first_row = tile.q_len - tile.rows, row_tile = first_row / Q_ROWS + consumer;
    const int q_index = exponent_index(
        Q_ROWS, row_tile, tile.head, params.heads, tile.sequence, tile.row - first_row, params.N,
        params.sequences);
    q_exponent = tile.rows > Q_ROWS * consumer ? q_exponents[q_index] : 0;  // 0: without a row
    kv_index = exponent_index(
        BLOCK_N, 0, tile.kv_head, params.kv_heads, tile.sequence, tile.k_first, params.N_kv,
        params.sequences);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hook_start(m_i[i], l_i[i], hooks_of_tile(), t == 0);  // M_INIT and 0
      m_i[i] -= WEIGHT_EXPONENT;
      l_i[i] *= power_of_two(WEIGHT_EXPONENT);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    q_ring.wait_full(q_stage);

    auto key_tiles = key_tiles_of_tile();
    for (int first = key_tiles.first(); key_tiles.more(first); first = key_tiles.next(first)) {
      take_turn();
      start_scores(first);
      pass_turn();
      compute_weights(first, key_tiles.partial(first));
      clear_past_end(first);
      take_turn();
      start_output();
      pass_turn();
      wgmma_wait<0>();
      add_output(stage, exponent.y);
      stage.advance();
    }
    if (leader) q_ring.release(q_stage);

    // ---- epilogue: the rows' sums; divide once
    Statistics inverse;
    finish_rows(tile, warp_row, m_i, l_i, inverse, lse, packed, params);
    float* const out = O + (packed ? 0 : tile.sequence) * params.o.batch +
                       (long long)(tile.row + warp_row + g) * params.o.row +
                       tile.head * params.o.head + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (warp_row + g + 8 * i >= tile.rows) continue;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n)
        *reinterpret_cast<float2*>(out + 8 * i * params.o.row + 8 * n) =
            make_float2(acc[4 * n + 2 * i] * inverse[i], acc[4 * n + 2 * i + 1] * inverse[i]);
    }
  }
}
