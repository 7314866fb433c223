// cvt: between integers, and floats of 64, 32, 19, 16 and 8 bits.
#pragma once
#include "floats.h"

namespace engine {
namespace ptx {

// rni, rzi, rmi and rpi round to an integer; the others to the format of the result.
enum class Whole { no, nearest, zero, down, up };

template <Whole W>
ENGINE_INLINE double whole(double x) {
  return W == Whole::nearest ? nearbyint(x)
         : W == Whole::zero  ? trunc(x)
         : W == Whole::down  ? floor(x)
         : W == Whole::up    ? ceil(x)
                             : x;
}

// Out of range saturates. NaN is 0, and the top bit alone where there are 64 bits on either side.
template <typename I, typename From>
ENGINE_INLINE I to_integer(double x) {
  if (x != x) return sizeof(I) == 8 || is<From, double> ? (I)((Raw<I>)1 << (width<I> - 1)) : I(0);
  const double bound =
      is_signed<I> ? (double)((Raw<I>)1 << (width<I> - 1)) : 2.0 * (double)((Raw<I>)1 << (width<I> - 1));
  return x >= bound ? most<I> : x <= (double)least<I> ? least<I> : (I)x;
}

// What is exact in float, or rounded to odd, in its last format.
template <typename T, To R, Limit L, bool Ftz>
ENGINE_INLINE T narrowed(float x) {
  if constexpr (is<T, float>) return result<L, Ftz>(x);
  else return T::of(limited<L>(x), round_to<R>);
}

template <typename T, typename From, To R, Whole W, Limit L, bool Ftz>
ENGINE_INLINE T convert(From v) {
  if constexpr (is_whole<From> && is_whole<T>) {
    return L == Limit::sat ? clamped<T>((__int128)v) : (T)v;
  } else if constexpr (is_whole<From>) {
    if constexpr (is<T, double>) return from_integer<double>(v, toward<R>);
    else if constexpr (is<T, float>) return limited<L>(from_integer<float>(v, toward<R>));
    else return narrowed<T, R, L, false>(integer_to_odd(v));
  } else {
    auto x = value_of(v);
    if constexpr (is<From, float>) x = flushed<Ftz>(x);
    if constexpr (is_whole<T>) {
      return to_integer<T, From>(whole<W>(x));
    } else {
      if (W != Whole::no) x = (decltype(x))whole<W>(x);
      if constexpr (is<T, double>) return L == Limit::sat ? (x > 0 ? (x < 1 ? x : 1.0) : 0.0) : (double)x;
      else if constexpr (!is<From, double>) return narrowed<T, R, L, Ftz>(x);
      else if constexpr (is<T, float>) return narrowed<T, R, L, Ftz>(from_double(x, toward<R>));
      else return narrowed<T, R, L, Ftz>(to_odd(x));
    }
  }
}

// Pairs: the first operand is the high half.
template <typename P, To R, Limit L>
ENGINE_INLINE P convert_pair(float high, float low) {
  typedef typename P::Element E;
  return P{narrowed<E, R, L, false>(low), narrowed<E, R, L, false>(high)};
}

// A float without its last 13 bits; the hardware does not read them. away: ties go away from zero.
template <To R, Limit L>
ENGINE_INLINE unsigned tf32(float x) {
  const unsigned all = __float_as_uint(limited<L>(x)), size = all & 0x7fffffffu;
  if (size >= 0x7f800000u) return size > 0x7f800000u ? 0x7fffffffu : all;
  const unsigned up = R == To::away ? 0x1000u : R == To::zero ? 0u : 0xfffu + (all >> 13 & 1);
  return (all + up) & 0xffffe000u;
}

// ---------------------------------------------------------------- 8 bits

struct E4m3 {  // no infinity, and one NaN of each sign
  static constexpr int exponent = 4, mantissa = 3, largest = 0x7e;
};
struct E5m2 {
  static constexpr int exponent = 5, mantissa = 2, largest = 0x7b;
};

// To nearest even; what is too large becomes the largest number.
template <typename F, Limit L>
ENGINE_INLINE unsigned encode(float value) {
  const float x = limited<L>(value);
  if (x != x) return 0x7f;
  constexpr int lowest = 2 - (1 << (F::exponent - 1));  // exponent of the least normal number
  const float size = fabsf(x);
  int e;
  (void)frexpf(size, &e);
  if (e - 1 < lowest) e = lowest + 1;
  const int shift = F::mantissa - (e - 1);
  const float steps = nearbyintf(ldexpf(size < 0x1p30f ? size : 0x1p30f, shift));
  // Significand and exponent in one number: a carry of the first runs into the second.
  const float code = size == 0 ? 0.0f : steps + (float)((e - 1 - lowest) << F::mantissa);
  const unsigned found = code > (float)F::largest || size >= 0x1p30f ? F::largest : (unsigned)code;
  return found | (signbit(x) ? 0x80u : 0u);
}
template <typename F>
ENGINE_INLINE F16 decode(unsigned code) {
  if (is<F, E5m2>) return (code & 0x7f) > 0x7c ? F16{0x7fff} : F16{(unsigned short)(code << 8)};
  if ((code & 0x7f) == 0x7f) return F16{0x7fff};
  const int biased = code >> 3 & 15, mantissa = code & 7;
  const float size = biased ? ldexpf((float)(8 + mantissa), biased - 10) : ldexpf((float)mantissa, -9);
  return F16::of(code & 0x80 ? -size : size);
}
template <typename F, Limit L>
ENGINE_INLINE unsigned short encode_pair(float high, float low) {
  return (unsigned short)(encode<F, L>(high) << 8 | encode<F, L>(low));
}
template <typename F, Limit L>
ENGINE_INLINE unsigned short encode_halves(F16x2 pair) {
  return encode_pair<F, L>(pair.high.value(), pair.low.value());
}
template <typename F, Limit L>
ENGINE_INLINE F16x2 decode_pair(unsigned short pair) {
  auto one = [](unsigned code) {
    const F16 found = decode<F>(code);
    return L == Limit::none ? found : F16::of(limited<L>(found.value()));
  };
  return F16x2{one(pair & 255u), one(pair >> 8)};
}

// Two integers, saturated, in front of the low bits of c.
template <typename T, typename From, unsigned Bits>
ENGINE_INLINE unsigned pack_saturated(From a, From b, unsigned c) {
  constexpr long long low = is_signed<T> ? -(1ll << (Bits - 1)) : 0, high = (1ll << (Bits - is_signed<T>)) - 1;
  auto one = [=](From x) { return (unsigned)((x < low ? low : x > high ? high : (long long)x) & ((1ll << Bits) - 1)); };
  const unsigned two = one(a) << Bits | one(b);
  return Bits == 16 ? two : c << (2 * Bits % 32) | two;
}

}  // namespace ptx
}  // namespace engine
