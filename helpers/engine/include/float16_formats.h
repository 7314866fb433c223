// The two 16-bit float formats in terms of float and double. The same bits come out on every machine: where the
// processor converts by itself, that is used for speed alone.
#pragma once
#include "cuda_runtime.h"

namespace engine {

// (g++ would join two conversions of a _Float16, to float and on to double, into a call of its library.)
#if defined(__F16C__) && !defined(__clang__)
#define ENGINE_NATIVE_HALF 1
typedef short Shorts __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
static inline float native_to_float(unsigned short half) { return __builtin_ia32_vcvtph2ps(Shorts{(short)half})[0]; }
static inline unsigned short native_from_float(float value) {
  return (unsigned short)__builtin_ia32_vcvtps2ph(Floats{value}, 0)[0];  // 0: to nearest even
}
#elif (defined(__F16C__) && __clang_major__ >= 15) || defined(__aarch64__)
#define ENGINE_NATIVE_HALF 1
#ifdef __aarch64__
typedef __fp16 Native;
#else
typedef _Float16 Native;
#endif
static inline float native_to_float(unsigned short half) { return (float)bits<Native>(half); }
static inline unsigned short native_from_float(float value) { return bits<unsigned short>((Native)value); }
#endif

enum class Round { nearest, zero, up, down };

// A float made 16 bits wide in integer arithmetic: the significand is shifted right and what falls out decides.
template <int Exponent, int Mantissa>
static inline auto round_float(float value, Round mode) {
  const unsigned infinity = ((1u << Exponent) - 1) << Mantissa;
  const unsigned rebias = (127 - ((1u << (Exponent - 1)) - 1)) << 23;
  unsigned all = bits<unsigned>(value), sign = all >> 31, magnitude = all & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return (unsigned short)0x7FFF;  // a GPU has one NaN
  unsigned result = infinity;
  if (magnitude < 0x7F800000u) {
    unsigned significand, shift = 23 - Mantissa;
    if (magnitude >= rebias + (1u << 23)) {
      significand = magnitude - rebias;  // with the exponent on top, so that a carry runs into it
    } else {                             // subnormal: no implicit one, a fixed exponent
      unsigned exponent = magnitude >> 23;
      significand = (magnitude & 0x7FFFFFu) | (exponent ? 1u << 23 : 0);
      shift += (rebias >> 23) + 1 - (exponent ? exponent : 1);
      if (shift > 26) shift = 26;  // nothing is left but a trace
    }
    unsigned rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
    result = significand >> shift;
    result += mode == Round::nearest ? rest > half || (rest == half && (result & 1))
              : mode == Round::up    ? rest && !sign
              : mode == Round::down  ? rest && sign
                                     : 0;
    if (result >= infinity) {
      bool reaches = mode == Round::nearest || (mode == Round::up && !sign) || (mode == Round::down && sign);
      result = reaches ? infinity : infinity - 1;
    }
  }
  return (unsigned short)(sign << 15 | result);
}

// "To odd" keeps in the last bit that something was cut off, so that rounding once more is rounding once.
static inline float to_odd(double value) {
  float rounded = (float)value;
  if ((double)rounded == value || value != value) return rounded;
  unsigned all = bits<unsigned>(rounded);
  if (!(all & 1)) all += fabs((double)rounded) > fabs(value) ? -1 : 1;
  return bits<float>(all);
}
template <typename Int>
static inline auto integer_to_odd(Int value) {
  unsigned long long magnitude = value < 0 ? 0 - (unsigned long long)value : (unsigned long long)value;
  int shift = 0;
  for (; magnitude >> shift >= 1u << 24; ++shift) {
  }
  bool inexact = magnitude >> shift << shift != magnitude;
  float scale = (float)(1ull << shift), top = (float)(magnitude >> shift | inexact) * scale;
  return value < 0 ? -top : top;
}

// sum = product + c, rounded to odd. The product of two short floats is exact in double, so only the sum can lose bits,
// and what it lost is known exactly (Knuth's two-sum). The caller adds: what this file computes counts as no FLOP.
static inline double sum_to_odd(double product, double c, double sum) {
  double back = sum - product, lost = (product - (sum - back)) + (c - back);
  unsigned long long all = bits<unsigned long long>(sum);
  if ((lost > 0 || lost < 0) && !(all & 1)) all += (lost > 0) == (sum > 0) ? 1 : -1;
  return bits<double>(all);
}

struct Binary16 {
  static float to_float(unsigned short half) {
#ifdef ENGINE_NATIVE_HALF
    return native_to_float(half);
#else
    unsigned magnitude = half & 0x7FFFu, sign = (unsigned)(half & 0x8000u) << 16;
    if (magnitude < 0x0400u) return bits<float>(bits<unsigned>((float)magnitude * 0x1p-24f) | sign);
    if (magnitude < 0x7C00u) return bits<float>(((magnitude << 13) + (112u << 23)) | sign);
    return bits<float>((magnitude << 13) | (magnitude > 0x7C00u ? 0x7FC00000u : 0x7F800000u) | sign);
#endif
  }
  static unsigned short from_float(float value) {
#ifdef ENGINE_NATIVE_HALF
    return value != value ? 0x7FFF : native_from_float(value);
#else
    return round_float<5, 10>(value, Round::nearest);
#endif
  }
  static unsigned short from_float(float value, Round mode) { return round_float<5, 10>(value, mode); }
};

struct Bfloat16 {
  static float to_float(unsigned short half) { return bits<float>((unsigned)half << 16); }
  static unsigned short from_float(float value) {
    unsigned all = bits<unsigned>(value);
    return value != value ? 0x7FFF : (unsigned short)((all + 0x7FFFu + (all >> 16 & 1)) >> 16);
  }
  static unsigned short from_float(float value, Round mode) { return round_float<8, 7>(value, mode); }
};

// Out of range saturates. NaN gives 0, and in 64 bits the top bit alone.
template <typename Int>
static inline auto float_to_integer(float whole) {
  constexpr bool is_signed = Int(-1) < Int(0);
  constexpr int width = 8 * (int)sizeof(Int) - is_signed;
  constexpr Int most = (Int)(((1ull << (width - 1)) - 1) * 2 + 1);
  constexpr Int least = is_signed ? (Int)(-most - 1) : Int(0);
  if (whole != whole) return sizeof(Int) == 8 ? (Int)(1ull << 63) : Int(0);
  if (whole >= (float)(1ull << (width - 1)) * 2.0f) return most;
  return whole <= (float)least ? least : (Int)whole;
}

}  // namespace engine
