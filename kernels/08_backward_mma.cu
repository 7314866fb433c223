// 08 backward_mma: the gradients of attention on tensor cores, FlashAttention-2's backward with
// transposed scores.
//
// A block owns a tile of keys: K and V in shared memory, dK and dV in registers, while tiles of
// rows stream through by cp.async. The scores are transposed (FlashAttention-3's idea), so that a
// warp that has all rows of its keys keeps P^T and dS^T in registers as left operands. Blocks add to
// dQ atomically, in float32 and in the order of the fragments. dQ of a tile of rows is computed one
// iteration later, so that an iteration needs one barrier of the whole block.
//
// Launch, shapes, traffic: see backward_tiles.cuh

// The skeleton, which notebook 08b explains. backward_tiles.cuh: sizes of tiles; KeyBlock, RowRange,
// MBlock and Warp (what a block and a warp have); load_tile, gemm_abt and gemm_ab.
#include "backward_convert.cuh"   // dQ after the loop
#include "backward_epilogue.cuh"  // stores dK and dV in float32, for 17
#include "backward_hooks.cuh"     // nothing, until the library adds something (11)
#include "semaphore.cuh"          // DqSemaphore: the order of additions to dQ, if it matters

#ifndef VECTOR_ATOMICS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VECTOR_ATOMICS 1  // four floats in one instruction, from sm_90 on
#else
#define VECTOR_ATOMICS 0
#endif
#endif
#ifndef DQ_LATER
#define DQ_LATER 1  // 1: dQ is computed one iteration later, which takes two buffers of dS; 0: one
#endif

constexpr bool P_IN_REGISTERS =
    WARPS_KEYS == WARPS && WARPS_DKV == WARPS;  // and dS^T, for dV and dK
// Of the scores that dV and dK need, those that a warp has computed itself.
constexpr bool OWN_IN_REGISTERS = WARPS_KEYS == WARPS_DKV;
// Neighbouring warps that have keys in common.
constexpr int GROUP_WARPS = WARPS_ROWS > WARPS_DKV_D ? WARPS_ROWS : WARPS_DKV_D;
// The order of the work in an iteration. P is in registers at head_dim 64 and in shared memory at 128:
// for each, the order that was fastest on an H200, causal and full masks together. Neither spills.
constexpr bool MASK_FIRST = P_IN_REGISTERS;  // before dP^T; otherwise after it
constexpr bool LOAD_FIRST = P_IN_REGISTERS;  // the next tiles, at the start; otherwise after dP^T
constexpr bool STAGGERED =
    DQ_LATER && !P_IN_REGISTERS;  // half the warps compute dQ at the end of an iteration
// Shared memory: K, V, Q and dO, dS, P, lse and delta.
constexpr unsigned Q_OFFSET = 2 * KEYS_BYTES, DS_OFFSET = Q_OFFSET + 2 * STAGE_BYTES;
constexpr unsigned P_OFFSET = DS_OFFSET + (1 + DQ_LATER) * SCORES_BYTES,
                   LSE_OFFSET = P_OFFSET + !P_IN_REGISTERS * SCORES_BYTES;
constexpr unsigned SHARED_BYTES = LSE_OFFSET + 2 * LSE_DELTA_BYTES;
static_assert(
    DQ_LATER || !P_IN_REGISTERS, "without a second buffer, P and dS pass through shared memory");

// Four floats of dQ_accum. They are in the order of the fragments: neighbouring lanes have
// neighbouring addresses.
__device__ __forceinline__ void atomic_add(float* dQ_accum, int fragment, const float (&d)[4]) {
  const int lane_id = threadIdx.x % 32;
#if VECTOR_ATOMICS
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   dQ_accum + 128 * fragment + 4 * lane_id),
               "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(dQ_accum + 128 * fragment + 32 * i + lane_id, d[i]);
#endif
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_mma_preprocess(
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
__global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward_mma(
    const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
    const T* __restrict__ dO, const float* __restrict__ lse_delta, float* __restrict__ dQ_accum,
    int* __restrict__ dq_semaphore, KeyOut<T>* __restrict__ dK, KeyOut<T>* __restrict__ dV,
    const int* __restrict__ cu_seqlens_q,  // [sequences + 1]: where each begins; or null
    const int* __restrict__ cu_seqlens_k,  // [sequences + 1]
    const BackwardParams params HOOK_PARAMETERS) {
  // ---- prologue: the keys of this block, and the tiles of rows that see one of them
  const AttentionParams& forward = params.forward;
  const KeyBlock block(
      DETERMINISTIC || forward.window_right < UNLIMITED,
      BlockNumber{dq_semaphore, cu_seqlens_q != nullptr, forward}, forward, cu_seqlens_q,
      cu_seqlens_k);
  const int first_key = block.first_key, q_len = block.q_len, kv_len = block.kv_len;
  if (first_key >= kv_len) return;  // the whole block: its sequence is shorter than the longest
  Q += block.of_rows(forward.q);
  dO += block.of_rows(params.d_o);
  K += block.of_shared_keys(forward.k);
  V += block.of_shared_keys(forward.v);
  dK += block.of_keys(params.d_k);
  dV += block.of_keys(params.d_v);
  const RowRange rows(block, forward);
  DqSemaphore semaphore(dq_semaphore, block, rows);
  lse_delta += rows.first_slot * (2 * BLOCK_M);
  dQ_accum += rows.first_slot * (BLOCK_M * DQ_COLUMNS);

  // Each lane passes the address of one row to ldmatrix; *_lane is its address in the warp's first
  // fragment.
  extern __shared__ __align__(128) unsigned char dynamic_smem[];
  const unsigned K_smem = smem_address(dynamic_smem), V_smem = K_smem + KEYS_BYTES,
                 Q_smem = K_smem + Q_OFFSET;
  const unsigned dS_smem = K_smem + DS_OFFSET, P_smem = K_smem + P_OFFSET,
                 lse_smem = K_smem + LSE_OFFSET;
  const Warp warp;
  const int lane_id = warp.lane_id, g = warp.g, t = warp.t;
  const unsigned k_lane =
      K_smem + swizzle<CHUNKS>(warp.key + lane_id % 16, lane_id / 16);  // A of S^T
  const unsigned q_lane =
      Q_smem + swizzle<CHUNKS>(warp.row + lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2);  // B
  const unsigned scores_lane =
      swizzle<ROW_CHUNKS>(warp.key + g, warp.row / 8) + 4 * t;  // P^T and dS^T are written
  const unsigned q_dkv =
      Q_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16 + 2 * warp.dkv_block);  // B, with dO
  const unsigned dS_dq =
      dS_smem + swizzle<ROW_CHUNKS>(
                    lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2 + warp.dq_row / 8);  // A of dQ
  const unsigned k_dq =
      K_smem + swizzle<CHUNKS>(lane_id % 16, lane_id / 16 + 2 * warp.dq_block);  // B

  const int copy_row = threadIdx.x / COPY_CHUNKS,
            copy_chunk = threadIdx.x % COPY_CHUNKS;  // this thread copies
  const unsigned copy_offset = swizzle<CHUNKS>(copy_row, copy_chunk);
  Q += copy_row * forward.q.row + 8 * copy_chunk;
  dO += copy_row * params.d_o.row + 8 * copy_chunk;
  const auto load_q = [&](const MBlock& tile, unsigned stage) {
    const int row = tile.m_block * BLOCK_M;
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_smem + stage * STAGE_BYTES + copy_offset,
        Q + tile.head * forward.q.head + row * forward.q.row, forward.q.row, q_len - row - copy_row,
        HEAD_DIM);
    if (threadIdx.x < BLOCK_M / 2)
      cp_async(
          lse_smem + stage * LSE_DELTA_BYTES + 16 * threadIdx.x,
          lse_delta + tile.slot() * (2 * BLOCK_M) + 4 * threadIdx.x, 16);
  };
  const auto load_do = [&](const MBlock& tile, unsigned stage) {
    const int row = tile.m_block * BLOCK_M;
    load_tile<BLOCK_M, CHUNKS, THREADS>(
        Q_smem + stage * STAGE_BYTES + ROWS_BYTES + copy_offset,
        dO + tile.head * params.d_o.head + row * params.d_o.row, params.d_o.row,
        q_len - row - copy_row, HEAD_DIM);
    cp_async_commit();
  };

  float dK_acc[DKV_TILES][2 * DKV_BLOCKS][4] = {}, dV_acc[DKV_TILES][2 * DKV_BLOCKS][4] = {};
  const float softmax_scale_log2 = scale_log2_of(forward.softmax_scale);

  // dQ += dS K for the tile of rows that has the number slot in dQ_accum, from one of the buffers of dS.
  const auto add_dq = [&](int slot, unsigned dS_buffer) {
    float dQ_acc[DQ_TILES][2 * DQ_BLOCKS][4] = {};
    gemm_ab<BLOCK_N / 16, WARPS_DQ_D>(
        T(), dQ_acc, FromTransposedTile<ROW_CHUNKS>{dS_dq + dS_buffer}, k_dq, warp.dq_blocks);
    float* const target = dQ_accum + (long long)slot * (BLOCK_M * DQ_COLUMNS);
#pragma unroll
    for (int m = 0; m < DQ_TILES; ++m)
#pragma unroll
      for (int n = 0; n < 2 * DQ_BLOCKS; ++n)
        if (COLUMN_BLOCKS % WARPS_DQ_D == 0 || n / 2 < warp.dq_blocks)
          atomic_add(target, (warp.id * DQ_TILES + m) * 2 * DQ_BLOCKS + n, dQ_acc[m][n]);
  };

  const Hooks hooks = {
      HOOK_ARGUMENTS block.sequence, block.first_head(), block.kv_head(), q_len, kv_len};
  MBlock tile(block, rows, hooks);
  load_tile<BLOCK_N, CHUNKS, THREADS>(
      K_smem + copy_offset, K + copy_row * forward.k.row + 8 * copy_chunk, forward.k.row,
      kv_len - first_key - copy_row, HEAD_DIM);
  if (!rows.empty()) load_q(tile, 0);
  load_tile<BLOCK_N, CHUNKS, THREADS>(
      V_smem + copy_offset, V + copy_row * forward.v.row + 8 * copy_chunk, forward.v.row,
      kv_len - first_key - copy_row, HEAD_DIM);
  if (!rows.empty()) load_do(tile, 0);
  else cp_async_commit();  // no row sees these keys; the epilogue waits for K and V all the same

  // ---- all heads of the group, and their tiles of rows from the last to the first
  unsigned stage = 0;
  DqTile previous, before_previous;  // those of the last two iterations
  for (MBlock next = tile; !rows.empty() && tile.exists(); tile = next, stage ^= 1) {
    const int first_row = tile.m_block * BLOCK_M;
    // due: its dQ is computed in this iteration. done: it was in the one before; all threads have
    // added to its dQ when they meet at the barrier below.
    const DqTile current = {tile.slot(), tile.m_block};
    const DqTile due = DQ_LATER ? previous : current, done = DQ_LATER ? before_previous : previous;
    next.advance();
    if (DQ_LATER) semaphore.wait(due);
    cp_async_wait<0>();
    // Without it, these tiles could be read before their copies land, or the previous ones
    // overwritten while in use.
    __syncthreads();
    semaphore.pass(done);
    semaphore.peek(current);
    const auto load_next = [&] {
      if (!next.exists()) return;
      load_q(next, stage ^ 1);
      load_do(next, stage ^ 1);
    };
    if (LOAD_FIRST) load_next();

    // Where dS has two buffers, that of the tile before is read while this tile's is written.
    const unsigned dS_stage = DQ_LATER ? stage * SCORES_BYTES : 0;
    const unsigned dS_due = DQ_LATER ? SCORES_BYTES ^ dS_stage : 0;
    const bool dq_first = DQ_LATER && (!STAGGERED || warp.id < WARPS / 2);
    if (due.exists() && dq_first) add_dq(due.slot, dS_due);

    const unsigned stage_bytes = stage * STAGE_BYTES;
    const bool masked = first_key + BLOCK_N > min(first_row + rows.window_hi + 1, kv_len) ||
                        first_key < first_row + BLOCK_M - 1 + rows.window_lo || tile.partial();
    const float* const own_lse =
        reinterpret_cast<const float*>(dynamic_smem + LSE_OFFSET + stage * LSE_DELTA_BYTES);
#pragma unroll
    for (int c = 0; c < WARP_ROWS / SLICE_M; ++c) {
      float S[KEY_TILES][SLICE_M / 8][4] = {}, dP[KEY_TILES][SLICE_M / 8][4];
      gemm_abt(T(), S, k_lane, q_lane + stage_bytes + 2 * c * SLICE_M * HEAD_DIM_PADDED);
      const int q_idx = first_row + warp.row + c * SLICE_M + 2 * t + kv_len - q_len;
      const int kv_idx = first_key + warp.key + g;
      HookGradient<KEY_TILES, SLICE_M / 8, 4> grad;
      hook_scores(S, grad, tile.hooks(), forward.softmax_scale, q_idx, kv_idx);
#pragma unroll
      for (int n = 0; n < SLICE_M / 8; ++n) {
        const float2* const own =
            reinterpret_cast<const float2*>(own_lse + warp.row + c * SLICE_M + 8 * n + 2 * t);
        const float2 lse = own[0], delta = own[BLOCK_M / 2];  // BLOCK_M floats further on
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float shift = i % 2 ? lse.y : lse.x;
            S[m][n][i] = exp2f(fmaf(S[m][n][i], softmax_scale_log2, -shift));
            dP[m][n][i] = i % 2 ? -delta.y : -delta.x;  // so that the product adds to -delta
          }
      }
      const auto mask = [&] {  // a key that a row does not see has the weight 0
        const int key = first_key + warp.key + g, row = first_row + warp.row + c * SLICE_M + 2 * t;
#pragma unroll
        for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
          for (int n = 0; n < SLICE_M / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int j = key + 16 * m + i / 2 * 8, distance = j - (row + 8 * n + i % 2);
              if (distance < rows.window_lo || distance > rows.window_hi || j >= kv_len)
                S[m][n][i] = 0.0f;
            }
        hook_weights(S, grad, tile.hooks(), q_idx, kv_idx, tile.partial());
      };
      if (MASK_FIRST && masked) mask();
      gemm_abt(
          T(), dP, k_lane + KEYS_BYTES,
          q_lane + stage_bytes + ROWS_BYTES + 2 * c * SLICE_M * HEAD_DIM_PADDED);
      if (!MASK_FIRST && masked) mask();
      hook_gradients(dP, grad);
      if (!LOAD_FIRST && c == 0) load_next();

      // Two accumulators of 16 keys by 8 rows have the layout of a left operand of 16 by 16: they
      // are only rounded to 16 bits.
      unsigned P_half[KEY_TILES][SLICE_M / 16][4], dS_half[KEY_TILES][SLICE_M / 16][4];
#pragma unroll
      for (int m = 0; m < KEY_TILES; ++m)
#pragma unroll
        for (int k = 0; k < SLICE_M / 16; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 p = operand_pair(S[m], k, i), dp = operand_pair(dP[m], k, i);
            P_half[m][k][i] = pack(T(), p.x, p.y);
            dS_half[m][k][i] = pack(T(), p.x * dp.x, p.y * dp.y);
            const unsigned place =
                swizzle_advance<ROW_CHUNKS>(scores_lane, c * (SLICE_M / 8) + 2 * k + i / 2) +
                2 * (16 * m + i % 2 * 8) * BLOCK_M;
            store_pair(dynamic_smem + DS_OFFSET + dS_stage, place, dS_half[m][k][i]);
            if (!P_IN_REGISTERS) store_pair(dynamic_smem + P_OFFSET, place, P_half[m][k][i]);
          }
      if constexpr (OWN_IN_REGISTERS) {  // dV and dK, from the rows of this warp
        const unsigned b_lane =
            q_dkv + stage_bytes + 2 * (warp.row + c * SLICE_M) * HEAD_DIM_PADDED;
        const FromRegisters<KEY_TILES, SLICE_M / 16> P_dv{P_half}, dS_dk{dS_half};
        gemm_ab<SLICE_M / 16, WARPS_DKV_D>(T(), dV_acc, P_dv, b_lane + ROWS_BYTES, warp.dkv_blocks);
        gemm_ab<SLICE_M / 16, WARPS_DKV_D>(T(), dK_acc, dS_dk, b_lane, warp.dkv_blocks);
      }
    }

    if constexpr (!P_IN_REGISTERS) {  // dV and dK, from the rows that are not done above
      if (DQ_LATER) {
        // without it, P and dS could be read before the other warps with these keys have written
        // theirs
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp.id / GROUP_WARPS), "n"(32 * GROUP_WARPS)
                     : "memory");
      } else {
        semaphore.wait(due);
        __syncthreads();  // without it, dS could be read before all warps have written theirs
      }
#pragma unroll
      for (int r = OWN_IN_REGISTERS; r < WARPS_ROWS; ++r) {  // r = 0: this warp's own rows
        const int row = warp.row ^ r * WARP_ROWS;
        const unsigned a_lane =
            swizzle<ROW_CHUNKS>(warp.dkv_key + lane_id % 16, lane_id / 16 + row / 8);
        const unsigned b_lane = q_dkv + stage_bytes + 2 * row * HEAD_DIM_PADDED;
        const FromTile<ROW_CHUNKS> P_dv{P_smem + a_lane}, dS_dk{dS_smem + dS_stage + a_lane};
        gemm_ab<WARP_ROWS / 16, WARPS_DKV_D>(
            T(), dV_acc, P_dv, b_lane + ROWS_BYTES, warp.dkv_blocks);
        gemm_ab<WARP_ROWS / 16, WARPS_DKV_D>(T(), dK_acc, dS_dk, b_lane, warp.dkv_blocks);
      }
    }
    if (due.exists() && !dq_first) add_dq(due.slot, dS_due);
    before_previous = previous;
    previous = current;
  }
  if (DQ_LATER && previous.exists()) {
    semaphore.wait(previous);
    __syncthreads();  // without it, dS could be read before the other warps have written theirs
    semaphore.pass(before_previous);
    add_dq(previous.slot, (stage ^ 1) * SCORES_BYTES);
  }
  if (DETERMINISTIC) {
    __syncthreads();  // without it, the semaphore could pass before the other threads' additions
    semaphore.pass(previous);
  }

  // ---- epilogue: by way of shared memory, to write 16 bytes at a time
  cp_async_wait<0>();
  if constexpr (sizeof(KeyOut<T>) > sizeof(T))  // float32: results that are not rounded
    return store_from_registers(dK, dV, dK_acc, dV_acc, block, warp, params);
  __syncthreads();  // without it, K and V could be overwritten while other warps still read them
  const unsigned out_lane = swizzle<CHUNKS>(warp.dkv_key + g, 2 * warp.dkv_block) + 4 * t;
#pragma unroll
  for (int m = 0; m < DKV_TILES; ++m)
#pragma unroll
    for (int n = 0; n < 2 * DKV_BLOCKS; ++n) {
      if (COLUMN_BLOCKS % WARPS_DKV_D != 0 && n / 2 >= warp.dkv_blocks) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float *x = &dK_acc[m][n][2 * h], *y = &dV_acc[m][n][2 * h];
        unsigned char* const row = dynamic_smem + 2 * (16 * m + 8 * h) * HEAD_DIM_PADDED;
        const unsigned place = swizzle_advance<CHUNKS>(out_lane, n / 2 * 2 * WARPS_DKV_D + n % 2);
        store_pair(
            row, place, pack(T(), x[0] * forward.softmax_scale, x[1] * forward.softmax_scale));
        store_pair(row + KEYS_BYTES, place, pack(T(), y[0], y[1]));
      }
    }
  __syncthreads();  // without it, rows could be copied before the other warps have written theirs
  dK += copy_row * params.d_k.row + 8 * copy_chunk;
  dV += copy_row * params.d_v.row + 8 * copy_chunk;
#pragma unroll
  for (int i = 0; i < BLOCK_N; i += THREADS / COPY_CHUNKS)
#pragma unroll
    for (int j = 0; j < CHUNKS; j += COPY_CHUNKS) {
      if (i + copy_row >= min(kv_len - first_key, BLOCK_N) || 8 * (copy_chunk + j) >= HEAD_DIM)
        continue;
      const unsigned char* const source = dynamic_smem + copy_offset + 16 * (i * CHUNKS + j);
      *reinterpret_cast<uint4*>(dK + i * params.d_k.row + 8 * j) =
          *reinterpret_cast<const uint4*>(source);
      *reinterpret_cast<uint4*>(dV + i * params.d_v.row + 8 * j) =
          *reinterpret_cast<const uint4*>(source + KEYS_BYTES);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_mma_convert(
    const float* __restrict__ dQ_accum, Out<T>* __restrict__ dQ,
    const int* __restrict__ cu_seqlens_q, const BackwardParams params) {
  // ---- dQ: from the order of the fragments to rows
  const RowBlock block(params.forward, cu_seqlens_q);
  if (block.first_row < block.q_len) convert_fragments<VECTOR_ATOMICS>(block, dQ_accum, dQ, params);
}
