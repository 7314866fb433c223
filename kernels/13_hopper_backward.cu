// 13 hopper_backward: the gradients of attention on Hopper, FlashAttention-3's backward.
//
// Since 08: five products by wgmma, tiles by TMA, and roles as in 10. Two consumer warpgroups have 64
// keys each of the block's 128: K, V and a ring of Q and dO in shared memory, dK and dV in registers.
// The scores are transposed, as in 08: S^T and dP^T come out of the tensor cores as the left operands
// that dV += P^T dO and dK += dS^T Q take from registers. Only dS passes through shared memory, since
// dQ = dS K needs the keys of both warpgroups. A tile of dQ goes to shared memory too, where a warp of
// the producer's warpgroup has one instruction add it to global memory (Shah, Bikshandi et al., 2024).
//
// Launch, shapes, traffic: see hopper_backward_tiles.cuh

#include "backward_preprocess.cuh"  // lse, delta and zeros before the loop
#include "hopper_backward_first_store.cuh"
#include "hopper_backward_persistent.cuh"  // TileQueue
// The sizes of tiles; Steps, its M blocks; Barriers, load; start_scores, start_keys and
// start_dq, the products; dQ after the loop.
#include "hopper_backward_tiles.cuh"
#include "semaphore.cuh"  // DETERMINISTIC; BlockNumber, wait_for_blocks, add_release

constexpr int STAGES = 2;                       // tiles of Q, dO and dS
constexpr int THREADS = 128 * (1 + CONSUMERS);  // warpgroup 0 is the producer
constexpr int PRODUCER_REGISTERS = PERSISTENT && PANELS == 2 ? 40 : 24;
constexpr int CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 2;
// Warps that add to dQ. In a fixed order, one may wait while an addition of the other is under way; else
// a second one costs 4 % at head_dim 128.
constexpr int ADDERS = DETERMINISTIC ? 2 : 1;
// Of the heads whose blocks run together: under a causal mask, their rows in the L2 cache; in a fixed
// order, their blocks.
constexpr int L2_BYTES = 16 << 20, TURN_BLOCKS = 256;
struct SharedStorage {
  unsigned char K[KEYS_BYTES], V[KEYS_BYTES];
  unsigned char Q[STAGES][ROWS_BYTES], dO[STAGES][ROWS_BYTES], dS[STAGES][DS_BYTES];
  unsigned char dQ[CONSUMERS][DQ_BYTES];  // in float32
  float lse[STAGES][BLOCK_M], delta[STAGES][BLOCK_M];
  unsigned long long k_full, v_full, q_full[STAGES], do_full[STAGES], empty[STAGES];
  TileMail mail;
};
constexpr unsigned SHARED_BYTES = sizeof(SharedStorage);
// Named barriers: one; one for each consumer; one for each warp that adds to dQ.
constexpr int DS_READY = 1, DQ_EMPTY = 2, DQ_FULL = 4;

// Whether a step masks scores, as a type.
template <bool MASKED>
struct Mask {
  static constexpr bool value = MASKED;
};

template <typename T>
__global__ void __launch_bounds__(THREADS) hopper_backward_preprocess(
    const T* __restrict__ O, const T* __restrict__ dO, const float* __restrict__ lse,
    float* __restrict__ lse_delta, float* __restrict__ dQ_accum, int* __restrict__ dq_semaphore,
    const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- lse and delta of a tile of rows
  const RowBlock block(params.forward, cu_seqlens_q);
  const RowTiles tiles = row_tiles(block.packed, block.q_first, block.sequence, params.forward);
  clear_semaphores(dq_semaphore, block, tiles, params.forward);
  if (block.first_row >= block.q_len) return;
  prepare_rows<THREADS, DQ_COLUMNS, !FIRST_STORES>(
      block, tiles, O, dO, lse, lse_delta, dQ_accum, params);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) hopper_backward(
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
  // Blocks with consecutive numbers have the same tile of `together` heads: as many as have their rows
  // in the L2 cache. In a fixed order, a head's blocks follow each other a step apart; so do their
  // successors, if as many heads start together as end. With LAST_KEYS_FIRST, none waits for another.
  const bool by_tile = forward.window_right < UNLIMITED;
  const long long head_rows = (long long)max(forward.N, 1) * (forward.heads / forward.kv_heads);
  const int together = by_tile && !DETERMINISTIC
                           ? (int)(L2_BYTES / (head_rows * 4 * (HEAD_DIM + DQ_COLUMNS)))
                           : TURN_BLOCKS / gridDim.x;
  const BlockNumber number_of_block{dq_semaphore, cu_seqlens_q != nullptr, forward};
  const KeyBlock own(
      DETERMINISTIC || by_tile, number_of_block, forward, cu_seqlens_q, cu_seqlens_k,
      max(together, 1), LAST_KEYS_FIRST && by_tile);
  // The whole block: its sequence is shorter than the longest.
  if (!PERSISTENT && own.first_key >= own.kv_len) return;
  const dim3 tiles((forward.N_kv + BLOCK_N - 1) / BLOCK_N, forward.kv_heads, sequences_of(forward));
  const int n_tiles = tiles.x * tiles.y * tiles.z;
  const auto steps_of = [&](int number, int count) {
    const KeyBlock block =
        PERSISTENT ? KeyBlock(number, tiles, forward, by_tile ? max(together, 1) : 1) : own;
    const Hooks first_head = {
        HOOK_ARGUMENTS block.sequence, block.first_head(), block.kv_head(), block.q_len,
        block.kv_len};
    Steps<STAGES> step(block, RowRange(block, forward), first_head);
    step.count = step.start = count;
    return step;
  };

  // ---- shared memory, mbarriers
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(dynamic_smem);
  const Barriers<STAGES> bar(smem);
  TileQueue queue(smem.mail);
  // Uniform within a warp; the shuffle tells the compiler so.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    queue.init(CONSUMERS);
    bar.init(CONSUMERS);
  }
  __syncthreads();  // hazard: others could wait for an mbarrier that is not initialised

  // ---- producer: one warp loads, others add to dQ
  if (warpgroup == 0) {
    setmaxnreg_decrease<PRODUCER_REGISTERS>();
    const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
    if (warp_id == 0 && lane_id == 0) {
      int number = queue.first(), count = 0;
      for (; queue.send(number, n_tiles); number = queue.draw(number_of_block.counter())) {
        Steps<STAGES> step = steps_of(number, count);
        const float* const lse = lse_delta + step.rows.first_slot * (2 * BLOCK_M);
        for (; step.more(); step.advance())
          load(step, step.block, smem, bar, q_map, do_map, k_map, v_map, lse, [&] {
            queue.wait_for_keys_empty();
          });  // hazard: the consumers still read them
        count = step.count;
      }
    }
    if (warp_id >= 1 && warp_id <= ADDERS) {  // they take the steps in turn
      const int mine = warp_id - 1;
      int count = 0;
      for (int number; queue.receive(number, n_tiles); queue.advance()) {
        queue.release_number(lane_id == 0);
        Steps<STAGES> step = steps_of(number, count);
        const RowRange rows = step.rows;
        int* const semaphores = dq_semaphore + rows.first_slot;
        float* const dQ = dQ_accum + rows.first_slot * (BLOCK_M * DQ_COLUMNS);
        const auto arrive_empty = [&] {
          for (int i = 0; step.more() && i < CONSUMERS; ++i)
            named_barrier_arrive(DQ_EMPTY + i, 160);
        };
        if (mine == 0) arrive_empty();
        while (step.more()) {
          const int slot = step.slot(), m_block = step.m_block;
          const bool other = step.count % ADDERS != mine;
          step.advance();
          if (other) continue;
          DqAddition add(semaphores + slot, lane_id == 0);
          named_barrier_sync(DQ_FULL + mine, 288);  // hazard: the tile is not there yet
          if (lane_id == 0) {
            wait_for_blocks(semaphores + slot, blocks_before(step.block, rows, m_block));
            add(dQ + (long long)slot * (BLOCK_M * DQ_COLUMNS), smem_address(smem.dQ),
                CONSUMERS * DQ_BYTES);
            tma_store_commit();
            tma_store_wait_read<0>();  // hazard: the next tile could overwrite it
          }
          __syncwarp();
          arrive_empty();
          if (lane_id == 0) add.let_others_add();
          if (DETERMINISTIC && lane_id == 0) {
            tma_store_wait();  // hazard: the turn could pass on before the addition is done
            add_release(semaphores + slot);
          }
        }
        count = step.count;
      }
    }
    return;
  }

  // ---- consumers
  setmaxnreg_increase<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1, thread = threadIdx.x % 128, lane_id = threadIdx.x % 32;
  const int warp_id = thread / 32, g = lane_id / 4, t = lane_id % 4;
  const int warp_key = 64 * consumer + 16 * warp_id;  // the warp's first key
  const bool leader = thread == 0;                    // releases for its warpgroup, as in CUTLASS
  const unsigned long long k = wgmma_descriptor(smem_address(smem.K + consumer * 64 * 128)),
                           v = wgmma_descriptor(smem_address(smem.V + consumer * 64 * 128));
  // The columns of K that are the rows of this warpgroup's dQ^T, and the rows of dS.
  const unsigned long long k_dq =
      wgmma_descriptor(smem_address(smem.K + (PANELS == 2 ? consumer * BLOCK_N * 128 : 0)));
  const unsigned long long dS_dq =
      wgmma_descriptor(smem_address(smem.dS[0] + (PANELS == 2 ? 0 : consumer * DQ_ROWS * 128)));
  const unsigned long long q_tiles = wgmma_descriptor(smem_address(smem.Q), BLOCK_M * 128),
                           dO_tiles = wgmma_descriptor(smem_address(smem.dO), BLOCK_M * 128);
  // stmatrix writes 16 rows of 16 keys of dS, whose tile has a panel for each consumer: this lane's
  // address of the first.
  const unsigned dS_lane = smem_address(smem.dS[0] + consumer * BLOCK_M * 128) +
                           (lane_id / 16 * 8 + lane_id % 8) * 128 +
                           ((2 * warp_id + lane_id / 8 % 2) ^ lane_id % 8) * 16;
  float4* const dQ_smem = reinterpret_cast<float4*>(smem.dQ[consumer]) + thread;
  const float softmax_scale_log2 = scale_log2_of(forward.softmax_scale);
  int count = 0;
  for (int number; queue.receive(number, n_tiles); queue.advance()) {
    Steps<STAGES> step = steps_of(number, count);
    const KeyBlock block = step.block;
    const RowRange rows = step.rows;
    const int first_key = block.first_key, q_len = block.q_len, kv_len = block.kv_len;
    KeyRows dK_acc, dV_acc;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_PADDED / 2; ++i) dK_acc[i] = dV_acc[i] = 0.0f;

    const bool some = step.more();
    if (some) {
      mbarrier_wait(bar.k_full, queue.keys_phase());
      mbarrier_wait(bar.v_full, queue.keys_phase());
      if (block.packed && first_key + BLOCK_N > kv_len) {  // the tile has keys of the next sequence
        clear_rows<BLOCK_N, PANELS>(smem.K, kv_len - first_key, threadIdx.x - 128, 128 * CONSUMERS);
        clear_rows<BLOCK_N, PANELS>(smem.V, kv_len - first_key, threadIdx.x - 128, 128 * CONSUMERS);
        named_barrier_sync(DS_READY, 256);  // hazard: products could read rows not cleared yet
      }
    }
    // One step. There are two of it, so that where all is seen there is no mask in the way.
    const auto compute = [&](auto mask) {
      constexpr bool MASKED = mask.value;
      const int stage = step.stage().index, first_row = step.m_block * BLOCK_M;
      const unsigned long long q = advance_tiles(q_tiles, stage, ROWS_BYTES),
                               dO = advance_tiles(dO_tiles, stage, ROWS_BYTES);
      Scores S, dP;
      Weights P, dS;
      bar.q_ring.wait_full(step.stage());
      if (MASKED && block.packed && first_row + BLOCK_M > q_len) {  // rows of the next sequence
        bar.do_ring.wait_full(step.stage());
        clear_rows<BLOCK_M, PANELS>(
            smem.Q[stage], q_len - first_row, threadIdx.x - 128, 128 * CONSUMERS);
        clear_rows<BLOCK_M, PANELS>(
            smem.dO[stage], q_len - first_row, threadIdx.x - 128, 128 * CONSUMERS);
        named_barrier_sync(DS_READY, 256);  // hazard: products could read rows not cleared yet
      }
      start_scores<T, HEAD_DIM_PADDED>(S, k, q);
      bar.do_ring.wait_full(step.stage());
      start_scores<T, HEAD_DIM_PADDED>(dP, v, dO);

      // ---- P^T = exp(S^T - lse), while dP^T is computed
      const float2* const lse = reinterpret_cast<const float2*>(smem.lse[stage]) + t;
      const float2* const delta = reinterpret_cast<const float2*>(smem.delta[stage]) + t;
      const Hooks hooks = step.hooks();
      const int first_key_idx = first_key + warp_key + g;
      const int first_q_idx = first_row + 2 * t + kv_len - q_len;
      HookGradient<1, BLOCK_M / 8, 4> grad;
      wgmma_wait<1>();
      wgmma_registers(S);
      hook_scores(fragments(S), grad, hooks, forward.softmax_scale, first_q_idx, first_key_idx);
#pragma unroll
      for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          S[4 * n + i] =
              weight(S[4 * n + i], softmax_scale_log2, i % 2 ? lse[4 * n].y : lse[4 * n].x);
      // A key that a row does not see has the weight 0.
      if (MASKED) {
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int j = first_key_idx + i / 2 * 8,
                      distance = j - (first_row + 8 * n + 2 * t + i % 2);
            if (distance < rows.window_lo || distance > rows.window_hi || j >= kv_len)
              S[4 * n + i] = 0.0f;
          }
        hook_weights(
            fragments(S), grad, hooks, first_q_idx, first_key_idx, step.lists.is_partial());
      }

      // ---- dS^T = P^T (dP^T - delta), which the other warpgroup needs too
      wgmma_wait<0>();
      wgmma_registers(dP);
#pragma unroll
      for (int n = 0; n < BLOCK_M / 8; ++n) {
        const float2 d = delta[4 * n];
        float ds[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[i] = S[4 * n + i] * (dP[4 * n + i] - (i % 2 ? d.y : d.x));
        hook_gradients(ds, grad, n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          P[n / 2][n % 2 * 2 + i] = pack(T(), S[4 * n + 2 * i], S[4 * n + 2 * i + 1]);
          dS[n / 2][n % 2 * 2 + i] = pack(T(), ds[2 * i], ds[2 * i + 1]);
        }
        const unsigned (&x)[4] = dS[n / 2];
        if (n % 2)
          stmatrix_x4_trans(dS_lane + stage * DS_BYTES + n / 2 * 16 * 128, x[0], x[1], x[2], x[3]);
      }
      start_keys<T>(dV_acc, P, dO);
      async_proxy_fence();
      named_barrier_sync(DS_READY, 256);  // hazard: the other's half of dS is not there yet

      // ---- dQ and dK
      float dQ_acc[DQ_ROWS / 2];
      start_dq<T>(dQ_acc, k_dq, advance_tiles(dS_dq, stage, DS_BYTES));
      start_keys<T>(dK_acc, dS, q);
      wgmma_wait<1>();
      wgmma_registers(dV_acc);
      wgmma_registers(dQ_acc);
      named_barrier_sync(DQ_EMPTY + consumer, 160);  // hazard: the last tile is still being added
#pragma unroll
      for (int n = 0; n < DQ_ROWS / 8; ++n)
        dQ_smem[n * 128] =
            make_float4(dQ_acc[4 * n], dQ_acc[4 * n + 1], dQ_acc[4 * n + 2], dQ_acc[4 * n + 3]);
      async_proxy_fence();
      named_barrier_arrive(DQ_FULL + step.count % ADDERS, 288);
      wgmma_wait<0>();
      wgmma_registers(dK_acc);
      if (leader) bar.q_ring.release(step.stage());  // and dO's
    };
    for (; step.more(); step.advance()) {
      const int first_row = step.m_block * BLOCK_M;
      if (first_key + BLOCK_N > min(first_row + rows.window_hi + 1, kv_len) ||
          first_key < first_row + BLOCK_M - 1 + rows.window_lo || step.partial() ||
          (block.packed && first_row + BLOCK_M > q_len))
        compute(Mask<true>());
      else compute(Mask<false>());
    }

    count = step.count;
    if (some) queue.release_keys(leader);

    // ---- epilogue: dK and dV go through the place of dS, and K and V can be loaded meanwhile
    named_barrier_sync(DS_READY, 256);  // hazard: the other still computes dQ from it
    const float scale[2] = {forward.softmax_scale, forward.softmax_scale}, one[2] = {1.0f, 1.0f};
    unsigned char* const staged = smem.dS[0] + consumer * DS_OF_CONSUMER + warp_id * 16 * 128;
    const int keys = kv_len - first_key - warp_key;
    store_panels(
        staged, dK_acc, scale, dK + block.of_keys(params.d_k) + warp_key * params.d_k.row,
        params.d_k.row, keys, HEAD_DIM);
    store_panels(
        staged, dV_acc, one, dV + block.of_keys(params.d_v) + warp_key * params.d_v.row,
        params.d_v.row, keys, HEAD_DIM);
    // hazard: others could overwrite what is staged, or the number
    if (PERSISTENT) named_barrier_sync(STORED + consumer, 128);
    queue.release_number(leader);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) hopper_backward_convert(
    const float* __restrict__ dQ_accum, Out<T>* __restrict__ dQ,
    const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- dQ: from the order of the fragments to rows
  const RowBlock block(params.forward, cu_seqlens_q);
  if (block.first_row < block.q_len) convert_fragments<THREADS>(block, dQ_accum, dQ, params);
}
