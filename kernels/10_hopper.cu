// 10 hopper: FlashAttention-3. One warpgroup copies, two or three compute, and all do so at the
// same time.
//
// Since 07: one instruction of one thread copies a tile (TMA), swizzles it and pads it with zeros;
// one asynchronous instruction of 128 threads multiplies from shared memory (wgmma). So the roles
// are split: a producer warpgroup starts copies and gives most of its registers to the consumers;
// mbarriers say which stages are full and which are empty. Tensor cores and exp2 work at the same
// time, for two reasons. A consumer starts S of the next keys and O of these together, and computes
// the next weights while O is summed. And consumers take turns at starting products, so that one
// has products in flight while another computes weights (Shah, Bikshandi et al., 2024). Each block
// takes one tile of rows after the other; S of the next tile's first keys is computed while O is
// stored.
//
// Launch   grid: as many blocks as multiprocessors, packed: as tiles; block 128 (1 + BLOCK_M / 64);
//          SHARED_BYTES of dynamic shared memory
// Shapes   as 07. Q, K and V by tensor maps of {HEAD_DIM, rows, heads, batch}: boxes of 64 columns,
//          and of 64 rows of Q, BLOCK_N of K and V
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  as 07
// Sizes of tiles and which rows and keys they have, as in 05; masks, weights, lse and stores of a
// warpgroup's rows, as in 07.
#include "hopper_rows.cuh"
#include "hooks.cuh"  // nothing, until the library adds something (11)

#ifndef STAGES
#define STAGES 2  // tiles of K, and of V, in shared memory
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8  // m_i follows only maxima that exceed it by more, in powers of 2
#endif
#ifndef PINGPONG
#define PINGPONG 1  // 1: the consumers take turns in starting products
#endif

constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 232 : 160;
constexpr float LARGE = 0x1p13f;  // of a float from here on, 2^-11 is rounded away
constexpr unsigned O_AT = CONSUMERS * Q_BYTES, K_AT = O_AT + CONSUMERS * PANEL_BYTES;
constexpr unsigned V_AT = K_AT + STAGES * TILE_BYTES;
constexpr unsigned BARRIERS_AT = V_AT + STAGES * TILE_BYTES;
constexpr unsigned SHARED_BYTES = BARRIERS_AT + 8 * (2 * CONSUMERS + 4 * STAGES);

// Starts S = Q K^T for the warpgroup's 64 rows. The next 16 columns are 32 bytes further, the next
// 64 one panel.
template <typename T>
__device__ __forceinline__ void start_qk(Scores& S, unsigned long long q, unsigned long long k) {
  wgmma_registers(S);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 16; ++i)
    wgmma_ss(
        T(), S, q + (i / 4 * PANEL_BYTES + i % 4 * 32) / 16,
        k + (i / 4 * BLOCK_N * 128 + i % 4 * 32) / 16, i > 0);
  wgmma_commit();
}

// Starts O += P V. The next 16 keys are 16 rows further.
template <typename T>
__device__ __forceinline__ void start_pv(Output& O, const Weights& P, unsigned long long v) {
  wgmma_registers(O);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; ++i) wgmma_rs(T(), O, P[i], v + i * 16 * 128 / 16, true);
  wgmma_commit();
}

// Whether a score of the warp's rows exceeds its limit, so that weights could overflow: the lazy
// rescale of FlashAttention-4. Unless both are negative, floats compare like their bits read as
// integers, so one instruction (VIMNMX3) compares two scores with the highest so far. A negative
// result may be too low, and is clamped to 0.
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

// The rows' maxima so far, in units of log2: m_i + base. One of them is 0: m_i where scores are so
// large that rounding it would matter. See subtract_maxima in 07.
struct Maxima {
  Statistics m_i, base;
  Statistics limit;  // a score above it moves the maximum; where they are large, any does
};

// Moves the maxima if a score exceeds its limit, for scores of any size. Returns whether one does;
// everything so far then has to be multiplied by `rescale`.
__device__ __forceinline__ bool move_maxima(
    Scores& S, Maxima& maxima, Statistics& l_i, Statistics& rescale, float softmax_scale_log2) {
  Statistics m_new;
  bool exceeds = false, large = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s_max = NEG_INF;  // of this lane's keys
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      s_max = fmaxf(s_max, fmaxf(S[4 * n + 2 * i], S[4 * n + 2 * i + 1]));
    m_new[i] = s_max * softmax_scale_log2;
    exceeds |= m_new[i] > maxima.limit[i];
  }
  if (!__any_sync(0xffffffff, exceeds)) return false;  // negative scores, clamped to 0 before
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float m_old = maxima.m_i[i] + maxima.base[i];
    m_new[i] = row_allreduce(fmaxf(m_old, m_new[i]), [](float a, float b) { return fmaxf(a, b); });
    large |= m_new[i] != M_INIT && fabsf(m_new[i]) >= LARGE;
    rescale[i] = exp2f(m_old - m_new[i]);  // 0 at the first key; 1 if the maximum stays
    l_i[i] *= rescale[i];
  }
  large = __any_sync(0xffffffff, large);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    maxima.m_i[i] = large ? 0.0f : m_new[i];
    maxima.base[i] = large ? m_new[i] : 0.0f;
    // exceeds_limit takes scores below 0 for 0: that is the limit if weights up to it fit float16.
    const float limit = fmaxf(m_new[i] + RESCALE_THRESHOLD, fminf(m_new[i] + 15.0f, 0.0f));
    maxima.limit[i] = large ? NEG_INF : limit;
  }
  if (!large) return true;
  const float inverse = __frcp_rn(softmax_scale_log2);
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; ++i)
    S[i] = (__fmul_rn(S[i], softmax_scale_log2) - m_new[i / 2 % 2]) * inverse;
  return true;
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
    const int* __restrict__ schedule,      // [rounds, blocks, 4], see next_tile
    const int rounds, const AttentionParams params HOOK_PARAMETERS) {
  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + K_AT,
                 V_smem = Q_smem + V_AT;
  const unsigned q_full = Q_smem + BARRIERS_AT;  // one for each consumer
  const unsigned q_empty = q_full + 8 * CONSUMERS;
  const unsigned k_full = q_empty + 8 * CONSUMERS;  // one for each stage
  const unsigned k_empty = k_full + 8 * STAGES;
  const unsigned v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const bool packed = cu_seqlens_q != nullptr;
  if (threadIdx.x == 0) {
    for (int i = 0; i < CONSUMERS; ++i) {
      mbarrier_init(q_full + 8 * i, 1);
      mbarrier_init(q_empty + 8 * i, 1);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(k_full + 8 * stage, 1);
      mbarrier_init(v_full + 8 * stage, 1);
      mbarrier_init(k_empty + 8 * stage, CONSUMERS);
      mbarrier_init(v_empty + 8 * stage, CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised
  Tile tile, done;
  int round = 0;
  const int4* const items = reinterpret_cast<const int4*>(schedule);
  int4 item = items[blockIdx.x];
  const auto next = [&] {
    return next_tile(tile, item, round, rounds, items, cu_seqlens_q, cu_seqlens_k, params);
  };

  const auto hooks_of_tile = [&] {
    return Hooks{HOOK_ARGUMENTS tile.sequence, tile.head, tile.kv_head, tile.q_len, tile.kv_len};
  };
  const auto keys_of_tile = [&] {
    return KeyTiles<-BLOCK_N>(
        hooks_of_tile(), (tile.q_len - tile.rows) / BLOCK_M, last_tile_begin(tile), tile.begin);
  };

  // ---- producer: a thread for K, one for V and one for Q. `step` counts key tiles
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || warp_id == 3) return;
    const TensorMap& map = warp_id == 0 ? k_map : v_map;
    const unsigned smem = warp_id == 0 ? K_smem : V_smem, full = warp_id == 0 ? k_full : v_full;
    const unsigned empty = full + 8 * STAGES;
    for (int step = 0, tiles = 0; next(); ++tiles) {
      const int batch = packed ? 0 : tile.sequence;
      for (int i = 0; warp_id == 2 && i < CONSUMERS; ++i) {
        mbarrier_wait(q_empty + 8 * i, (tiles & 1) ^ 1);  // hazard: products still read Q
        mbarrier_arrive_expect_tx(q_full + 8 * i, Q_BYTES);
        tma_load_panels<64>(
            Q_smem + i * Q_BYTES, q_map, q_full + 8 * i, tile.row + 64 * i, tile.head, batch);
      }
      for (auto keys = keys_of_tile(); warp_id != 2 && keys.more(); keys.advance(), ++step) {
        const int stage = step % STAGES;
        mbarrier_wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);  // hazard: products read it
        mbarrier_arrive_expect_tx(full + 8 * stage, TILE_BYTES);
        tma_load_panels<BLOCK_N>(
            smem + stage * TILE_BYTES, map, full + 8 * stage, tile.k_first + keys.first(),
            tile.kv_head, batch);
      }
    }
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, lane_id = threadIdx.x % 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_row = 64 * consumer + threadIdx.x / 32 % 4 * 16;  // of the tile's rows
  const bool leader = threadIdx.x % 128 == 0;                      // arrives for its warpgroup
  unsigned char* const staged = dynamic_smem + O_AT + (threadIdx.x / 32 - 4) * 16 * 128;
  const unsigned long long q = wgmma_descriptor(Q_smem + consumer * Q_BYTES),
                           k = wgmma_descriptor(K_smem);
  const unsigned long long v = wgmma_descriptor(V_smem, BLOCK_N * 128);
  const int my_turn = 1 + consumer, next_turn = 1 + (consumer + 1) % CONSUMERS;  // named barriers
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale_log2_of(scale);
  constexpr int GROUPS = BLOCK_N / 8;  // of 8 keys, as in the accumulators' layout
  Scores S;
  Weights P;
  Output acc;
  Maxima maxima;
  Statistics l_i;  // of this lane's keys only, until the epilogue
  Statistics rescale, inverse;
  int step = 0, tiles = 0;

  const auto modify_and_mask = [&](const KeyTiles<-BLOCK_N>& keys) {
    const int first = keys.first();  // of the keys of S
    modify<2, BLOCK_N / 4>(
        hooks_of_tile(), scale, 1.0f,
        [&](int i, int j) -> float& { return S[4 * (j / 2) + 2 * i + j % 2]; },
        [&](int i) { return tile.first_pos + warp_row + g + 8 * i; },
        [&](int j) { return first + 2 * t + j / 2 * 8 + j % 2; }, keys.partial());
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, tile.first_pos + warp_row + g - col_idx, tile.end - col_idx, params);
    }
  };
  const auto move = [&] { return move_maxima(S, maxima, l_i, rescale, softmax_scale_log2); };
  const auto store = [&] { store_rows(done, warp_row, acc, inverse, staged, O, packed, params); };
  const auto weights = [&](int from, int to) {
    online_softmax_weights(S, maxima.m_i, l_i, softmax_scale_log2, from, to);
  };

  if (!next()) return;
  mbarrier_wait(q_full + 8 * consumer, 0);
  mbarrier_wait(k_full, 0);
  start_qk<T>(S, q, k);
  wgmma_wait<0>();
  // The first turn is the first consumer's.
  if (PINGPONG && consumer == CONSUMERS - 1) named_barrier_arrive(next_turn, 256);
  for (;;) {
    // ---- a tile's first keys: S is ready
    const float m_first = first_maximum(hooks_of_tile());
    maxima.m_i[0] = maxima.m_i[1] = maxima.limit[0] = maxima.limit[1] = m_first;
    l_i[0] = l_i[1] = t == 0 ? first_sum(hooks_of_tile()) : 0.0f;
    maxima.base[0] = maxima.base[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    wgmma_registers(S);
    if (leader) mbarrier_arrive(k_empty + 8 * (step % STAGES));
    auto keys = keys_of_tile();
    modify_and_mask(keys);
    move();
    bool rescaled = false;  // acc is still empty
    weights(0, GROUPS);
    to_operand<T>(P, S, 0, GROUPS);
    if (packed && keys.first() + BLOCK_N > tile.kv_len) {  // the tile has rows of the next sequence
      mbarrier_wait(v_full + 8 * (step % STAGES), step / STAGES & 1);
      clear_rows<128>(dynamic_smem + V_AT + step % STAGES * TILE_BYTES, tile.kv_len - keys.first());
      named_barrier_sync(8, 128 * CONSUMERS);  // hazard: products could read rows not cleared yet
    }

    // ---- one step: start S of the next key tile and O of this one, then compute the next weights
    for (keys.advance(); keys.more(); keys.advance()) {
      const int v_stage = step % STAGES, v_parity = step / STAGES & 1;
      ++step;
      const int stage = step % STAGES;
      mbarrier_wait(k_full + 8 * stage, step / STAGES & 1);
      if (PINGPONG) named_barrier_sync(my_turn, 256);
      start_qk<T>(S, q, k + stage * (TILE_BYTES / 16));
      wgmma_registers(acc);
      if (rescaled) rescale_output(acc, rescale);  // while the products of S run
      mbarrier_wait(v_full + 8 * v_stage, v_parity);
      start_pv<T>(acc, P, v + v_stage * (TILE_BYTES / 16));
      if (PINGPONG) named_barrier_arrive(next_turn, 256);
      hook_prefetch<16, BLOCK_N>(hooks_of_tile(), tile.first_pos + warp_row, keys.first());
      wgmma_wait<1>();
      wgmma_registers(S);
      if (leader) mbarrier_arrive(k_empty + 8 * stage);
      modify_and_mask(keys);
      rescaled = exceeds_limit(S, maxima.limit, softmax_scale_log2) && move();
      weights(0, GROUPS / 2);
      wgmma_wait<0>();
      wgmma_registers(acc);
      if (leader) mbarrier_arrive(v_empty + 8 * v_stage);
      to_operand<T>(P, S, 0, GROUPS / 2);
      weights(GROUPS / 2, GROUPS);
      to_operand<T>(P, S, GROUPS / 2, GROUPS);
    }

    // ---- the last keys' O, and S of the next tile's first keys, which run while O is stored
    if (leader) mbarrier_arrive(q_empty + 8 * consumer);
    if (rescaled) rescale_output(acc, rescale);
    done = tile;
    const Statistics m_i = {maxima.m_i[0] + maxima.base[0], maxima.m_i[1] + maxima.base[1]};
    finish_rows(done, warp_row, m_i, l_i, inverse, lse, packed, params);  // O is still in flight
    if (!next()) break;
    const int v_stage = step % STAGES;
    mbarrier_wait(v_full + 8 * v_stage, step / STAGES & 1);
    start_pv<T>(acc, P, v + v_stage * (TILE_BYTES / 16));
    ++step;
    ++tiles;
    mbarrier_wait(q_full + 8 * consumer, tiles & 1);
    mbarrier_wait(k_full + 8 * (step % STAGES), step / STAGES & 1);
    start_qk<T>(S, q, k + (step % STAGES) * (TILE_BYTES / 16));
    wgmma_wait<1>();
    wgmma_registers(acc);
    if (leader) mbarrier_arrive(v_empty + 8 * v_stage);
    store();
    wgmma_wait<0>();
  }
  mbarrier_wait(v_full + 8 * (step % STAGES), step / STAGES & 1);
  start_pv<T>(acc, P, v + (step % STAGES) * (TILE_BYTES / 16));
  wgmma_wait<0>();
  wgmma_registers(acc);
  store();
}
