// 8-bit floats: __nv_fp8_e4m3 (no infinity, 448 at most) and __nv_fp8_e5m2 (a half without its last eight bits), in
// ones, pairs and fours, and their conversions. There is no arithmetic on them: a kernel converts, computes, converts.
#pragma once
#include "cuda_bf16.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned int __nv_fp8x4_storage_t;
// What becomes of a number too large: NaN in E4M3 and infinity in E5M2, or the largest finite one.
typedef enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

// ---------------------------------------------------------------- conversions

// To nearest even. As a multiple of the last bit's value a number is rounded by nearbyint; in the integer that encodes
// it a carry runs from the mantissa into the exponent, as it must.
static inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(
    const double x, const __nv_saturation_t saturate, const __nv_fp8_interpretation_t kind) {
  const bool wide = kind == __NV_E4M3;
  const int mantissa = wide ? 3 : 2, least = wide ? -6 : -14, most = wide ? 0x7E : 0x7B;
  const unsigned long long all = engine::bits<unsigned long long>(x);
  const unsigned char sign = (unsigned char)(all >> 56 & 0x80);
  if (x != x) return sign | (wide ? 0x7F : 0x7E | (all >> 50 & 3));
  int exponent = (int)(all >> 52 & 0x7FF) - 1023;
  if (exponent < least) exponent = least;
  int code = most + 1;
  if (exponent < 16) {
    const double per_bit = engine::bits<double>((unsigned long long)(1023 + mantissa - exponent) << 52);
    code = ((exponent - least) << mantissa) + (int)nearbyint(fabs(x) * per_bit);
  }
  if (code > most) code = saturate == __NV_SATFINITE ? most : wide ? 0x7F : 0x7C;
  return (unsigned char)(sign | code);
}
static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(
    const float x, const __nv_saturation_t saturate, const __nv_fp8_interpretation_t kind) {
  return x != x ? 0x7F : __nv_cvt_double_to_fp8((double)x, saturate, kind);  // its one NaN
}
static inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(
    const __half_raw x, const __nv_saturation_t saturate, const __nv_fp8_interpretation_t kind) {
  return __nv_cvt_float_to_fp8(engine::Binary16::to_float(x.x), saturate, kind);
}
static inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(
    const __nv_bfloat16_raw x, const __nv_saturation_t saturate, const __nv_fp8_interpretation_t kind) {
  return __nv_cvt_float_to_fp8(engine::Bfloat16::to_float(x.x), saturate, kind);
}

// Pairs: the first number is in the low byte.
#define ENGINE_FP8_PAIR(NAME, T, ONE, FIRST, SECOND)                                              \
  static inline __nv_fp8x2_storage_t NAME(                                                        \
      const T x, const __nv_saturation_t saturate, const __nv_fp8_interpretation_t kind) {        \
    return (__nv_fp8x2_storage_t)(ONE(SECOND, saturate, kind) << 8 | ONE(FIRST, saturate, kind)); \
  }
// clang-format off
ENGINE_FP8_PAIR(__nv_cvt_double2_to_fp8x2, double2, __nv_cvt_double_to_fp8, x.x, x.y)
ENGINE_FP8_PAIR(__nv_cvt_float2_to_fp8x2, float2, __nv_cvt_float_to_fp8, x.x, x.y)
ENGINE_FP8_PAIR(__nv_cvt_halfraw2_to_fp8x2, __half2_raw, __nv_cvt_halfraw_to_fp8, __half_raw{x.x}, __half_raw{x.y})
ENGINE_FP8_PAIR(
    __nv_cvt_bfloat16raw2_to_fp8x2, __nv_bfloat162_raw, __nv_cvt_bfloat16raw_to_fp8, __nv_bfloat16_raw{x.x},
    __nv_bfloat16_raw{x.y})
// clang-format on
#undef ENGINE_FP8_PAIR

// Exact: a half has every number of both formats.
static inline __half_raw __nv_cvt_fp8_to_halfraw(const __nv_fp8_storage_t x, const __nv_fp8_interpretation_t kind) {
  const unsigned magnitude = x & 0x7Fu, sign = (unsigned)(x & 0x80) << 8;
  if (kind == __NV_E5M2) return __half_raw{(unsigned short)(magnitude > 0x7C ? 0x7FFF : sign | magnitude << 8)};
  if (magnitude == 0x7F) return __half_raw{0x7FFF};
  // E4M3's bits, moved to where a half has them, are of a number that is too small by 2^8.
  const float value = engine::Binary16::to_float((unsigned short)(magnitude << 7)) * 256.0f;
  return __half_raw{(unsigned short)(sign | engine::Binary16::from_float(value))};
}
static inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(
    const __nv_fp8x2_storage_t x, const __nv_fp8_interpretation_t kind) {
  const __half_raw low = __nv_cvt_fp8_to_halfraw((unsigned char)x, kind);
  return __half2_raw{low.x, __nv_cvt_fp8_to_halfraw((unsigned char)(x >> 8), kind).x};
}

// ---------------------------------------------------------------- the types

namespace engine {
ENGINE_INLINE float fp8_value(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) {
  return Binary16::to_float(__nv_cvt_fp8_to_halfraw(x, kind).x);
}
ENGINE_INLINE float2 fp8_values(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
  return float2{fp8_value((unsigned char)x, kind), fp8_value((unsigned char)(x >> 8), kind)};
}
}  // namespace engine

// Constructors saturate. Integers become floats first; what comes back is cut off towards zero and saturates as well.
#define ENGINE_FP8_FROM(NAME, T) \
  explicit NAME(const T value) : NAME(static_cast<float>(value)) {}
#define ENGINE_FP8_TO(KIND, T) \
  explicit operator T() const { return engine::float_to_integer<T>(truncf(engine::fp8_value(__x, KIND))); }
#define ENGINE_FP8(NAME, PAIR, FOUR, KIND)                                                                          \
  struct NAME {                                                                                                     \
    __nv_fp8_storage_t __x;                                                                                         \
    NAME() = default;                                                                                               \
    explicit NAME(const __half value) : __x(__nv_cvt_halfraw_to_fp8(value, __NV_SATFINITE, KIND)) {}                \
    explicit NAME(const __nv_bfloat16 value) : __x(__nv_cvt_bfloat16raw_to_fp8(value, __NV_SATFINITE, KIND)) {}     \
    explicit NAME(const float value) : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, KIND)) {}                   \
    explicit NAME(const double value) : __x(__nv_cvt_double_to_fp8(value, __NV_SATFINITE, KIND)) {}                 \
    ENGINE_FP8_FROM(NAME, unsigned short)                                                                           \
    ENGINE_FP8_FROM(NAME, unsigned int)                                                                             \
    ENGINE_FP8_FROM(NAME, unsigned long)                                                                            \
    ENGINE_FP8_FROM(NAME, unsigned long long)                                                                       \
    ENGINE_FP8_FROM(NAME, short)                                                                                    \
    ENGINE_FP8_FROM(NAME, int)                                                                                      \
    ENGINE_FP8_FROM(NAME, long)                                                                                     \
    ENGINE_FP8_FROM(NAME, long long)                                                                                \
    explicit operator __half() const { return __half(__nv_cvt_fp8_to_halfraw(__x, KIND)); }                         \
    explicit operator float() const { return engine::fp8_value(__x, KIND); }                                        \
    explicit operator double() const { return engine::fp8_value(__x, KIND); }                                       \
    explicit operator __nv_bfloat16() const { return __float2bfloat16_rz(engine::fp8_value(__x, KIND)); }           \
    ENGINE_FP8_TO(KIND, char)                                                                                       \
    ENGINE_FP8_TO(KIND, signed char)                                                                                \
    ENGINE_FP8_TO(KIND, unsigned char)                                                                              \
    ENGINE_FP8_TO(KIND, short)                                                                                      \
    ENGINE_FP8_TO(KIND, unsigned short)                                                                             \
    ENGINE_FP8_TO(KIND, int)                                                                                        \
    ENGINE_FP8_TO(KIND, unsigned int)                                                                               \
    ENGINE_FP8_TO(KIND, long)                                                                                       \
    ENGINE_FP8_TO(KIND, unsigned long)                                                                              \
    ENGINE_FP8_TO(KIND, long long)                                                                                  \
    ENGINE_FP8_TO(KIND, unsigned long long)                                                                         \
    explicit operator bool() const { return (__x & 0x7F) != 0; }                                                    \
  };                                                                                                                \
  struct alignas(2) PAIR {                                                                                          \
    __nv_fp8x2_storage_t __x;                                                                                       \
    PAIR() = default;                                                                                               \
    explicit PAIR(const __half2 value) : __x(__nv_cvt_halfraw2_to_fp8x2(value, __NV_SATFINITE, KIND)) {}            \
    explicit PAIR(const __nv_bfloat162 value) : __x(__nv_cvt_bfloat16raw2_to_fp8x2(value, __NV_SATFINITE, KIND)) {} \
    explicit PAIR(const float2 value) : __x(__nv_cvt_float2_to_fp8x2(value, __NV_SATFINITE, KIND)) {}               \
    explicit PAIR(const double2 value) : __x(__nv_cvt_double2_to_fp8x2(value, __NV_SATFINITE, KIND)) {}             \
    explicit operator __half2() const { return __half2(__nv_cvt_fp8x2_to_halfraw2(__x, KIND)); }                    \
    explicit operator float2() const { return engine::fp8_values(__x, KIND); }                                      \
  };                                                                                                                \
  struct alignas(4) FOUR {                                                                                          \
    __nv_fp8x4_storage_t __x;                                                                                       \
    FOUR() = default;                                                                                               \
    explicit FOUR(const __half2 low, const __half2 high)                                                            \
        : __x(PAIR(low).__x | (__nv_fp8x4_storage_t)PAIR(high).__x << 16) {}                                        \
    explicit FOUR(const __nv_bfloat162 low, const __nv_bfloat162 high)                                              \
        : __x(PAIR(low).__x | (__nv_fp8x4_storage_t)PAIR(high).__x << 16) {}                                        \
    explicit FOUR(const float4 v)                                                                                   \
        : __x(PAIR(make_float2(v.x, v.y)).__x | (__nv_fp8x4_storage_t)PAIR(make_float2(v.z, v.w)).__x << 16) {}     \
    explicit FOUR(const double4 v)                                                                                  \
        : __x(PAIR(make_double2(v.x, v.y)).__x | (__nv_fp8x4_storage_t)PAIR(make_double2(v.z, v.w)).__x << 16) {}   \
    explicit operator float4() const {                                                                              \
      const float2 low = engine::fp8_values((__nv_fp8x2_storage_t)__x, KIND);                                       \
      const float2 high = engine::fp8_values((__nv_fp8x2_storage_t)(__x >> 16), KIND);                              \
      return make_float4(low.x, low.y, high.x, high.y);                                                             \
    }                                                                                                               \
  };
ENGINE_FP8(__nv_fp8_e4m3, __nv_fp8x2_e4m3, __nv_fp8x4_e4m3, __NV_E4M3)
ENGINE_FP8(__nv_fp8_e5m2, __nv_fp8x2_e5m2, __nv_fp8x4_e5m2, __NV_E5M2)
#undef ENGINE_FP8
#undef ENGINE_FP8_FROM
#undef ENGINE_FP8_TO

#include "cuda_e8m0.h"
