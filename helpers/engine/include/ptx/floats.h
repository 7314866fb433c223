// Arithmetic on floats of 16, 32 and 64 bits and on pairs, with the rounding of the instruction.
#pragma once
#include "integers.h"

namespace engine {
namespace ptx {

// How a result is rounded; any: the instruction does not say, and may be joined with the next.
enum class To { any, nearest, zero, up, down, away };
enum class Limit { none, sat, relu };

template <To R>
constexpr Toward toward = R == To::zero   ? Toward::zero
                          : R == To::up   ? Toward::up
                          : R == To::down ? Toward::down
                                          : Toward::nearest;
template <To R>
constexpr Round round_to = R == To::zero   ? Round::zero
                           : R == To::up   ? Round::up
                           : R == To::down ? Round::down
                                           : Round::nearest;
template <To R>
constexpr bool to_nearest = R == To::any || R == To::nearest;

// .ftz: a subnormal argument or result is 0.
ENGINE_INLINE float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
template <bool Ftz>
ENGINE_INLINE float flushed(float x) {
  return Ftz ? flush(x) : x;
}
ENGINE_INLINE float not_a_number() { return __int_as_float(0x7fffffff); }  // a GPU has one

template <Limit L>
ENGINE_INLINE float limited(float x) {
  if (L == Limit::sat) return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
  if (x != x) return not_a_number();
  return L == Limit::relu && x <= 0.0f ? 0.0f : x;
}
template <Limit L, bool Ftz>
ENGINE_INLINE float result(float x) {
  return limited<L>(flushed<Ftz>(x));
}

// The compiler may join a product with a sum, but not through here.
template <typename T>
ENGINE_INLINE T unjoined(T x) {
  volatile T kept = x;
  return kept;
}
template <To R, typename T>
ENGINE_INLINE T as_it_says(T x) {
  return R == To::any ? x : unjoined(x);
}

// a / b and sqrt(a) to odd: rounding once more is rounding once.
ENGINE_INLINE double nudged(double x, double rest) {
  unsigned long long all = bits<unsigned long long>(x);
  if ((rest > 0 || rest < 0) && !(all & 1)) all += (rest > 0) == (x > 0) ? 1 : -1;
  return bits<double>(all);
}
ENGINE_INLINE double quotient_to_odd(double a, double b) {
  const double q = a / b, rest = fma(-q, b, a);
  return q - q == 0 && q != 0 ? nudged(q, b < 0 ? -rest : rest) : q;
}
ENGINE_INLINE double root_to_odd(double a) {
  const double r = sqrt(a);
  return r - r == 0 && r != 0 ? nudged(r, fma(-r, r, a)) : r;
}

ENGINE_INLINE double fma_to_odd(double a, double b, double c) {
  const double product = a * b;
  return sum_to_odd(product, c, product + c);
}

template <To R>
ENGINE_INLINE float once(double odd) {
  return to_nearest<R> ? (float)odd : from_double(odd, toward<R>);
}

// Of float: add, mul, fma, div, sqrt. A sum of exact zeros is -0 downwards.
template <To R>
ENGINE_INLINE float fma_once(float a, float b, float c) {
  if (to_nearest<R>) return fmaf(a, b, c);
  const double sum = fma_to_odd(a, b, c);
  if (R == To::down && sum == 0 && (double)a * b + c == 0 && (signbit((double)a * b) || signbit(c))) return -0.0f;
  return once<R>(sum);
}

template <typename T, To R, Limit L, bool Ftz>
ENGINE_INLINE T add(T a, T b) {
  if constexpr (is<T, float>) {
    const float x = flushed<Ftz>(a), y = flushed<Ftz>(b);
    return result<L, Ftz>(to_nearest<R> ? as_it_says<R>(x + y) : fma_once<R>(x, 1.0f, y));
  } else if constexpr (is<T, double>) {
    static_assert(to_nearest<R>, "the engine rounds sums of doubles to nearest only");
    return as_it_says<R>(a + b);
  } else if constexpr (is_small<T>) {
    return T::of(result<L, false>(a.value() + b.value()));
  } else {
    return T{add<typename T::Element, R, L, Ftz>(a.low, b.low), add<typename T::Element, R, L, Ftz>(a.high, b.high)};
  }
}
template <typename T, bool Ftz>
ENGINE_INLINE T negated(T a) {
  if constexpr (is<T, float>) return -flushed<Ftz>(a);
  else if constexpr (is<T, double>) return -a;
  else return as<T>((Raw<T>)(as<Raw<T>>(a) ^ (is_pair<T> ? (Raw<T>)0x80008000u : (Raw<T>)0x8000u)));
}
template <typename T, To R, Limit L, bool Ftz>
ENGINE_INLINE T sub(T a, T b) {
  return add<T, R, L, Ftz>(a, negated<T, false>(b));
}
template <typename T, To R, Limit L, bool Ftz>
ENGINE_INLINE T mul(T a, T b) {
  if constexpr (is<T, float>) {
    const float x = flushed<Ftz>(a), y = flushed<Ftz>(b);
    return result<L, Ftz>(to_nearest<R> ? as_it_says<R>(x * y) : from_double((double)x * y, toward<R>));
  } else if constexpr (is<T, double>) {
    static_assert(to_nearest<R>, "the engine rounds products of doubles to nearest only");
    return as_it_says<R>(a * b);
  } else if constexpr (is_small<T>) {
    return T::of(result<L, false>(a.value() * b.value()));
  } else {
    return T{mul<typename T::Element, R, L, Ftz>(a.low, b.low), mul<typename T::Element, R, L, Ftz>(a.high, b.high)};
  }
}
template <typename T, To R, Limit L, bool Ftz>
ENGINE_INLINE T multiply_add(T a, T b, T c) {
  if constexpr (is<T, float>) {
    return result<L, Ftz>(fma_once<R>(flushed<Ftz>(a), flushed<Ftz>(b), flushed<Ftz>(c)));
  } else if constexpr (is<T, double>) {
    static_assert(to_nearest<R>, "the engine rounds fma of doubles to nearest only");
    return fma(a, b, c);
  } else if constexpr (is_small<T>) {
    return T::of(result<L, false>(to_odd(fma_to_odd(a.value(), b.value(), c.value()))));
  } else {
    typedef typename T::Element E;
    return T{multiply_add<E, R, L, Ftz>(a.low, b.low, c.low), multiply_add<E, R, L, Ftz>(a.high, b.high, c.high)};
  }
}
template <typename T, To R, bool Ftz>
ENGINE_INLINE T divide(T a, T b) {
  if constexpr (is<T, double>) {
    static_assert(to_nearest<R>, "the engine rounds quotients of doubles to nearest only");
    return a / b;
  } else {
    const float x = flushed<Ftz>(a), y = flushed<Ftz>(b);
    return result<Limit::none, Ftz>(to_nearest<R> ? x / y : from_double(quotient_to_odd(x, y), toward<R>));
  }
}
template <typename T, To R, bool Ftz>
ENGINE_INLINE T root(T a) {
  if constexpr (is<T, double>) {
    static_assert(to_nearest<R>, "the engine rounds roots of doubles to nearest only");
    return sqrt(a);
  } else {
    const float x = flushed<Ftz>(a);
    return result<Limit::none, Ftz>(to_nearest<R> ? sqrtf(x) : from_double(root_to_odd(x), toward<R>));
  }
}
template <typename T, To R, bool Ftz>
ENGINE_INLINE T reciprocal(T a) {
  return divide<T, R, Ftz>(T(1), a);
}

template <typename T, bool Ftz>
ENGINE_INLINE T absolute(T a) {
  if constexpr (is<T, float>) return fabsf(flushed<Ftz>(a));
  else if constexpr (is<T, double>) return fabs(a);
  else return as<T>((Raw<T>)(as<Raw<T>>(a) & (is_pair<T> ? (Raw<T>)0x7fff7fffu : (Raw<T>)0x7fffu)));
}

// The value as a float or double, to be compared.
template <typename T>
ENGINE_INLINE auto value_of(T a) {
  if constexpr (is_small<T>) return a.value();
  else return a;
}
template <typename T>
ENGINE_INLINE bool is_negative(T a) {
  return as<Raw<T>>(a) >> (width<T> - 1) & 1;
}

// A NaN loses against a number, unless `Nan` says that it wins; +0 is more than -0. XorSign: of the magnitudes, with
// the product of the signs.
template <typename T, bool Max, bool Nan, bool XorSign, bool Ftz>
ENGINE_INLINE T extreme(T a, T b) {
  if constexpr (is_pair<T>) {
    typedef typename T::Element E;
    return T{extreme<E, Max, Nan, XorSign, Ftz>(a.low, b.low), extreme<E, Max, Nan, XorSign, Ftz>(a.high, b.high)};
  } else {
    if constexpr (is<T, float>) a = flushed<Ftz>(a), b = flushed<Ftz>(b);
    const bool sign = XorSign && is_negative(a) != is_negative(b);
    if (XorSign) a = absolute<T, false>(a), b = absolute<T, false>(b);
    const auto x = value_of(a), y = value_of(b);
    const Raw<T> nan = sizeof(T) == 2   ? (Raw<T>)0x7fff
                       : sizeof(T) == 4 ? (Raw<T>)0x7fffffff
                                        : (Raw<T>)0x7ff8000000000000;
    T found = x < y || (x == y && is_negative(a)) ? (Max ? b : a) : (Max ? a : b);
    if (x != x || y != y) found = Nan || (x != x && y != y) ? as<T>(nan) : x != x ? b : a;
    return sign ? negated<T, false>(found) : found;
  }
}

template <typename T>
ENGINE_INLINE T with_sign(T sign, T a) {
  const Raw<T> top = (Raw<T>)1 << (width<T> - 1);
  return as<T>((Raw<T>)((as<Raw<T>>(a) & ~top) | (as<Raw<T>>(sign) & top)));
}

// Of integers and floats alike.
template <typename T>
ENGINE_INLINE T sum_of(T a, T b) {
  if constexpr (is_whole<T>) return plus(a, b);
  else return add<T, To::nearest, Limit::none, false>(a, b);
}
template <typename T, bool Max>
ENGINE_INLINE T extreme_of(T a, T b) {
  if constexpr (is_whole<T>) return Max ? most_of(a, b) : least_of(a, b);
  else return extreme<T, Max, false, false, false>(a, b);
}

// ---------------------------------------------------------------- comparisons

enum class Compare { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };

template <Compare C, bool Ftz, typename T>
ENGINE_INLINE bool compare(T a, T b) {
  auto x = value_of(a), y = value_of(b);
  if constexpr (is<T, float>) x = flushed<Ftz>(x), y = flushed<Ftz>(y);
  const bool unordered = x != x || y != y;
  switch (C) {
    case Compare::eq:
      return x == y;
    case Compare::ne:
      return !unordered && x != y;
    case Compare::lt:
      return x < y;
    case Compare::le:
      return x <= y;
    case Compare::gt:
      return x > y;
    case Compare::ge:
      return x >= y;
    case Compare::equ:
      return unordered || x == y;
    case Compare::neu:
      return x != y;
    case Compare::ltu:
      return unordered || x < y;
    case Compare::leu:
      return unordered || x <= y;
    case Compare::gtu:
      return unordered || x > y;
    case Compare::geu:
      return unordered || x >= y;
    case Compare::num:
      return !unordered;
    case Compare::nan:
      return unordered;
  }
}

// A NaN, a number, an infinity, or a subnormal?
enum class Test { finite, infinite, number, notanumber, normal, subnormal };
template <Test Kind, typename T>
ENGINE_INLINE bool testp(T a) {
  const T size = absolute<T, false>(a), least = is<T, float> ? (T)0x1p-126 : (T)0x1p-1022;
  switch (Kind) {
    case Test::finite:
      return a - a == 0;
    case Test::infinite:
      return a == a && a - a != 0;
    case Test::number:
      return a == a;
    case Test::notanumber:
      return a != a;
    case Test::normal:
      return a - a == 0 && size >= least;
    case Test::subnormal:
      return size < least && size != 0;
  }
}

}  // namespace ptx
}  // namespace engine
