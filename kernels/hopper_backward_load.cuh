// What 13 and its steps load, and the mbarriers that say so. Whoever includes this says before where in
// shared memory tiles are, V_AT, Q_AT and DO_AT, the numbers of their rows, LSE_AT and DELTA_AT, and
// the mbarriers, BARRIERS_AT.

#pragma once
#include "hopper_backward_steps.cuh"

// One mbarrier for K and one for V; for each stage one for Q, one for dO, and one for both being read.
struct Barriers {
  const unsigned k_full, v_full, q_full, do_full, empty;
  __device__ __forceinline__ explicit Barriers(unsigned K_smem)
      : k_full(K_smem + BARRIERS_AT),
        v_full(k_full + 8),
        q_full(v_full + 8),
        do_full(q_full + 8 * STAGES),
        empty(do_full + 8 * STAGES) {}
  // By one thread.
  __device__ __forceinline__ void init() const {
    mbarrier_init(k_full, 1);
    mbarrier_init(v_full, 1);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(q_full + 8 * stage, 1);
      mbarrier_init(do_full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, CONSUMERS);
    }
    mbarrier_init_fence();
  }
};

// By one thread: the tiles of rows of a step, and with those of the first the keys. RING: it waits until
// the stage is free.
template <bool RING = true, typename Step>
__device__ __forceinline__ void load(
    const Step& step, const KeyBlock& block, unsigned K_smem, const Barriers& bar,
    const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map, const TensorMap& v_map,
    const float* lse_delta) {
  const int stage = step.stage(), row = block.q_first + step.row_tile * BLOCK_M;
  const int head = block.kv_head * block.group + step.head;
  const int batch = block.packed ? 0 : block.sequence;
  const float* const lse = lse_delta + (long long)step.slot() * (2 * BLOCK_M);
  const auto load_keys = [&](unsigned target, const TensorMap& map, unsigned full) {
    if (step.count > 0) return;
    mbarrier_arrive_expect_tx(full, KEYS_BYTES);
    tma_load_panels<BLOCK_N, PANELS>(
        target, map, full, block.k_first + block.first_key, block.kv_head, batch);
  };
  const auto load_rows = [&](unsigned tiles_at, const TensorMap& map, unsigned full,
                             unsigned numbers_at, const float* numbers) {
    mbarrier_arrive_expect_tx(full + 8 * stage, ROWS_BYTES + 4 * BLOCK_M);
    tma_load_panels<BLOCK_M, PANELS>(
        K_smem + tiles_at + stage * ROWS_BYTES, map, full + 8 * stage, row, head, batch);
    bulk_load(K_smem + numbers_at + stage * 4 * BLOCK_M, numbers, full + 8 * stage, 4 * BLOCK_M);
  };
  load_keys(K_smem, k_map, bar.k_full);
  if (RING)
    mbarrier_wait(bar.empty + 8 * stage, step.parity() ^ 1);  // hazard: products still read it
  load_rows(Q_AT, q_map, bar.q_full, LSE_AT, lse);
  load_keys(K_smem + V_AT, v_map, bar.v_full);
  load_rows(DO_AT, do_map, bar.do_full, DELTA_AT, lse + BLOCK_M);
}
