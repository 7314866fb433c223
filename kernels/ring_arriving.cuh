// What ring attention (17) adds to 10, and without it nothing: behind its own keys, a tile of rows goes
// through keys of the next rank, which a copy engine brings while the kernel runs. So one grid computes
// two steps of the ring, with one start and one end (Chang et al., 2024, "FLUX", for products of matrices).
//
// A copy that needs multiprocessors, as NCCL's kernels do, could wait for one that all blocks hold, which
// wait for the copy: a deadlock. helpers/attention/ring_joined.py puts the definitions of parameters
// before the text of the kernel.

#pragma once
#include "hopper_tiles.cuh"
#include "softmax.cuh"
#include "tile_io.cuh"

#ifndef ARRIVING_PARAMETERS
#define ARRIVING_PARAMETERS  // of a kernel, behind its own
#define ARRIVING_ARGUMENTS   // the same, in the order of ArrivingKeys
#define ARRIVES 0
#endif

// Key tiles count down to the first key of a rank's own, 0. Tiles of arriving keys follow at -BLOCK_N,
// -2 BLOCK_N and so on: the first of these keys first.
struct ArrivingKeys {
#if ARRIVES
  const TensorMap& k_map;  // boxes of BLOCK_N rows, as those of the own keys
  const TensorMap& v_map;
  const int* arrived;  // how many heads of K and V are there, of all sequences: copied behind them
  int keys;            // of a head
  int first_row;       // of Q, from which on rows see them
  int seen = 0;        // `arrived`, as it was last read

  __device__ __forceinline__ int last_tile(const Tile& tile) const {
    const bool sees = tile.row + min(BLOCK_M, tile.rows) > first_row;
    return sees ? -(keys + BLOCK_N - 1) / BLOCK_N * BLOCK_N : tile.begin;
  }
  __device__ __forceinline__ int key(int first) const { return -first - BLOCK_N; }

  // Called by the thread that copies K or V: copies a tile as soon as it is there.
  __device__ __forceinline__ void load(
      unsigned target, unsigned full, bool of_k, const Tile& tile, int first,
      const AttentionParams& params) {
    const int needed = tile.sequence * params.kv_heads + tile.kv_head + 1;
    if (seen < needed) {
      for (;;) {
        asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
        if (seen >= needed) break;
        __nanosleep(100);
      }
      // hazard: TMA could read what was there before the keys
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    tma_load_panels<BLOCK_N, PANELS>(
        target, of_k ? k_map : v_map, full, key(first), tile.kv_head, tile.sequence);
  }

  // Scores of keys behind the last one, and of rows that see none of them. warp_row: the warp's first.
  template <int N>
  __device__ __forceinline__ void mask(
      float (&S)[N], const Tile& tile, int first, int warp_row) const {
    const int left = keys - key(first);
    if (first >= 0 || (left >= BLOCK_N && tile.row >= first_row)) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int end = tile.row + warp_row + 8 * i + g >= first_row ? left - 2 * t : 0;
#pragma unroll
      for (int n = 0; n < N / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e >= end) S[4 * n + 2 * i + e] = NEG_INF;
    }
  }
#else
  __device__ __forceinline__ int last_tile(const Tile& tile) const { return tile.begin; }
  template <typename... All>
  __device__ __forceinline__ void load(const All&...) const {}
  template <typename... All>
  __device__ __forceinline__ void mask(const All&...) const {}
#endif
};
