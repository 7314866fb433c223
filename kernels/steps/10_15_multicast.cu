// 10, step 15, multicast: two blocks of a cluster share K and V, beside 10's own climb.
//
// Since step 14: two blocks take neighbouring tiles of rows of one head. Each loads half of a tile
// of K or V, and TMA writes it into the shared memory of both. A stage is empty when the consumers
// of both have left it, since the other block's copies fill it too. Both process the keys that
// either needs.
// It loses: on an H200, at N = 4096 and 16384, it is 0.96 to 1.00 times as fast as 10. We suspect
// that L2 delivers K and V in time. With .release.cluster (below), 0.67 to 0.75.
//
// Launch   grid: as many blocks as multiprocessors, two in a cluster; block 128 (1 + BLOCK_M / 64);
//          SHARED_BYTES of dynamic shared memory
// Shapes   as 07, not packed. Q, K and V by tensor maps of {HEAD_DIM, rows, heads, batch}: boxes of
//          64 columns, and of 64 rows of Q, BLOCK_N / 2 of K and V
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  of K and V, from the L2 cache, half of 07's
#include "hopper_epilogue.cuh"  // lse, stores of a warpgroup's rows: as in 07
#include "hopper_softmax.cuh"   // masks, weights: as in 07
#include "hopper_tiles.cuh"     // sizes of tiles, which rows and keys they have: as in 05
#include "tile_io.cuh"          // tiles in panels: copies by TMA, rows of zeros

#ifndef STAGES
#define STAGES 2  // tiles of K, and of V, in shared memory
#endif
#ifndef RESCALE_THRESHOLD
#define RESCALE_THRESHOLD 8  // m_i follows only maxima that exceed it by more, in powers of 2
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
constexpr int TURN = 1;  // named barriers: the turns, one for each consumer
constexpr int BLOCKS = 2,
              HALF = BLOCK_N / BLOCKS;  // of a cluster; the rows of K or V that each copies

// The address of what lies at the same place in another block of the cluster.
__device__ __forceinline__ unsigned in_block(unsigned rank, unsigned address) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// An arrival at an mbarrier of any block of the cluster. Not .release.cluster: that waits, by
// MEMBAR.ALL.GPU, for writes that the other block may read. Consumers have none: they only read.
__device__ __forceinline__ void cluster_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As tma_load, into all blocks of the cluster: the bytes, and their count, go to the same places in
// each.
__device__ __forceinline__ void tma_multicast(
    unsigned target, const TensorMap& map, unsigned barrier, int x, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(row), "r"(head), "r"(batch),
      "h"(static_cast<unsigned short>((1 << BLOCKS) - 1))
      : "memory");
}

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

// Whether a score of the warp's rows exceeds m_i by so much that weights could overflow, the lazy
// rescale of FlashAttention-4. Unless both are negative, floats compare like their bits read as
// integers, so one instruction (VIMNMX3) compares two scores with the highest so far. A negative
// result may be too low, and is clamped to 0.
__device__ __forceinline__ bool exceeds_maxima(
    const Scores& S, const Statistics& m_i, float softmax_scale_log2) {
  bool exceeds = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int highest = __float_as_int(S[2 * i]);
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
      highest =
          max(max(highest, __float_as_int(S[4 * n + 2 * i])), __float_as_int(S[4 * n + 2 * i + 1]));
    exceeds |=
        fmaxf(__int_as_float(highest), 0.0f) * softmax_scale_log2 > m_i[i] + RESCALE_THRESHOLD;
  }
  return __any_sync(0xffffffff, exceeds);
}

template <typename T>
__global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) hopper(
    const __grid_constant__ TensorMap q_map,  // boxes of 64 rows
    const __grid_constant__ TensorMap k_map,  // boxes of HALF rows
    const __grid_constant__ TensorMap v_map,  // boxes of HALF rows
    T* __restrict__ O,
    float* __restrict__ lse,               // [batch, heads, N], packed [heads, tokens]; or null
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1], where each begins; null: not packed
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const int4* __restrict__ schedule,     // [rounds, clusters], of tiles of BLOCKS * BLOCK_M rows
    const int rounds, const AttentionParams params) {
  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned Q_smem = smem_address(dynamic_smem), K_smem = Q_smem + K_AT,
                 V_smem = Q_smem + V_AT;
  const Ring<CONSUMERS> q_ring(Q_smem + Q_RING_AT);  // a stage for each consumer
  const Ring<STAGES> k_ring(Q_smem + K_RING_AT), v_ring(Q_smem + V_RING_AT);
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  constexpr bool packed = false;
  if (threadIdx.x == 0) {
    q_ring.init(1);
    k_ring.init(BLOCKS * CONSUMERS);
    v_ring.init(BLOCKS * CONSUMERS);
    mbarrier_init_fence();
  }
  cluster_sync();  // hazard: others, and their copies, could use mbarriers that are not initialised
  const int rank = blockIdx.x % BLOCKS, clusters = gridDim.x / BLOCKS;
  Tile tile, done;
  int round = 0;
  int4 item = schedule[blockIdx.x / BLOCKS];
  const auto next = [&] {  // of the cluster's tile, this block's rows, maybe none, and all its keys
    if (round == rounds || item.w < 0) return false;  // entries without a tile come last
    tile.sequence = item.x, tile.head = item.y, tile.kv_head = item.z;
    set_rows(tile, item.w, cu_seqlens_q, cu_seqlens_k, params);
    const int rows = min(BLOCKS * BLOCK_M, tile.rows), row = item.w + rank * BLOCK_M;
    set_keys(tile, item.w, tile.q_len, params);
    tile.end = min(tile.first_pos + rows + params.window_right, tile.kv_len);
    tile.first_pos += rank * BLOCK_M;
    set_rows(tile, row, cu_seqlens_q, cu_seqlens_k, params);
    if (++round < rounds) item = schedule[round * clusters + blockIdx.x / BLOCKS];
    return true;
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
      if (warp_id == 2) {
        for (int i = 0; i < CONSUMERS; ++i, q_stage.advance()) {
          q_ring.wait_empty(q_stage);  // hazard: products still read Q
          const unsigned full = q_ring.expect(q_stage, Q_BYTES);
          tma_load_panels<64, PANELS>(
              Q_smem + i * Q_BYTES, q_map, full, tile.row + 64 * i, tile.head, tile.sequence);
        }
      } else {
        for (int first = last_tile_begin(tile); first >= tile.begin;
             first -= BLOCK_N, stage.advance()) {
          ring.wait_empty(stage);  // hazard: products of both blocks still read the tile before
          const unsigned full = ring.expect(stage, TILE_BYTES);
          for (int panel = 0; panel < PANELS; ++panel)
            tma_multicast(
                smem + stage.index * TILE_BYTES + (panel * BLOCK_N + rank * HALF) * 128, map, full,
                panel * PANEL_COLUMNS, first + rank * HALF, tile.kv_head, tile.sequence);
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
  const int leader_to = threadIdx.x % 128;     // the block that this thread signals, for K and V
  unsigned char* const staged = dynamic_smem + O_AT + warp_row * 128;
  const unsigned long long q = wgmma_descriptor(Q_smem + consumer * Q_BYTES),
                           k = wgmma_descriptor(K_smem);
  const unsigned long long v = wgmma_descriptor(V_smem, BLOCK_N * 128);
  const int my_turn = TURN + consumer, next_turn = TURN + (consumer + 1) % CONSUMERS;
  const float scale = fmaxf(params.softmax_scale, 1e-30f);  // 0 times -inf would be NaN
  const float softmax_scale_log2 = scale * LOG2_E;
  constexpr int GROUPS = BLOCK_N / 8;  // of 8 keys, as in the accumulators' layout
  Scores S;
  Weights P;
  Output acc;
  Statistics m_i, l_i;  // m_i in units of log2; l_i of this lane's keys only, until the epilogue
  Statistics rescale, inverse;
  PipelineState<CONSUMERS> q_stage{consumer};
  PipelineState<STAGES> k_stage;
  int first;  // of the keys of S

  const auto mask_edges = [&] {
    const int last_pos = tile.first_pos + min(BLOCK_M, tile.rows) - 1;
    if (first < last_pos - params.window_left ||
        first + BLOCK_N > min(tile.first_pos + params.window_right + 1, tile.end)) {
      const int col_idx = first + 2 * t;  // of this lane's first key
      mask(S, tile.first_pos + warp_row + g - col_idx, tile.end - col_idx, params);
    }
  };
  const auto release = [&](const Ring<STAGES>& ring, const PipelineState<STAGES>& stage) {
    if (leader_to < BLOCKS) cluster_arrive(in_block(leader_to, ring.empty) + 8 * stage.index);
  };
  const auto maxima = [&] { online_softmax_maxima(S, m_i, l_i, rescale, softmax_scale_log2); };
  const auto store = [&] { store_rows(done, warp_row, acc, inverse, staged, O, packed, params); };
  const auto weights = [&](int from, int to) {
    online_softmax_weights(S, m_i, l_i, softmax_scale_log2, from, to);
  };

  if (!next()) return;
  q_ring.wait_full(q_stage);
  k_ring.wait_full(k_stage);
  start_qk<T>(S, q, k);
  wgmma_wait<0>();
  // The first turn is the first consumer's.
  if (PINGPONG && consumer == CONSUMERS - 1) named_barrier_arrive(next_turn, 256);
  for (;;) {
    // ---- a tile's first keys: S is ready
    m_i[0] = m_i[1] = M_INIT;
    l_i[0] = l_i[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) acc[i] = 0.0f;
    wgmma_registers(S);
    release(k_ring, k_stage);
    first = last_tile_begin(tile);
    mask_edges();
    maxima();
    bool rescaled = false;  // acc is still empty
    weights(0, GROUPS);
    to_operand<T>(P, S, 0, GROUPS);

    // ---- one step: issue S of the next key tile and O of this one, then compute the next weights
    for (first -= BLOCK_N; first >= tile.begin; first -= BLOCK_N) {
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
      wgmma_wait<1>();
      wgmma_registers(S);
      release(k_ring, k_stage);
      mask_edges();
      rescaled = exceeds_maxima(S, m_i, softmax_scale_log2);
      if (rescaled) maxima();
      weights(0, GROUPS / 2);
      wgmma_wait<0>();
      wgmma_registers(acc);
      release(v_ring, v_stage);
      to_operand<T>(P, S, 0, GROUPS / 2);
      weights(GROUPS / 2, GROUPS);
      to_operand<T>(P, S, GROUPS / 2, GROUPS);
    }

    // ---- the last keys' O, and S of the next tile's first keys, which run while O is stored
    if (leader) q_ring.release(q_stage);
    if (rescaled) rescale_output(acc, rescale);
    done = tile;
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
    release(v_ring, v_stage);
    store();
    wgmma_wait<0>();
  }
  v_ring.wait_full(k_stage);
  start_pv<T>(acc, P, advance_tiles(v, k_stage.index, TILE_BYTES));
  wgmma_wait<0>();
  wgmma_registers(acc);
  store();
  cluster_sync();  // hazard: the other block's last arrivals could find no mbarrier
}
