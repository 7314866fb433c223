// The order of a block of 13: its steps, an M block each; their mbarriers and loads; and the scores that
// a step begins with. SharedStorage, where a kernel's tiles are in shared memory, is its own.

#pragma once
#include "backward_blocks.cuh"
#include "backward_hooks.cuh"  // nothing, until the library adds something (11)
#include "backward_params.cuh"
#include "hopper.cuh"
#include "tile_io.cuh"

#ifndef FIRST_STORES
#define FIRST_STORES 0  // 1: see hopper_backward_first_store.cuh
#endif

using Scores = float[BLOCK_M / 2];  // S^T or dP^T: element 4 n + 2 i + e is key g + 8 i of the
                                    // warp's 16, row 8 n + 2 t + e

// The same as 8 rows after 8 rows of the warp's 16 keys, for hooks.
__device__ __forceinline__ float (&fragments(Scores& S))[1][BLOCK_M / 8][4] {
  return reinterpret_cast<float (&)[1][BLOCK_M / 8][4]>(S);
}

// The steps of a block: an M block each, and its stage in the ring of Q and dO. With FIRST_STORES, a block
// begins at the tile of its first key, and goes up, and round: blocks that begin together do not meet. With
// last_first, a block goes up, too: from the rows that no block before it has to add to.
template <int N>
struct Steps : MBlock {
  int count = 0, start = 0, first;  // start: the count of the block's first step

  __device__ __forceinline__ Steps(const KeyBlock& block, const RowRange& rows, const Hooks& hooks)
      : MBlock(block, rows, hooks) {
    const int tiles = max(rows.last_tile - rows.first_tile + 1, 1);
    first = rows.first_tile + max(block.first_key / BLOCK_M - rows.first_tile, 0) % tiles;
    if (block.last_first) first = rows.first_tile;
    if (goes_up()) m_block = first;
  }
  __device__ __forceinline__ bool goes_up() const { return FIRST_STORES || block.last_first; }
  __device__ __forceinline__ bool more() const { return !rows.empty() && exists(); }
  __device__ __forceinline__ void advance() {
    ++count;
    if (!goes_up()) return MBlock::advance();
    m_block = m_block < rows.last_tile ? m_block + 1 : rows.first_tile;
    head += m_block == first;
  }
  __device__ __forceinline__ PipelineState<N> stage() const {
    return {count % N, unsigned(count / N % 2)};
  }
};

// One mbarrier for K and one for V; a ring for Q and one for dO, which are released together.
template <int N>
struct Barriers {
  unsigned k_full, v_full;
  Ring<N> q_ring, do_ring;

  template <typename SharedStorage>
  __device__ __forceinline__ explicit Barriers(SharedStorage& smem)
      : k_full(smem_address(&smem.k_full)),
        v_full(smem_address(&smem.v_full)),
        q_ring(smem_address(smem.q_full), smem_address(smem.empty)),
        do_ring(smem_address(smem.do_full), smem_address(smem.empty)) {}
  // By one thread.
  __device__ __forceinline__ void init(int consumers) const {
    mbarrier_init(k_full, 1);
    mbarrier_init(v_full, 1);
    q_ring.init(consumers);
    do_ring.init_full();
    mbarrier_init_fence();
  }
};

// By one thread: the tiles of rows of a step, and with those of the first the keys. RING: it waits until
// the stage is free. keys_empty: called before the keys are loaded, which then come last.
template <bool RING = true, typename SharedStorage, int N, typename... KeysEmpty>
__device__ __forceinline__ void load(
    const Steps<N>& step, const KeyBlock& block, SharedStorage& smem, const Barriers<N>& bar,
    const TensorMap& q_map, const TensorMap& do_map, const TensorMap& k_map, const TensorMap& v_map,
    const float* lse_delta, const KeysEmpty&... keys_empty) {
  constexpr bool KEYS_LAST = PERSISTENT && sizeof...(KeysEmpty) > 0;
  constexpr int PANELS = sizeof(smem.K) / (BLOCK_N * 128);
  const int stage = step.stage().index, row = block.q_first + step.m_block * BLOCK_M;
  const int head = block.first_head() + step.head;
  const int batch = block.packed ? 0 : block.sequence;
  const float* const lse = lse_delta + (long long)step.slot() * (2 * BLOCK_M);
  const auto load_keys = [&](unsigned char* tile, const TensorMap& map, unsigned full) {
    if (step.count > step.start) return;
    mbarrier_arrive_expect_tx(full, sizeof(smem.K));
    tma_load_panels<BLOCK_N, PANELS>(
        smem_address(tile), map, full, block.k_first + block.first_key, block.kv_head(), batch);
  };
  const auto load_rows = [&](const Ring<N>& ring, unsigned char* tile, const TensorMap& map,
                             float* numbers_smem, const float* numbers) {
    const unsigned full = ring.expect(step.stage(), sizeof(smem.Q[0]) + 4 * BLOCK_M);
    tma_load_panels<BLOCK_M, PANELS>(smem_address(tile), map, full, row, head, batch);
    bulk_load(smem_address(numbers_smem), numbers, full, 4 * BLOCK_M);
  };
  if (!KEYS_LAST) load_keys(smem.K, k_map, bar.k_full);
  if (RING) bar.q_ring.wait_empty(step.stage());  // hazard: products still read it
  load_rows(bar.q_ring, smem.Q[stage], q_map, smem.lse[stage], lse);
  if (!KEYS_LAST) load_keys(smem.V, v_map, bar.v_full);
  load_rows(bar.do_ring, smem.dO[stage], do_map, smem.delta[stage], lse + BLOCK_M);
  if (!KEYS_LAST || step.count > step.start) return;
  (keys_empty(), ...);
  load_keys(smem.K, k_map, bar.k_full);
  load_keys(smem.V, v_map, bar.v_full);
}

// Issues S^T = K Q^T or dP^T = V dO^T for the warpgroup's 64 keys, 16 of COLUMNS columns at a time.
template <typename T, int COLUMNS>
__device__ __forceinline__ void start_scores(
    Scores& S, unsigned long long keys, unsigned long long rows) {
  wgmma_registers(S);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < COLUMNS / 16; ++i)
    wgmma_ss(T(), S, advance_columns(keys, i, BLOCK_N), advance_columns(rows, i, BLOCK_M), i > 0);
  wgmma_commit();
}
