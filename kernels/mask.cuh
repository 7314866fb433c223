// Masks as bits: which keys of a thread a row sees. Written out in steps/07_15_masks_as_bits.cu,
// explained in 07's notebook.

#pragma once

// One bit for each of a thread's keys 8 n and 8 n + 1 of KEYS: set for those before `limit`. The
// compiler moves up to seven such bits into predicates by one instruction, R2P, instead of
// comparing each key with both ends of the window.
template <int KEYS>
__device__ __forceinline__ unsigned keys_before(int limit) {
  static_assert(KEYS <= 128, "one bit per key of a thread");
  const int keys = min(max(limit, 0), KEYS);
  return (1ull << (keys / 8 * 2 + min(keys % 8, 2))) - 1;
}
