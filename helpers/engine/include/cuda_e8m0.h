// __nv_fp8_e8m0: the exponent of a power of two, 2^-127 to 2^127, and NaN. Scales of blocks of small floats are such.
// Read by cuda_fp8.h.
#pragma once
#include "cuda_fp8.h"

enum cudaRoundMode { cudaRoundNearest, cudaRoundZero, cudaRoundPosInf, cudaRoundMinInf };

// Of the magnitude: the sign is dropped. Rounded down (cudaRoundZero) or up to a power of two.
static inline __nv_fp8_storage_t __nv_cvt_double_to_e8m0(
    const double x, const __nv_saturation_t saturate, const cudaRoundMode rounding) {
  if (x != x) return 0xFF;
  const double magnitude = fabs(x) > 0x1.fffffep127 && !__builtin_isinf(x) ? 0x1.fffffep127 : fabs(x);
  if (magnitude <= 0x1p-127) return 0;
  const unsigned long long all = engine::bits<unsigned long long>(magnitude);
  int code = (int)(all >> 52) - 1023 + 127;
  if (rounding == cudaRoundPosInf && all << 12) ++code;
  return (__nv_fp8_storage_t)(code < 0xFF ? code : saturate == __NV_SATFINITE ? 0xFE : 0xFF);
}
static inline __nv_fp8_storage_t __nv_cvt_float_to_e8m0(
    const float x, const __nv_saturation_t saturate, const cudaRoundMode rounding) {
  return __nv_cvt_double_to_e8m0((double)x, saturate, rounding);
}
static inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_e8m0(
    const __nv_bfloat16_raw x, const __nv_saturation_t saturate, const cudaRoundMode rounding) {
  return __nv_cvt_double_to_e8m0((double)engine::Bfloat16::to_float(x.x), saturate, rounding);
}
#define ENGINE_E8M0_PAIR(NAME, T, ONE, FIRST, SECOND)                                                                  \
  static inline __nv_fp8x2_storage_t NAME(const T x, const __nv_saturation_t saturate, const cudaRoundMode rounding) { \
    return (__nv_fp8x2_storage_t)(ONE(SECOND, saturate, rounding) << 8 | ONE(FIRST, saturate, rounding));              \
  }
ENGINE_E8M0_PAIR(__nv_cvt_double2_to_e8m0x2, double2, __nv_cvt_double_to_e8m0, x.x, x.y)
ENGINE_E8M0_PAIR(__nv_cvt_float2_to_e8m0x2, float2, __nv_cvt_float_to_e8m0, x.x, x.y)
ENGINE_E8M0_PAIR(
    __nv_cvt_bfloat162raw_to_e8m0x2, __nv_bfloat162_raw, __nv_cvt_bfloat16raw_to_e8m0, __nv_bfloat16_raw{x.x},
    __nv_bfloat16_raw{x.y})
#undef ENGINE_E8M0_PAIR

static inline __nv_bfloat16_raw __nv_cvt_e8m0_to_bf16raw(const __nv_fp8_storage_t x) {
  return __nv_bfloat16_raw{(unsigned short)(x == 0xFF ? 0x7FFF : x == 0 ? 0x0040 : x << 7)};
}
static inline __nv_bfloat162_raw __nv_cvt_e8m0x2_to_bf162raw(const __nv_fp8x2_storage_t x) {
  return __nv_bfloat162_raw{
      __nv_cvt_e8m0_to_bf16raw((unsigned char)x).x, __nv_cvt_e8m0_to_bf16raw((unsigned char)(x >> 8)).x};
}

namespace engine {
ENGINE_INLINE float e8m0_value(__nv_fp8_storage_t x) { return Bfloat16::to_float(__nv_cvt_e8m0_to_bf16raw(x).x); }
template <typename Int>
ENGINE_INLINE double integer_to_odd_double(Int value) {  // so that rounding up sees that something is left
  const double near = (double)value;
  const __int128 lost = (__int128)value - (__int128)near;
  return lost == 0 ? near : nextafter(near, lost > 0 ? INFINITY : -INFINITY);
}
}  // namespace engine

#define ENGINE_E8M0_FROM(T) \
  explicit __nv_fp8_e8m0(const T value) : __nv_fp8_e8m0(engine::integer_to_odd_double(value)) {}
#define ENGINE_E8M0_TO(T) \
  explicit operator T() const { return engine::float_to_integer<T>(truncf(engine::e8m0_value(__x))); }
struct __nv_fp8_e8m0 {
  __nv_fp8_storage_t __x;
  __nv_fp8_e8m0() = default;
  explicit __nv_fp8_e8m0(const double value) : __x(__nv_cvt_double_to_e8m0(value, __NV_SATFINITE, cudaRoundPosInf)) {}
  explicit __nv_fp8_e8m0(const float value) : __nv_fp8_e8m0((double)value) {}
  explicit __nv_fp8_e8m0(const __half value) : __nv_fp8_e8m0((double)__half2float(value)) {}
  explicit __nv_fp8_e8m0(const __nv_bfloat16 value) : __nv_fp8_e8m0((double)__bfloat162float(value)) {}
  // clang-format off
  ENGINE_E8M0_FROM(short) ENGINE_E8M0_FROM(int) ENGINE_E8M0_FROM(long) ENGINE_E8M0_FROM(long long)
  ENGINE_E8M0_FROM(unsigned short) ENGINE_E8M0_FROM(unsigned int) ENGINE_E8M0_FROM(unsigned long)
  ENGINE_E8M0_FROM(unsigned long long)
  ENGINE_E8M0_TO(char) ENGINE_E8M0_TO(signed char) ENGINE_E8M0_TO(short) ENGINE_E8M0_TO(int) ENGINE_E8M0_TO(long)
  ENGINE_E8M0_TO(long long) ENGINE_E8M0_TO(unsigned char) ENGINE_E8M0_TO(unsigned short)
  ENGINE_E8M0_TO(unsigned int) ENGINE_E8M0_TO(unsigned long) ENGINE_E8M0_TO(unsigned long long)
      // clang-format on
      explicit operator float() const {
    return engine::e8m0_value(__x);
  }
  explicit operator double() const { return engine::e8m0_value(__x); }
  explicit operator __half() const { return __float2half_rn(engine::e8m0_value(__x)); }
  explicit operator __nv_bfloat16() const { return __nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(__x)); }
  explicit operator bool() const { return true; }  // no power of two is zero
};
#undef ENGINE_E8M0_FROM
#undef ENGINE_E8M0_TO

struct alignas(2) __nv_fp8x2_e8m0 {
  __nv_fp8x2_storage_t __x;
  __nv_fp8x2_e8m0() = default;
  explicit __nv_fp8x2_e8m0(const double2 v) : __x(__nv_cvt_double2_to_e8m0x2(v, __NV_SATFINITE, cudaRoundPosInf)) {}
  explicit __nv_fp8x2_e8m0(const float2 v) : __x(__nv_cvt_float2_to_e8m0x2(v, __NV_SATFINITE, cudaRoundPosInf)) {}
  explicit __nv_fp8x2_e8m0(const __half2 v) : __nv_fp8x2_e8m0(__half22float2(v)) {}
  explicit __nv_fp8x2_e8m0(const __nv_bfloat162 v) : __nv_fp8x2_e8m0(__bfloat1622float2(v)) {}
  explicit operator __nv_bfloat162() const { return __nv_bfloat162(__nv_cvt_e8m0x2_to_bf162raw(__x)); }
  explicit operator float2() const { return __bfloat1622float2((__nv_bfloat162) * this); }
  explicit operator __half2() const { return __float22half2_rn((float2) * this); }
};
struct alignas(4) __nv_fp8x4_e8m0 {
  __nv_fp8x4_storage_t __x;
  __nv_fp8x4_e8m0() = default;
  explicit __nv_fp8x4_e8m0(const float2 low, const float2 high)
      : __x(__nv_fp8x2_e8m0(low).__x | (__nv_fp8x4_storage_t)__nv_fp8x2_e8m0(high).__x << 16) {}
  explicit __nv_fp8x4_e8m0(const float4 v) : __nv_fp8x4_e8m0(make_float2(v.x, v.y), make_float2(v.z, v.w)) {}
  explicit __nv_fp8x4_e8m0(const __half2 low, const __half2 high)
      : __nv_fp8x4_e8m0(__half22float2(low), __half22float2(high)) {}
  explicit __nv_fp8x4_e8m0(const __nv_bfloat162 low, const __nv_bfloat162 high)
      : __nv_fp8x4_e8m0(__bfloat1622float2(low), __bfloat1622float2(high)) {}
  explicit operator float4() const {
    return make_float4(
        engine::e8m0_value((unsigned char)__x), engine::e8m0_value((unsigned char)(__x >> 8)),
        engine::e8m0_value((unsigned char)(__x >> 16)), engine::e8m0_value((unsigned char)(__x >> 24)));
  }
};
