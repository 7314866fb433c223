// Tiles of 2-byte elements in shared memory, swizzled so that ldmatrix has no bank conflicts. A row
// has CHUNKS chunks of 16 bytes. Written out in steps/07_10_swizzle.cu and
// steps/07_12_addresses_by_xor.cu, explained in 07's notebook.

#pragma once

// How many neighbouring chunks of a row the swizzle permutes.
template <int CHUNKS>
constexpr int SWIZZLE_SPAN = CHUNKS % 8 == 0   ? 8
                             : CHUNKS % 4 == 0 ? 4
                                               : 2;

// The byte offset of a chunk in its tile. ldmatrix reads the same chunk of eight neighbouring rows:
// the exclusive or puts these eight in different banks.
template <int CHUNKS>
__device__ __forceinline__ unsigned swizzle(unsigned row, unsigned chunk) {
  constexpr unsigned SPAN = SWIZZLE_SPAN<CHUNKS>;
  return 16 * (row * CHUNKS + chunk / SPAN * SPAN + (chunk % SPAN ^ row / (8 / SPAN) % SPAN));
}

// The same row, `chunks` chunks further. Because tiles start at multiples of 128 bytes, and no bit
// is set both in the chunk at `address` and in `chunks`, that is an exclusive or of addresses: one
// instruction, and often none.
template <int CHUNKS>
__device__ __forceinline__ unsigned swizzle_advance(unsigned address, unsigned chunks) {
  constexpr unsigned SPAN_BYTES = 16 * SWIZZLE_SPAN<CHUNKS>;
  return (address ^ 16 * chunks % SPAN_BYTES) + 16 * chunks / SPAN_BYTES * SPAN_BYTES;
}
