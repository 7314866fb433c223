// 13, step 3, dQ by bulk addition: its tiles pass through shared memory, and one instruction of a warp
// of the producer's adds a tile to global memory.
//
// Launch, shapes, traffic: see hopper_backward_tiles.cuh, without turns

constexpr int CONSUMERS = 2, STAGES = 2;        // warpgroups that compute; tiles of Q, dO and dS
constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
// The sizes of tiles; Steps, a block's tiles of rows; start_scores, start_keys and start_dq, the
// products; lse, delta and zeros before the loop, and dQ after it.
#include "hopper_backward_tiles.cuh"

constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr unsigned V_AT = KEYS_BYTES, Q_AT = 2 * KEYS_BYTES, DO_AT = Q_AT + STAGES * ROWS_BYTES;
constexpr unsigned DS_AT = DO_AT + STAGES * ROWS_BYTES, DQ_AT = DS_AT + STAGES * DS_BYTES;
constexpr unsigned LSE_AT = DQ_AT + CONSUMERS * DQ_BYTES, DELTA_AT = LSE_AT + STAGES * 4 * BLOCK_M;
constexpr unsigned BARRIERS_AT = DELTA_AT + STAGES * 4 * BLOCK_M;
constexpr unsigned SHARED_BYTES = BARRIERS_AT + 8 * (2 + 3 * STAGES);
// Named barriers: one; one for each consumer; one.
constexpr int DS_READY = 1, DQ_EMPTY = 2, DQ_FULL = 4;
#include "hopper_backward_load.cuh"  // Barriers; load, by the producer

template <typename T>
__global__ void __launch_bounds__(THREADS) hopper_backward_preprocess(
    const T* __restrict__ O, const T* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ lse_delta, float* __restrict__ dQ_accum,
    const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- lse and delta of a tile of rows
  const RowBlock block(params.forward, cu_seqlens_q);
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  if (block.first_row >= block.q_len) return;
  prepare_rows(block, tiles, O, dO, lse, lse_delta, dQ_accum, params);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper_backward(
    const __grid_constant__ TensorMap q_map,   // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap do_map,  // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap k_map,   // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap v_map,   // boxes of BLOCK_N rows
    const float* __restrict__ lse_delta, float* __restrict__ dQ_accum, T* __restrict__ dK,
    T* __restrict__ dV,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BackwardParams params) {
  // ---- prologue: the keys of this block, and the tiles of rows that see one of them
  const AttentionParams& forward = params.forward;
  const KeyBlock block(false, block_number, forward, cu_seqlens_q, cu_seqlens_k);
  const int first_key = block.first_key, q_len = block.q_len, kv_len = block.kv_len;
  if (first_key >= kv_len) return;  // the whole block: its sequence is shorter than the longest
  const RowRange rows(block, forward);
  lse_delta += rows.first_slot * (2 * BLOCK_M);
  dQ_accum += rows.first_slot * (BLOCK_M * DQ_COLUMNS);
  Steps<> step(rows, block);

  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  const unsigned K_smem = smem_address(dynamic_smem), V_smem = K_smem + V_AT;
  const Barriers bar(K_smem);
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) bar.init();
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised

  // ---- producer: one warp loads, one adds to dQ
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
    if (warp_id == 0 && lane_id == 0)
      for (; step.more(); step.advance())
        load(step, block, K_smem, bar, q_map, do_map, k_map, v_map, lse_delta);
    if (warp_id == 1)
      for (; step.more(); step.advance()) {
        for (int i = 0; i < CONSUMERS; ++i) named_barrier_arrive(DQ_EMPTY + i, 160);
        named_barrier_sync(DQ_FULL, 288);  // hazard: the tile is not there yet
        if (lane_id == 0) {
          bulk_add(
              dQ_accum + (long long)step.slot() * (BLOCK_M * DQ_COLUMNS), K_smem + DQ_AT,
              CONSUMERS * DQ_BYTES);
          tma_store_commit();
          tma_store_wait_read<0>();  // hazard: the next tile could overwrite it
        }
        __syncwarp();
      }
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane_id = threadIdx.x % 32;
  const int warp_id = thread / 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_key = 64 * consumer + 16 * warp_id;  // the warp's first key
  const bool leader = thread == 0;                    // arrives for its warpgroup
  const unsigned long long k = wgmma_descriptor(K_smem + consumer * 64 * 128),
                           v = wgmma_descriptor(V_smem + consumer * 64 * 128);
  // The columns of K that are the rows of this warpgroup's dQ^T, and the rows of dS.
  const unsigned long long k_dq =
      wgmma_descriptor(K_smem + (PANELS == 2 ? consumer * BLOCK_N * 128 : 0));
  const unsigned long long dS_dq =
      wgmma_descriptor(K_smem + DS_AT + (PANELS == 2 ? 0 : consumer * DQ_ROWS * 128));
  const unsigned long long q = wgmma_descriptor(K_smem + Q_AT, BLOCK_M * 128),
                           dO = wgmma_descriptor(K_smem + DO_AT, BLOCK_M * 128);
  // stmatrix writes 16 rows of 16 keys of dS, whose tile has a panel for each consumer: this lane's
  // address of the first.
  const unsigned dS_lane = K_smem + DS_AT + consumer * BLOCK_M * 128 +
                           (lane_id / 16 * 8 + lane_id % 8) * 128 +
                           ((2 * warp_id + lane_id / 8 % 2) ^ lane_id % 8) * 16;
  float4* const dQ_smem =
      reinterpret_cast<float4*>(dynamic_smem + DQ_AT + consumer * DQ_BYTES) + thread;
  const float softmax_scale_log2 = forward.softmax_scale * LOG2_E;
  KeyRows dK_acc, dV_acc;
#pragma unroll
  for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) dK_acc[i] = dV_acc[i] = 0.0f;

  if (step.more()) {
    mbarrier_wait(bar.k_full, 0);
    mbarrier_wait(bar.v_full, 0);
    if (block.packed && first_key + BLOCK_N > kv_len) {  // the tile has keys of the next sequence
      clear_rows<BLOCK_N, PANELS>(
          dynamic_smem, kv_len - first_key, threadIdx.x - 128, 128 * CONSUMERS);
      clear_rows<BLOCK_N, PANELS>(
          dynamic_smem + V_AT, kv_len - first_key, threadIdx.x - 128, 128 * CONSUMERS);
      named_barrier_sync(DS_READY, 256);  // hazard: products could read rows not cleared yet
    }
  }
  for (; step.more(); step.advance()) {
    const int stage = step.stage(), first_row = step.row_tile * BLOCK_M;
    const bool masked = first_key + BLOCK_N > min(first_row + rows.window_hi + 1, kv_len) ||
                        first_key < first_row + BLOCK_M - 1 + rows.window_lo;
    const unsigned long long rows_at = stage * (ROWS_BYTES / 16);  // of the stage, in descriptors
    Scores S, dP;
    Weights P, dS;
    mbarrier_wait(bar.q_full + 8 * stage, step.parity());
    if (block.packed && first_row + BLOCK_M > q_len) {  // rows of the next sequence
      mbarrier_wait(bar.do_full + 8 * stage, step.parity());
      clear_rows<BLOCK_M, PANELS>(
          dynamic_smem + Q_AT + stage * ROWS_BYTES, q_len - first_row, threadIdx.x - 128,
          128 * CONSUMERS);
      clear_rows<BLOCK_M, PANELS>(
          dynamic_smem + DO_AT + stage * ROWS_BYTES, q_len - first_row, threadIdx.x - 128,
          128 * CONSUMERS);
      named_barrier_sync(DS_READY, 256);  // hazard: products could read rows not cleared yet
    }
    start_scores<T>(S, k, q + rows_at);
    wgmma_wait<0>();
    wgmma_registers(S);

    // ---- P^T = exp(S^T - lse)
    const float2* const lse =
        reinterpret_cast<const float2*>(dynamic_smem + LSE_AT + stage * 4 * BLOCK_M) + t;
    const float2* const delta =
        reinterpret_cast<const float2*>(dynamic_smem + DELTA_AT + stage * 4 * BLOCK_M) + t;
    const int first_key_idx = first_key + warp_key + g;
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        S[4 * n + i] =
            weight(S[4 * n + i], softmax_scale_log2, i % 2 ? lse[4 * n].y : lse[4 * n].x);
    // A key that a row does not see has the weight 0.
    if (masked) {
#pragma unroll
      for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = first_key_idx + i / 2 * 8,
                    distance = j - (first_row + 8 * n + 2 * t + i % 2);
          float& weight = S[4 * n + i];
          if (distance < rows.window_lo || distance > rows.window_hi || j >= kv_len) weight = 0.0f;
        }
    }

    // ---- dS^T = P^T (dP^T - delta), which the other warpgroup needs too
    mbarrier_wait(bar.do_full + 8 * stage, step.parity());
    start_scores<T>(dP, v, dO + rows_at);
    wgmma_wait<0>();
    wgmma_registers(dP);
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 d = delta[4 * n];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        P[n / 2][n % 2 * 2 + i] = pack(T(), S[4 * n + 2 * i], S[4 * n + 2 * i + 1]);
        dS[n / 2][n % 2 * 2 + i] = pack(
            T(), S[4 * n + 2 * i] * (dP[4 * n + 2 * i] - d.x),
            S[4 * n + 2 * i + 1] * (dP[4 * n + 2 * i + 1] - d.y));
      }
      const unsigned (&x)[4] = dS[n / 2];
      if (n % 2)
        stmatrix_x4_trans(dS_lane + stage * DS_BYTES + n / 2 * 16 * 128, x[0], x[1], x[2], x[3]);
    }
    start_keys<T>(dV_acc, P, dO + rows_at);
    wgmma_wait<0>();
    wgmma_registers(dV_acc);
    async_proxy_fence();
    named_barrier_sync(DS_READY, 256);  // hazard: the other's half of dS is not there yet

    // ---- dQ and dK
    float dQ_acc[DQ_ROWS / 2];
    start_dq<T>(dQ_acc, k_dq, dS_dq + stage * (DS_BYTES / 16));
    wgmma_wait<0>();
    wgmma_registers(dQ_acc);
    named_barrier_sync(DQ_EMPTY + consumer, 160);  // hazard: the last tile is still being added
#pragma unroll
    for (int n = 0; n < DQ_ROWS / 8; ++n)
      dQ_smem[n * 128] =
          make_float4(dQ_acc[4 * n], dQ_acc[4 * n + 1], dQ_acc[4 * n + 2], dQ_acc[4 * n + 3]);
    async_proxy_fence();
    named_barrier_arrive(DQ_FULL, 288);
    start_keys<T>(dK_acc, dS, q + rows_at);
    wgmma_wait<0>();
    wgmma_registers(dK_acc);
    if (leader) mbarrier_arrive(bar.empty + 8 * stage);
  }

  // ---- epilogue: dK and dV take the place of these keys of K and V
  named_barrier_sync(DS_READY, 256);  // hazard: the other still computes dQ from these rows of K
  unsigned char* const staged = dynamic_smem + warp_key * 128;
  const float scale[2] = {forward.softmax_scale, forward.softmax_scale}, one[2] = {1.0f, 1.0f};
  dK += block.of_keys(params.d_k) + warp_key * params.d_k.row;
  dV += block.of_keys(params.d_v) + warp_key * params.d_v.row;
  store_panels(staged, dK_acc, scale, dK, params.d_k.row, kv_len - first_key - warp_key, HEAD_DIM);
  store_panels(
      staged + V_AT, dV_acc, one, dV, params.d_v.row, kv_len - first_key - warp_key, HEAD_DIM);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) hopper_backward_convert(
    const float* __restrict__ dQ_accum, T* __restrict__ dQ, const int* __restrict__ cu_seqlens_q,
    const BackwardParams params) {
  // ---- dQ: from the order of the fragments to rows
  const RowBlock block(params.forward, cu_seqlens_q);
  if (block.first_row < block.q_len) convert_fragments(block, dQ_accum, dQ, params);
}
