// Functions. The PTX ISA bounds the error of the .approx forms; a GPU's own results differ from these in the last bits.
#pragma once
#include "floats.h"

namespace engine {
namespace ptx {

#define ENGINE_APPROX(NAME, EXPRESSION)                             \
  template <bool Flush>                                             \
  ENGINE_INLINE float NAME(float value) {                           \
    const float x = Flush ? flush(value) : value, y = (EXPRESSION); \
    return y != y ? not_a_number() : Flush ? flush(y) : y;          \
  }
ENGINE_APPROX(ex2, exp2f(x))
ENGINE_APPROX(lg2, log2f(x))
ENGINE_APPROX(rcp, 1.0f / x)
ENGINE_APPROX(rsqrt_, (float)(1.0 / sqrt((double)x)))
ENGINE_APPROX(sqrt_, sqrtf(x))
ENGINE_APPROX(sin_, sinf(x))
ENGINE_APPROX(cos_, cosf(x))
ENGINE_APPROX(tanh_, tanhf(x))
#undef ENGINE_APPROX

// By a very large number: 0.
template <bool Ftz>
ENGINE_INLINE float divide_approx(float a, float b) {
  const float x = flushed<Ftz>(a), y = flushed<Ftz>(b), size = fabsf(y);
  if (size > 0x1p126f && size < INFINITY && x == x)
    return fabsf(x) == INFINITY ? not_a_number() : signbit(x) != signbit(y) ? -0.0f : 0.0f;
  return result<Limit::none, Ftz>(x / y);
}
ENGINE_INLINE double rsqrt_double(double x) { return 1.0 / sqrt(x); }

// Of one or two floats of 16 bits.
template <typename T, typename F>
ENGINE_INLINE T small_each(T a, F f) {
  if constexpr (is_pair<T>) return T{small_each(a.low, f), small_each(a.high, f)};
  else return T::of(f(a.value()));
}
template <bool Ftz, typename T>
ENGINE_INLINE T ex2_small(T a) {
  return small_each(a, [](float x) { return ex2<Ftz>(x); });
}
template <bool Ftz, typename T>
ENGINE_INLINE T tanh_small(T a) {
  return small_each(a, [](float x) { return tanh_<Ftz>(x); });
}

}  // namespace ptx
}  // namespace engine
