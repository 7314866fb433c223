// Matrices between shared memory and registers, and products on tensor cores.
#pragma once
#include "conversions.h"
#include "memory.h"

namespace engine {
namespace ptx {

template <int N, bool Transposed, typename A>
ENGINE_INLINE Words ldmatrix(A base, long long offset, ENGINE_HERE) {
  Words row = {};
  if (lane_id() < 8 * N) row = *(const Words*)pointer<Space::shared, 16, A>(base, offset, "ldmatrix", file, line);
  return engine_ldmatrix("ldmatrix", N + 8 * Transposed, row, file, line);
}

template <int N, bool Transposed, typename A>
ENGINE_INLINE void stmatrix(A base, long long offset, Words words, ENGINE_HERE) {
  const Words row = engine_stmatrix("stmatrix", N + 8 * Transposed, words, file, line);
  if (lane_id() < 8 * N) *(Words*)pointer<Space::shared, 16, A>(base, offset, "stmatrix", file, line) = row;
}

// A matrix to its rows, and back by columns.
ENGINE_INLINE unsigned movmatrix(unsigned word, ENGINE_HERE) {
  const Words row = engine_stmatrix("movmatrix", 1, Words{word}, file, line);
  return engine_ldmatrix("movmatrix", 1 + 8, row, file, line)[0];
}

// ---------------------------------------------------------------- 8 bits: as GPUs of compute capability 9.0 compute it

// Two products of half, first of the low pair of every register, and the addend at last.
template <typename F>
ENGINE_INLINE Words halves(Words fours, int which) {
  Words found = {};
  for (int i = 0; i < 4; ++i)
    found[i] = as<unsigned>(decode_pair<F, Limit::none>((unsigned short)(fours[i] >> 16 * which)));
  return found;
}
template <typename A, typename B>
ENGINE_INLINE Words mma_eight(Words a, Words b, Words c, const char* file, int line) {
  Words sum = {};
  for (int which = 0; which < 2; ++which)
    sum = engine_mma(K16_F16, halves<A>(a, which), halves<B>(b, which), sum, file, line);
  for (int i = 0; i < 4; ++i)
    sum[i] = as<unsigned>(limited<Limit::none>(as<float>((unsigned)sum[i]) + as<float>((unsigned)c[i])));
  return sum;
}
template <typename A, typename B>
ENGINE_INLINE Words mma_eight_half(Words a, Words b, Words c, const char* file, int line) {
  Words sum = {};
  for (int which = 0; which < 2; ++which)
    sum = engine_mma(K16_HALF, halves<A>(a, which), halves<B>(b, which), sum, file, line);
  for (int i = 0; i < 2; ++i)
    sum[i] = as<unsigned>(
        add<F16x2, To::nearest, Limit::none, false>(as<F16x2>((unsigned)sum[i]), as<F16x2>((unsigned)c[i])));
  return sum;
}

// ---------------------------------------------------------------- integers, bits and doubles

template <int M, int K, int BITS, bool SIGNED_A, bool SIGNED_B, bool SATURATED, char HOW>
ENGINE_INLINE Words mma_other(Words a, Words b, Words c, ENGINE_HERE) {
  static constexpr Products form = {M, K, BITS, SIGNED_A, SIGNED_B, SATURATED, HOW};
  return engine_mma_other(&form, a, b, c, file, line);
}

}  // namespace ptx
}  // namespace engine
