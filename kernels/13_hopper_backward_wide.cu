// 13 hopper_backward_wide: the gradients on Hopper for rows of more than 128 elements.
//
// As 13_hopper_backward, but dK and dV of 128 keys do not fit the registers: a block has 64 keys, whose
// columns the two consumers share out. One computes S^T and P^T, the other dP^T and dS^T; both pass
// through shared memory, since each consumer needs all keys and rows for its half of the columns of dV,
// dQ and dK. There is no room left for a tile of dQ: threads add four floats at a time, as in 08.
//
// Launch   as 13_hopper_backward
// Shapes   as 13_hopper_backward
// Needs    sm_90a and no other; HEAD_DIM and strides multiples of 8, pointers of 16 bytes
// Traffic  as 08_backward_mma

#ifndef HEAD_DIM
#define HEAD_DIM 256  // d, the length of a row: a multiple of 8, at most 256
#endif
#ifndef BLOCK_M
#define BLOCK_M 64  // B_r, query rows per tile
#endif
#ifndef BLOCK_N
#define BLOCK_N 64  // B_c, keys per block
#endif

#include "backward_preprocess.cuh"       // lse, delta and zeros before the loop
#include "hopper_backward_schedule.cuh"  // Steps, its M blocks; Barriers, load; start_scores
#include "results.cuh"                   // store8
#include "semaphore.cuh"                 // DETERMINISTIC; BlockNumber, wait_for_blocks, add_release

constexpr int CONSUMERS = 2, STAGES = 2;        // warpgroups that compute; tiles of Q, dO, P and dS
constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
// Causal masks: rows of the heads whose blocks run together. A fixed order: how many blocks that are.
constexpr int L2_BYTES = 16 << 20, TURN_BLOCKS = 256;
constexpr int HEAD_DIM_PADDED = 256, PANELS = 4,
              DQ_COLUMNS = 256;                  // TMA fills columns up with zeros
constexpr int COLUMNS = DQ_COLUMNS / CONSUMERS;  // of a consumer
constexpr unsigned KEYS_BYTES = PANELS * BLOCK_N * 128, ROWS_BYTES = PANELS * BLOCK_M * 128;
constexpr unsigned SCORES_BYTES = 2 * BLOCK_M * BLOCK_N;
struct SharedStorage {
  unsigned char K[KEYS_BYTES], V[KEYS_BYTES], Q[STAGES][ROWS_BYTES], dO[STAGES][ROWS_BYTES];
  unsigned char P[STAGES][SCORES_BYTES], dS[STAGES][SCORES_BYTES];
  float lse[STAGES][BLOCK_M], delta[STAGES][BLOCK_M];
  unsigned long long k_full, v_full, q_full[STAGES], do_full[STAGES], empty[STAGES];
};
constexpr unsigned SHARED_BYTES = sizeof(SharedStorage);
constexpr int P_READY = 1, DS_READY = 2;  // named barriers
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "16-byte chunks; two halves of four panels");
static_assert(BLOCK_N == 64 && BLOCK_M == 64, "what shared memory has room for");

using Weights = unsigned[BLOCK_M / 16][4];  // the same, in pairs of 2-byte floats
using Columns = float[COLUMNS / 2];         // dK or dV of the 64 keys, or dQ of 64 rows

// Issues a product for the consumer's columns over 64 rows or keys, 16 at a time: dV += P^T dO,
// dK += dS^T Q, or dQ = dS K. P and dS lie in rows of 64 keys.
template <int TRANSPOSED, typename T>
__device__ __forceinline__ void start_columns(
    Columns& acc, unsigned long long left, unsigned long long right, bool accumulate) {
  wgmma_registers(acc);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 64 / 16; ++i)
    wgmma_ss<TRANSPOSED, 1>(
        T(), acc, TRANSPOSED ? advance_rows(left, i) : advance_columns(left, i, 64),
        advance_rows(right, i), accumulate || i > 0);
  wgmma_commit();
}

// P^T or dS^T to shared memory, as rows of 64 keys: 16 rows of the warp's 16 keys at a time.
template <typename T>
__device__ __forceinline__ void store_scores(const Scores& S, unsigned lane) {
#pragma unroll
  for (int k = 0; k < BLOCK_M / 16; ++k) {
    unsigned x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack(T(), S[8 * k + 2 * i], S[8 * k + 2 * i + 1]);
    stmatrix_x4_trans(lane + k * 16 * 128, x[0], x[1], x[2], x[3]);
  }
}

// Four floats of dQ_accum, in the order of the fragments.
__device__ __forceinline__ void add_four(float* target, const float* d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(d[0]), "f"(d[1]),
               "f"(d[2]), "f"(d[3])
               : "memory");
}

template <typename T>
__global__ void __launch_bounds__(THREADS) hopper_backward_wide_preprocess(
    const T* __restrict__ O, const T* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ lse_delta, float* __restrict__ dQ_accum, int* __restrict__ dq_semaphore,
    const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- lse and delta of a tile of rows
  const RowBlock block(params.forward, cu_seqlens_q);
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  clear_semaphores(dq_semaphore, block, tiles, params.forward);
  if (block.first_row >= block.q_len) return;
  prepare_rows<THREADS, DQ_COLUMNS>(block, tiles, O, dO, lse, lse_delta, dQ_accum, params);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) hopper_backward_wide_convert(
    const float* __restrict__ dQ_accum, Out<T>* __restrict__ dQ,
    const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- dQ: from the order of the fragments to rows, 8 columns of two rows at a time
  const RowBlock block(params.forward, cu_seqlens_q);
  if (block.first_row >= block.q_len) return;
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  dQ += block.of_rows(params.d_q);
  dQ_accum += block.slot(tiles) * BLOCK_M * DQ_COLUMNS;
  for (int i = threadIdx.x; i < BLOCK_M / 2 * (DQ_COLUMNS / 8); i += THREADS) {
    const int chunk = i % (DQ_COLUMNS / 8), g = i / (DQ_COLUMNS / 8) % 8,
              warp = i / (DQ_COLUMNS / 8) / 8;
    float4 x[4];  // of lane 4 g + t: (g, 2 t), (g, 2 t + 1), and the same of row g + 8
#pragma unroll
    for (int t = 0; t < 4; ++t)
      x[t] = reinterpret_cast<const float4*>(dQ_accum)[128 * chunk + 32 * warp + 4 * g + t];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Pair<Out<T>> out[4];
#pragma unroll
      for (int t = 0; t < 4; ++t)
        out[t] = pack(
            Out<T>(), (&x[t].x)[2 * h] * params.forward.softmax_scale,
            (&x[t].x)[2 * h + 1] * params.forward.softmax_scale);
      const int row = 16 * warp + g + 8 * h;
      if (block.first_row + row < block.q_len && 8 * chunk < HEAD_DIM)
        store8(dQ + row * params.d_q.row + 8 * chunk, out);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper_backward_wide(
    const __grid_constant__ TensorMap q_map,   // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap do_map,  // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap k_map,   // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,   // boxes of BLOCK_N rows
    const float* __restrict__ lse_delta, float* __restrict__ dQ_accum,
    int* __restrict__ dq_semaphore, KeyOut<T>* __restrict__ dK, KeyOut<T>* __restrict__ dV,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BackwardParams params HOOK_PARAMETERS) {
  // ---- prologue: the keys of this block, and the tiles of rows that see one of them
  const AttentionParams& forward = params.forward;
  // Causal masks, and a fixed order of additions: blocks with consecutive numbers have the same tile of
  // several heads; under a causal mask, of as many as have their rows in the L2 cache.
  const bool by_tile = forward.window_right < UNLIMITED;
  const long long head_rows = (long long)max(forward.N, 1) * (forward.heads / forward.kv_heads);
  const int together = by_tile && !DETERMINISTIC
                           ? (int)(L2_BYTES / (head_rows * 4 * (HEAD_DIM + DQ_COLUMNS)))
                           : TURN_BLOCKS / gridDim.x;
  const KeyBlock block(
      DETERMINISTIC || by_tile, BlockNumber{dq_semaphore, cu_seqlens_q != nullptr, forward},
      forward, cu_seqlens_q, cu_seqlens_k, max(together, 1), LAST_KEYS_FIRST && by_tile);
  const int first_key = block.first_key, q_len = block.q_len, kv_len = block.kv_len;
  if (first_key >= kv_len) return;  // the whole block: its sequence is shorter than the longest
  const RowRange rows(block, forward);
  lse_delta += rows.first_slot * (2 * BLOCK_M);
  dQ_accum += rows.first_slot * (BLOCK_M * DQ_COLUMNS);
  const Hooks first_head = {
      HOOK_ARGUMENTS block.sequence, block.first_head(), block.kv_head(), q_len, kv_len};
  Steps<STAGES> step(block, rows, first_head);
  dq_semaphore += rows.first_slot;

  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const Barriers<STAGES> bar(smem);
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) bar.init(CONSUMERS);
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised

  // ---- producer: one thread loads
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    if (threadIdx.x > 0) return;
    for (; step.more(); step.advance())
      load(step, block, smem, bar, q_map, do_map, k_map, v_map, lse_delta);
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane_id = threadIdx.x % 32;
  const int warp_id = thread / 32, g = lane_id / 4, t = lane_id % 4;
  const bool leader = thread == 0;  // releases for its warpgroup, as in CUTLASS
  // The first consumer's S^T = K Q^T, the second one's dP^T = V dO^T.
  const unsigned long long keys = wgmma_descriptor(smem_address(consumer == 0 ? smem.K : smem.V)),
                           rows_of_keys =
                               wgmma_descriptor(smem_address(consumer == 0 ? smem.Q : smem.dO));
  const Ring<STAGES> ring = consumer == 0 ? bar.q_ring : bar.do_ring,
                     other_ring = consumer == 0 ? bar.do_ring : bar.q_ring;
  // Two panels of columns of each.
  const unsigned long long k =
      wgmma_descriptor(smem_address(smem.K + consumer * 2 * BLOCK_N * 128), BLOCK_N * 128);
  const unsigned long long q_tiles = wgmma_descriptor(
                               smem_address(smem.Q[0] + consumer * 2 * BLOCK_M * 128),
                               BLOCK_M * 128),
                           dO_tiles = wgmma_descriptor(
                               smem_address(smem.dO[0] + consumer * 2 * BLOCK_M * 128),
                               BLOCK_M * 128);
  const unsigned long long P_tiles = wgmma_descriptor(smem_address(smem.P)),
                           dS_tiles = wgmma_descriptor(smem_address(smem.dS));
  // stmatrix writes 16 rows of 16 keys of P or dS: this lane's place in the tile.
  const unsigned lane =
      (lane_id / 16 * 8 + lane_id % 8) * 128 + ((2 * warp_id + lane_id / 8 % 2) ^ lane_id % 8) * 16;
  const float softmax_scale_log2 = scale_log2_of(forward.softmax_scale);
  Columns dK_acc, dV_acc;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) dK_acc[i] = dV_acc[i] = 0.0f;

  if (step.more()) {
    mbarrier_wait(bar.k_full, 0);
    mbarrier_wait(bar.v_full, 0);
    if (block.packed && first_key + BLOCK_N > kv_len) {  // the tile has keys of the next sequence
      clear_rows<BLOCK_N, PANELS>(smem.K, kv_len - first_key, threadIdx.x - 128, 128 * CONSUMERS);
      clear_rows<BLOCK_N, PANELS>(smem.V, kv_len - first_key, threadIdx.x - 128, 128 * CONSUMERS);
      named_barrier_sync(DS_READY, 256);  // hazard: products could read rows not cleared yet
    }
  }
  const bool takes_turns = DETERMINISTIC && threadIdx.x == 128;  // for both consumers
  int* passed_on = nullptr;                                      // the semaphore of the step before
  for (; step.more(); step.advance()) {
    const int stage = step.stage().index, first_row = step.m_block * BLOCK_M;
    const unsigned long long q = advance_tiles(q_tiles, stage, ROWS_BYTES),
                             dO = advance_tiles(dO_tiles, stage, ROWS_BYTES);
    const unsigned P_lane = smem_address(smem.P[stage]) + lane,
                   dS_lane = smem_address(smem.dS[stage]) + lane;
    const unsigned long long P_desc = advance_tiles(P_tiles, stage, SCORES_BYTES),
                             dS_desc = advance_tiles(dS_tiles, stage, SCORES_BYTES);
    Scores S;
    Weights P;
    ring.wait_full(step.stage());
    if (block.packed && first_row + BLOCK_M > q_len) {  // the tiles have rows of the next sequence
      other_ring.wait_full(step.stage());
      clear_rows<BLOCK_M, PANELS>(
          smem.Q[stage], q_len - first_row, threadIdx.x - 128, 128 * CONSUMERS);
      clear_rows<BLOCK_M, PANELS>(
          smem.dO[stage], q_len - first_row, threadIdx.x - 128, 128 * CONSUMERS);
      named_barrier_sync(DS_READY, 256);  // hazard: products could read rows not cleared yet
    }
    start_scores<T, HEAD_DIM_PADDED>(S, keys, advance_tiles(rows_of_keys, stage, ROWS_BYTES));
    wgmma_wait<0>();
    wgmma_registers(S);
    const float2* const of_rows =
        reinterpret_cast<const float2*>(consumer == 0 ? smem.lse[stage] : smem.delta[stage]) + t;
    if (consumer == 0) {
      // ---- P^T = exp(S^T - lse). A key that a row does not see has the weight 0.
      const bool masked = first_key + BLOCK_N > min(first_row + rows.window_hi + 1, kv_len) ||
                          first_key < first_row + BLOCK_M - 1 + rows.window_lo || step.partial();
      const int key = first_key + 16 * warp_id + g, row = first_row + 2 * t;
      const Hooks hooks = step.hooks();
      HookGradient<1, BLOCK_M / 8, 4> grad;
      hook_scores(fragments(S), grad, hooks, forward.softmax_scale, row + kv_len - q_len, key);
#pragma unroll
      for (int n = 0; n < BLOCK_M / 8; ++n) {
        const float2 lse = of_rows[4 * n];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          S[4 * n + i] = weight(S[4 * n + i], softmax_scale_log2, i % 2 ? lse.y : lse.x);
      }
      if (masked) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) {
          const int j = key + i / 2 % 2 * 8, distance = j - (row + i / 4 * 8 + i % 2);
          if (distance < rows.window_lo || distance > rows.window_hi || j >= kv_len) S[i] = 0.0f;
        }
        hook_weights(fragments(S), grad, hooks, row + kv_len - q_len, key, step.lists.is_partial());
      }
      store_scores<T>(S, P_lane);
      if (SCORE_GRAD) {  // what dS^T is to be multiplied by, in its own place
        hook_gradients(fragments(S), grad);
        store_scores<T>(S, dS_lane);
      }
    }
    async_proxy_fence();
    named_barrier_sync(P_READY, 256);  // hazard: P is not there yet
    // Both consumers have added to the dQ of the step before.
    if (takes_turns && passed_on) add_release(passed_on);
    if (consumer == 1) {
      // ---- dS^T = P^T (dP^T - delta)
#pragma unroll
      for (int k = 0; k < BLOCK_M / 16; ++k) {
        ldmatrix_x4_trans(P[k], (SCORE_GRAD ? dS_lane : P_lane) + k * 16 * 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 p = unpack(T(), P[k][i]), delta = of_rows[4 * (2 * k + i / 2)];
          float* const dP = &S[8 * k + 2 * i];
          dP[0] = p.x * (dP[0] - delta.x);
          dP[1] = p.y * (dP[1] - delta.y);
        }
      }
      store_scores<T>(S, dS_lane);
    }
    other_ring.wait_full(step.stage());
    start_columns<1, T>(dV_acc, P_desc, dO, true);
    async_proxy_fence();
    if (takes_turns) {
      passed_on = dq_semaphore + step.slot();
      wait_for_blocks(passed_on, blocks_before(block, rows, step.m_block));
    }
    // hazard: dS is not there yet; nor, in a fixed order, what the blocks before add to dQ
    named_barrier_sync(DS_READY, 256);

    // ---- dQ and dK
    Columns dQ_acc;
    start_columns<0, T>(dQ_acc, dS_desc, k, false);
    start_columns<1, T>(dK_acc, dS_desc, q, true);
    wgmma_wait<1>();
    wgmma_registers(dV_acc);
    wgmma_registers(dQ_acc);
    float* const target = dQ_accum + (long long)step.slot() * (BLOCK_M * DQ_COLUMNS) +
                          consumer * (BLOCK_M * COLUMNS) + 4 * thread;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) add_four(target + 512 * n, &dQ_acc[4 * n]);
    wgmma_wait<0>();
    wgmma_registers(dK_acc);
    if (leader) bar.q_ring.release(step.stage());  // and dO's
  }

  // ---- epilogue: dK and dV take the place of this consumer's columns of K and V
  named_barrier_sync(DS_READY, 256);  // hazard: the other still reads K and V
  if (takes_turns && passed_on) add_release(passed_on);
  const int staged = (2 * consumer * BLOCK_N + 16 * warp_id) * 128;  // in bytes
  const float scale[2] = {forward.softmax_scale, forward.softmax_scale}, one[2] = {1.0f, 1.0f};
  const int key = 16 * warp_id, column = consumer * COLUMNS;
  dK += block.of_keys(params.d_k) + key * params.d_k.row + column;
  dV += block.of_keys(params.d_v) + key * params.d_v.row + column;
  store_panels(
      smem.K + staged, dK_acc, scale, dK, params.d_k.row, kv_len - first_key - key,
      HEAD_DIM - column);
  store_panels(
      smem.V + staged, dV_acc, one, dV, params.d_v.row, kv_len - first_key - key,
      HEAD_DIM - column);
}
