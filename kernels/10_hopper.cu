// 10 hopper: FlashAttention-3. One warpgroup copies, two or three compute, and all do so at the
// same time.
//
// Since 07: one instruction of one thread copies a tile (TMA), swizzles it and pads it with zeros;
// one asynchronous instruction of 128 threads multiplies from shared memory (wgmma). So the roles
// are split: a producer warpgroup issues copies and gives most of its registers to the consumers;
// the mbarriers of a ring say which stages are full and which are empty. Tensor cores and exp2 work
// at the same time, for two reasons. A consumer issues S of the next keys and O of these together,
// and computes the next weights while O is summed. And consumers take turns at issuing products,
// ping-pong, so that one has products in flight while another computes weights (Shah, Bikshandi et
// al., 2024). Each block takes one tile of rows after the other, and its key tiles from the last to the
// first. S of the next tile's first keys is computed while O is stored.
//
// Launch   grid: as many blocks as multiprocessors, packed: as tiles; block 128 (1 + BLOCK_M / 64);
//          SHARED_BYTES of dynamic shared memory
// Shapes   as 07. Q, K and V by tensor maps of {HEAD_DIM, rows, heads, batch}: boxes of 64 columns,
//          and of 64 rows of Q, BLOCK_N of K and V
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  as 07
#include "hooks.cuh"            // Tiles, as in 05; hook_* and HOOK_*: nothing, until 11
#include "hopper_epilogue.cuh"  // lse, stores of a warpgroup's rows: as in 07
#include "hopper_maxima.cuh"    // Maxima, move_maxima: scores of any size, as in 07
#include "hopper_softmax.cuh"   // masks, weights: as in 07
#include "hopper_tiles.cuh"     // sizes of tiles, which rows and keys they have: as in 05
#include "ring_continue.cuh"    // nothing, until 17
#include "tile_io.cuh"          // tiles in panels: copies by TMA, rows of zeros

#ifndef STAGES
#define STAGES 2  // tiles of K, and of V, in shared memory
#endif
#ifndef PINGPONG
#define PINGPONG 1  // 1: the consumers take turns at issuing products
#endif

constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr unsigned O_AT = CONSUMERS * Q_BYTES, K_AT = O_AT + CONSUMERS * PANEL_BYTES;
constexpr unsigned V_AT = K_AT + STAGES * TILE_BYTES;
constexpr unsigned Q_RING_AT = V_AT + STAGES * TILE_BYTES;
constexpr unsigned K_RING_AT = Q_RING_AT + Ring<CONSUMERS>::BYTES;
constexpr unsigned V_RING_AT = K_RING_AT + Ring<STAGES>::BYTES;
constexpr unsigned SHARED_BYTES = V_RING_AT + Ring<STAGES>::BYTES;
// Named barriers: the turns, one for each consumer; rows of V are cleared.
constexpr int TURN = 1, V_CLEARED = 8;  // ids 1 .. CONSUMERS, and another

// Issues S = Q K^T for the warpgroup's 64 rows, 16 columns of Q and K at a time.
template <typename T>
__device__ __forceinline__ void start_qk(Scores& S, unsigned long long q, unsigned long long k) {
  wgmma_registers(S);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i)
    wgmma_ss(T(), S, advance_columns(q, i, 64), advance_columns(k, i, BLOCK_N), i > 0);
  wgmma_commit();
}

// Issues O += P V, 16 keys at a time.
template <typename T>
__device__ __forceinline__ void start_pv(Output& O, const Weights& P, unsigned long long v) {
  wgmma_registers(O);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i) wgmma_rs(T(), O, P[i], advance_rows(v, i), true);
  wgmma_commit();
}

// Whether a score of the warp's rows exceeds its row's limit: m_i and a threshold (any_size.cuh).
// If none does, the maxima stay: the lazy rescale of FlashAttention-4. Unless both are negative,
// floats compare like their bits read as integers, so one instruction (VIMNMX3) compares two scores
// with the highest so far. A negative result may be too low, and is clamped to 0.
__device__ __forceinline__ bool exceeds_limit(
    const Scores& S, const Statistics& limit, float softmax_scale_log2) {
  bool exceeds = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int highest = __float_as_int(S[2 * i]);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      highest =
          max(max(highest, __float_as_int(S[4 * n + 2 * i])), __float_as_int(S[4 * n + 2 * i + 1]));
    exceeds |= fmaxf(__int_as_float(highest), 0.0f) * softmax_scale_log2 > limit[i];
  }
  return __any_sync(0xffffffff, exceeds);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper(
    const __grid_constant__ TensorMap q_map,  // boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,  // boxes of BLOCK_N rows
    Out<T>* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int4* __restrict__ schedule,     // [rounds, blocks], see next_tile
    const int rounds, const AttentionParams params HOOK_PARAMETERS CONTINUE_PARAMETERS) {
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
  Tile tile, done;
  int round = 0;
  int4 item = schedule[blockIdx.x];
  const auto next = [&] {  // the block's next tile of rows, by the table; false: none is left
    return next_tile(tile, item, round, rounds, schedule, cu_seqlens_q, cu_seqlens_k, params);
  };

  const auto hooks_of_tile = [&] {
    return Hooks{HOOK_ARGUMENTS tile.sequence, tile.head, tile.kv_head, tile.q_len, tile.kv_len};
  };
  const auto key_tiles_of_tile = [&] {
    return Tiles<-BLOCK_N>(  // the first keys of its key tiles, from the last to the first
        hooks_of_tile(), (tile.q_len - tile.rows) / BLOCK_M, last_tile_begin(tile), tile.begin);
  };

  // ---- producer: a thread for K, one for V and one for Q
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || warp_id == 3) return;
    const TensorMap& map = warp_id == 0 ? k_map : v_map;
    const unsigned smem = warp_id == 0 ? K_smem : V_smem;
    const Ring<STAGES> ring = warp_id == 0 ? k_ring : v_ring;
    PipelineState<CONSUMERS> q_stage;
    PipelineState<STAGES> stage;
    while (next()) {
      const int batch = packed ? 0 : tile.sequence;
      if (warp_id == 2) {
        for (int i = 0; i < CONSUMERS; ++i, q_stage.advance()) {
          q_ring.wait_empty(q_stage);  // hazard: products still read Q
          const unsigned full = q_ring.expect(q_stage, Q_BYTES);
          tma_load_panels<64, PANELS>(
              Q_smem + i * Q_BYTES, q_map, full, tile.row + 64 * i, tile.head, batch);
        }
      } else {
        auto key_tiles = key_tiles_of_tile();
        int first = key_tiles.first();
        for (; key_tiles.more(first); first = key_tiles.next(first), stage.advance()) {
          ring.wait_empty(stage);  // hazard: products still read the tile before
          const unsigned full = ring.expect(stage, TILE_BYTES);
          tma_load_panels<BLOCK_N, PANELS>(
              smem + stage.index * TILE_BYTES, map, full, tile.k_first + first, tile.kv_head,
              batch);
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
  unsigned char* const staged = dynamic_smem + O_AT + warp_row * 128;
  const unsigned long long q = wgmma_descriptor(Q_smem + consumer * Q_BYTES),
                           k = wgmma_descriptor(K_smem);
  const unsigned long long v = wgmma_descriptor(V_smem, BLOCK_N * 128);
  const int my_turn = TURN + consumer, next_turn = TURN + (consumer + 1) % CONSUMERS;
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale_log2_of(scale);
  constexpr int GROUPS = BLOCK_N / 8;  // of 8 keys, as in the accumulators' layout
  Scores S;
  Weights P;
  Output acc;
  Maxima maxima;
  Statistics l_i;  // of this lane's keys only, until the epilogue
  Statistics rescale, inverse;
  PipelineState<CONSUMERS> q_stage{consumer};
  PipelineState<STAGES> k_stage;

  const auto hooks_and_mask = [&](int first, bool partial) {                  // of the keys of S
    const int q_idx = tile.first_pos + warp_row + g, kv_idx = first + 2 * t;  // this lane's first
    hook_scores(S, hooks_of_tile(), scale, q_idx, kv_idx, partial);
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end))
      mask(S, q_idx - kv_idx, tile.end - kv_idx, params);
  };
  const auto move = [&] { return move_maxima(S, maxima, l_i, rescale, softmax_scale_log2); };
  const Continuation continuation = {CONTINUE_ARGUMENTS};
  const auto store = [&] {
    continuation.join(done, warp_row, maxima, l_i, acc, inverse, params);
    store_rows(done, warp_row, acc, inverse, staged, O, packed, params);
  };
  const auto weights = [&](int from, int to) {
    online_softmax_weights(S, maxima.m_i, l_i, softmax_scale_log2, from, to);
  };

  if (!next()) return;
  q_ring.wait_full(q_stage);
  k_ring.wait_full(k_stage);
  start_qk<T>(S, q, k);
  wgmma_wait<0>();
  // The first turn is the first consumer's.
  if (PINGPONG && consumer == CONSUMERS - 1) named_barrier_arrive(next_turn, 256);
  for (;;) {
    // ---- the first key tile of a tile of rows: S is ready
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hook_start(maxima.m_i[i], l_i[i], hooks_of_tile(), t == 0);  // M_INIT and 0
      maxima.limit[i] = maxima.m_i[i];
      maxima.base[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    wgmma_registers(S);
    if (leader) k_ring.release(k_stage);
    auto key_tiles = key_tiles_of_tile();
    int first = key_tiles.first();
    hooks_and_mask(first, key_tiles.partial(first));
    move();
    bool rescaled = false;  // acc is still empty
    weights(0, GROUPS);
    to_operand<T>(P, S, 0, GROUPS);
    if (packed && first + BLOCK_N > tile.kv_len) {  // the tile has rows of the next sequence
      v_ring.wait_full(k_stage);
      clear_rows<BLOCK_N, PANELS>(
          dynamic_smem + V_AT + k_stage.index * TILE_BYTES, tile.kv_len - first, threadIdx.x - 128,
          128 * CONSUMERS);
      // hazard: products could read rows not cleared yet
      named_barrier_sync(V_CLEARED, 128 * CONSUMERS);
    }

    // ---- one step: issue S of the next key tile and O of this one, then compute the next weights
    for (first = key_tiles.next(first); key_tiles.more(first); first = key_tiles.next(first)) {
      const auto v_stage = k_stage;  // V is one tile behind K
      k_stage.advance();
      k_ring.wait_full(k_stage);
      if (PINGPONG) named_barrier_sync(my_turn, 256);
      start_qk<T>(S, q, advance_tiles(k, k_stage.index, TILE_BYTES));
      wgmma_registers(acc);
      if (rescaled) rescale_output(acc, rescale);  // while the products of S run
      v_ring.wait_full(v_stage);
      start_pv<T>(acc, P, advance_tiles(v, v_stage.index, TILE_BYTES));
      if (PINGPONG) named_barrier_arrive(next_turn, 256);
      hook_prefetch<16, BLOCK_N>(hooks_of_tile(), tile.first_pos + warp_row, first);
      wgmma_wait<1>();
      wgmma_registers(S);
      if (leader) k_ring.release(k_stage);
      hooks_and_mask(first, key_tiles.partial(first));
      rescaled = false;
      if (exceeds_limit(S, maxima.limit, softmax_scale_log2)) rescaled = move();
      weights(0, GROUPS / 2);
      wgmma_wait<0>();
      wgmma_registers(acc);
      if (leader) v_ring.release(v_stage);
      to_operand<T>(P, S, 0, GROUPS / 2);
      weights(GROUPS / 2, GROUPS);
      to_operand<T>(P, S, GROUPS / 2, GROUPS);
    }

    // ---- O of the last key tile, and S of the next tile's first one, which runs while O is stored
    if (leader) q_ring.release(q_stage);
    if (rescaled) rescale_output(acc, rescale);
    done = tile;
    // base: not 0 where scores are large, see any_size.cuh
    const Statistics m_i = {maxima.m_i[0] + maxima.base[0], maxima.m_i[1] + maxima.base[1]};
    finish_rows(done, warp_row, m_i, l_i, inverse, lse, packed, params);
    if (!next()) break;
    const auto v_stage = k_stage;
    v_ring.wait_full(v_stage);
    start_pv<T>(acc, P, advance_tiles(v, v_stage.index, TILE_BYTES));
    q_stage.phase ^= 1;  // the same stage, one phase on: a consumer has a Q of its own
    k_stage.advance();
    q_ring.wait_full(q_stage);
    k_ring.wait_full(k_stage);
    start_qk<T>(S, q, advance_tiles(k, k_stage.index, TILE_BYTES));
    wgmma_wait<1>();
    wgmma_registers(acc);
    if (leader) v_ring.release(v_stage);
    store();
    wgmma_wait<0>();
  }
  v_ring.wait_full(k_stage);
  start_pv<T>(acc, P, advance_tiles(v, k_stage.index, TILE_BYTES));
  wgmma_wait<0>();
  wgmma_registers(acc);
  store();
}
