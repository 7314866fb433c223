// Words taken as two halves of 16 bits or as four bytes (the SIMD video intrinsics), minima and maxima of three and of
// sums (DPX), and the dot products of bytes. Each lane of a word is computed in int, where nothing overflows.
#pragma once
#include "vector_types.h"

namespace engine {
namespace simd {

// The lanes of a word, signed or not, one after the other: f(lane of a, lane of b), of which the low bits are kept.
template <int Lanes, bool Signed>
ENGINE_INLINE auto lane_of(unsigned word, int lane) {
  constexpr int bits = 32 / Lanes;
  const unsigned up = word << (32 - bits - lane * bits);
  return Signed ? (int)up >> (32 - bits) : (int)(up >> (32 - bits));
}
template <int Lanes, bool Signed, typename F>
ENGINE_INLINE auto each_lane(unsigned a, unsigned b, F f) {
  constexpr int bits = 32 / Lanes;
  unsigned result = 0;
  for (int lane = 0; lane < Lanes; ++lane) {
    const unsigned one = (unsigned)f(lane_of<Lanes, Signed>(a, lane), lane_of<Lanes, Signed>(b, lane));
    result |= (one & ((1u << bits) - 1)) << (lane * bits);
  }
  return result;
}
template <int Lanes, bool Signed>
ENGINE_INLINE auto saturated(int value) {
  constexpr int high = Signed ? (1 << (32 / Lanes - 1)) - 1 : (1 << (32 / Lanes)) - 1, low = Signed ? -high - 1 : 0;
  return value < low ? low : value > high ? high : value;
}
template <int Lanes, bool Signed>
ENGINE_INLINE auto sum_of_differences(unsigned a, unsigned b) {
  unsigned sum = 0;
  for (int lane = 0; lane < Lanes; ++lane) {
    const int x = lane_of<Lanes, Signed>(a, lane), y = lane_of<Lanes, Signed>(b, lane);
    sum += (unsigned)(x > y ? x - y : y - x);
  }
  return sum;
}
// Half of a sum, rounded to nearest; a half goes away from zero.
ENGINE_INLINE int signed_average(int sum) { return sum < 0 ? sum >> 1 : (sum + 1) >> 1; }

}  // namespace simd
}  // namespace engine

// x and y are the lanes. SATURATE keeps a result within what a lane holds; without it the low bits are kept.
#define ENGINE_LANES(NAME, LANES, SIGNED, EXPRESSION)                                                                 \
  static inline unsigned NAME(unsigned a, unsigned b) {                                                               \
    return engine::simd::each_lane<LANES, SIGNED>(a, b, [](int x, int y) { return (void)x, (void)y, (EXPRESSION); }); \
  }
#define ENGINE_LANES1(NAME, LANES, EXPRESSION)                                                       \
  static inline unsigned NAME(unsigned a) {                                                          \
    return engine::simd::each_lane<LANES, true>(a, a, [](int x, int) -> int { return EXPRESSION; }); \
  }
// Compared, with masks of ones, or with 1 and 0.
#define ENGINE_LANES_COMPARED(NAME, LANES, SIGNED, OP)              \
  ENGINE_LANES(__vcmp##NAME##LANES, LANES, SIGNED, x OP y ? -1 : 0) \
  ENGINE_LANES(__vset##NAME##LANES, LANES, SIGNED, x OP y ? 1 : 0)
#define ENGINE_SIMD(LANES)                                                                      \
  ENGINE_LANES(__vadd##LANES, LANES, true, x + y)                                               \
  ENGINE_LANES(__vaddss##LANES, LANES, true, (engine::simd::saturated<LANES, true>(x + y)))     \
  ENGINE_LANES(__vaddus##LANES, LANES, false, (engine::simd::saturated<LANES, false>(x + y)))   \
  ENGINE_LANES(__vsub##LANES, LANES, true, x - y)                                               \
  ENGINE_LANES(__vsubss##LANES, LANES, true, (engine::simd::saturated<LANES, true>(x - y)))     \
  ENGINE_LANES(__vsubus##LANES, LANES, false, (engine::simd::saturated<LANES, false>(x - y)))   \
  ENGINE_LANES(__vabsdiffs##LANES, LANES, true, x > y ? x - y : y - x)                          \
  ENGINE_LANES(__vabsdiffu##LANES, LANES, false, x > y ? x - y : y - x)                         \
  ENGINE_LANES(__vavgs##LANES, LANES, true, engine::simd::signed_average(x + y))                \
  ENGINE_LANES(__vavgu##LANES, LANES, false, (x + y + 1) >> 1)                                  \
  ENGINE_LANES(__vhaddu##LANES, LANES, false, (x + y) >> 1)                                     \
  ENGINE_LANES(__vmaxs##LANES, LANES, true, x > y ? x : y)                                      \
  ENGINE_LANES(__vmaxu##LANES, LANES, false, x > y ? x : y)                                     \
  ENGINE_LANES(__vmins##LANES, LANES, true, x < y ? x : y)                                      \
  ENGINE_LANES(__vminu##LANES, LANES, false, x < y ? x : y)                                     \
  ENGINE_LANES1(__vabs##LANES, LANES, x < 0 ? -x : x)                                           \
  ENGINE_LANES1(__vabsss##LANES, LANES, (engine::simd::saturated<LANES, true>(x < 0 ? -x : x))) \
  ENGINE_LANES1(__vneg##LANES, LANES, -x)                                                       \
  ENGINE_LANES1(__vnegss##LANES, LANES, (engine::simd::saturated<LANES, true>(-x)))             \
  ENGINE_LANES_COMPARED(eq, LANES, true, ==)                                                    \
  ENGINE_LANES_COMPARED(ne, LANES, true, !=)                                                    \
  ENGINE_LANES_COMPARED(ges, LANES, true, >=)                                                   \
  ENGINE_LANES_COMPARED(geu, LANES, false, >=)                                                  \
  ENGINE_LANES_COMPARED(gts, LANES, true, >)                                                    \
  ENGINE_LANES_COMPARED(gtu, LANES, false, >)                                                   \
  ENGINE_LANES_COMPARED(les, LANES, true, <=)                                                   \
  ENGINE_LANES_COMPARED(leu, LANES, false, <=)                                                  \
  ENGINE_LANES_COMPARED(lts, LANES, true, <)                                                    \
  ENGINE_LANES_COMPARED(ltu, LANES, false, <)                                                   \
  static inline unsigned __vsads##LANES(unsigned a, unsigned b) {                               \
    return engine::simd::sum_of_differences<LANES, true>(a, b);                                 \
  }                                                                                             \
  static inline unsigned __vsadu##LANES(unsigned a, unsigned b) {                               \
    return engine::simd::sum_of_differences<LANES, false>(a, b);                                \
  }
ENGINE_SIMD(2)
ENGINE_SIMD(4)
#undef ENGINE_SIMD
#undef ENGINE_LANES_COMPARED
#undef ENGINE_LANES1

// ---------------------------------------------------------------- DPX: minima and maxima for dynamic programming

// Of three, and of a sum that wraps around and one more; relu: of zero as well. b: which of two it was.
#define ENGINE_DPX_32(NAME, OP, T, SUFFIX)                              \
  static inline T __vi##NAME##3_##SUFFIX(T a, T b, T c) {               \
    const T x = a OP b ? a : b;                                         \
    return x OP c ? x : c;                                              \
  }                                                                     \
  static inline T __viadd##NAME##_##SUFFIX(T a, T b, T c) {             \
    const T x = (T)((unsigned)a + (unsigned)b);                         \
    return x OP c ? x : c;                                              \
  }                                                                     \
  static inline T __vib##NAME##_##SUFFIX(T a, T b, bool* const first) { \
    *first = a OP b || a == b;                                          \
    return *first ? a : b;                                              \
  }
#define ENGINE_RELU_32(NAME, OP)                                                                               \
  static inline int __vi##NAME##_s32_relu(int a, int b) { return max(a OP b ? a : b, 0); }                     \
  static inline int __vi##NAME##3_s32_relu(int a, int b, int c) { return max(__vi##NAME##3_s32(a, b, c), 0); } \
  static inline int __viadd##NAME##_s32_relu(int a, int b, int c) { return max(__viadd##NAME##_s32(a, b, c), 0); }
// clang-format off
ENGINE_DPX_32(max, >, int, s32) ENGINE_DPX_32(max, >, unsigned, u32)
ENGINE_DPX_32(min, <, int, s32) ENGINE_DPX_32(min, <, unsigned, u32)
ENGINE_RELU_32(max, >) ENGINE_RELU_32(min, <)
// clang-format on
#undef ENGINE_DPX_32
#undef ENGINE_RELU_32

#define ENGINE_DPX_16(NAME, SUFFIX, LANEWISE)                                                                \
  static inline unsigned __vi##NAME##3_##SUFFIX(unsigned a, unsigned b, unsigned c) {                        \
    return LANEWISE(LANEWISE(a, b), c);                                                                      \
  }                                                                                                          \
  static inline unsigned __viadd##NAME##_##SUFFIX(unsigned a, unsigned b, unsigned c) {                      \
    return LANEWISE(__vadd2(a, b), c);                                                                       \
  }                                                                                                          \
  static inline unsigned __vib##NAME##_##SUFFIX(unsigned a, unsigned b, bool* const high, bool* const low) { \
    const unsigned best = LANEWISE(a, b), same = __vcmpeq2(best, a);                                         \
    *high = same >> 16 != 0, *low = (same & 0xFFFF) != 0;                                                    \
    return best;                                                                                             \
  }
#define ENGINE_RELU_16(NAME, LANEWISE)                                                                           \
  static inline unsigned __vi##NAME##_s16x2_relu(unsigned a, unsigned b) { return __vmaxs2(LANEWISE(a, b), 0); } \
  static inline unsigned __vi##NAME##3_s16x2_relu(unsigned a, unsigned b, unsigned c) {                          \
    return __vmaxs2(__vi##NAME##3_s16x2(a, b, c), 0);                                                            \
  }                                                                                                              \
  static inline unsigned __viadd##NAME##_s16x2_relu(unsigned a, unsigned b, unsigned c) {                        \
    return __vmaxs2(__viadd##NAME##_s16x2(a, b, c), 0);                                                          \
  }
        ENGINE_DPX_16(max, s16x2, __vmaxs2) ENGINE_DPX_16(max, u16x2, __vmaxu2) ENGINE_DPX_16(min, s16x2, __vmins2)
            ENGINE_DPX_16(min, u16x2, __vminu2) ENGINE_RELU_16(max, __vmaxs2) ENGINE_RELU_16(min, __vmins2)
#undef ENGINE_DPX_16
#undef ENGINE_RELU_16

// ---------------------------------------------------------------- dot products

// Of four bytes, and of two halves of 16 bits with two of the bytes.
#define ENGINE_DOT(T, SIGNED, BYTES, HALVES)                                                                         \
  static inline T __dp4a(T a, T b, T c) {                                                                            \
    using engine::simd::lane_of;                                                                                     \
    unsigned sum = (unsigned)c;                                                                                      \
    for (int i = 0; i < 4; ++i)                                                                                      \
      sum += (unsigned)(lane_of<4, SIGNED>((unsigned)a, i) * lane_of<4, SIGNED>((unsigned)b, i));                    \
    return (T)sum;                                                                                                   \
  }                                                                                                                  \
  static inline T __dp2a_lo(T a, T b, T c) {                                                                         \
    using engine::simd::lane_of;                                                                                     \
    unsigned sum = (unsigned)c;                                                                                      \
    for (int i = 0; i < 2; ++i)                                                                                      \
      sum += (unsigned)(lane_of<2, SIGNED>((unsigned)a, i) * lane_of<4, SIGNED>((unsigned)b, i));                    \
    return (T)sum;                                                                                                   \
  }                                                                                                                  \
  static inline T __dp2a_hi(T a, T b, T c) { return __dp2a_lo(a, (T)((unsigned)b >> 16), c); }                       \
  static inline T __dp4a(BYTES a, BYTES b, T c) { return __dp4a(engine::bits<T>(a), engine::bits<T>(b), c); }        \
  static inline T __dp2a_lo(HALVES a, BYTES b, T c) { return __dp2a_lo(engine::bits<T>(a), engine::bits<T>(b), c); } \
  static inline T __dp2a_hi(HALVES a, BYTES b, T c) { return __dp2a_hi(engine::bits<T>(a), engine::bits<T>(b), c); }
                ENGINE_DOT(int, true, char4, short2) ENGINE_DOT(unsigned, false, uchar4, ushort2)
#undef ENGINE_DOT
#undef ENGINE_LANES
