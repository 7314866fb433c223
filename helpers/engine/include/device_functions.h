// Loads and stores with a cache hint, bits, conversions, integer arithmetic.
#pragma once
#include <limits.h>
#include <math.h>
#include <string.h>

#include "../cpp/engine.h"

// ---------------------------------------------------------------- loads and stores: a host has no such hints

#define ENGINE_LOAD(NAME)            \
  template <typename T>              \
  ENGINE_INLINE T NAME(const T* p) { \
    return *p;                       \
  }
#define ENGINE_STORE(NAME)                            \
  template <typename T>                               \
  ENGINE_INLINE void NAME(T* p, engine::Plain<T> v) { \
    *p = v;                                           \
  }
ENGINE_LOAD(__ldg)
ENGINE_LOAD(__ldcg)
ENGINE_LOAD(__ldca)
ENGINE_LOAD(__ldcs)
ENGINE_LOAD(__ldlu)
ENGINE_LOAD(__ldcv)
ENGINE_STORE(__stwb)
ENGINE_STORE(__stcg)
ENGINE_STORE(__stcs)
ENGINE_STORE(__stwt)
#undef ENGINE_LOAD
#undef ENGINE_STORE

// ---------------------------------------------------------------- the same bits as another type

namespace engine {
template <typename To, typename From>
static inline auto bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace engine

static inline int __float_as_int(float v) { return engine::bits<int>(v); }
static inline unsigned __float_as_uint(float v) { return engine::bits<unsigned>(v); }
static inline float __int_as_float(int v) { return engine::bits<float>(v); }
static inline float __uint_as_float(unsigned v) { return engine::bits<float>(v); }
static inline long long __double_as_longlong(double v) { return engine::bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return engine::bits<double>(v); }
static inline int __double2hiint(double v) { return (int)(engine::bits<unsigned long long>(v) >> 32); }
static inline int __double2loint(double v) { return (int)engine::bits<unsigned long long>(v); }
static inline double __hiloint2double(int high, int low) {
  return engine::bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

// ---------------------------------------------------------------- conversions

namespace engine {
// Out of range saturates, as on a GPU; in C++ it would be undefined. `low` and `high` are the limits, `high` excluded.
template <typename To>
static inline auto saturating(double v, double low, double high, To lowest, To highest, To of_nan) {
  return v != v ? of_nan : v <= low ? lowest : v >= high ? highest : To(v);
}
static inline int to_int(double v, int of_nan) { return saturating<int>(v, -0x1p31, 0x1p31, INT_MIN, INT_MAX, of_nan); }
static inline unsigned to_uint(double v, unsigned of_nan) {
  return saturating<unsigned>(v, 0.0, 0x1p32, 0u, UINT_MAX, of_nan);
}
static inline long long to_ll(double v) {
  return saturating<long long>(v, -0x1p63, 0x1p63, LLONG_MIN, LLONG_MAX, LLONG_MIN);
}
static inline unsigned long long to_ull(double v) {
  return saturating<unsigned long long>(v, 0.0, 0x1p64, 0ull, ULLONG_MAX, 1ull << 63);
}

// `rounded` is `exact` to nearest; step to the neighbour that another mode requires.
template <typename To, typename Exact>
static inline auto directed(To rounded, Exact exact, Exact back, Toward mode) {
  if (mode == Toward::zero) mode = exact < Exact(0) ? Toward::up : Toward::down;
  if (mode == Toward::up && back < exact) return (To)nextafter(rounded, To(INFINITY));
  if (mode == Toward::down && back > exact) return (To)nextafter(rounded, To(-INFINITY));
  return rounded;
}
template <typename To, typename Int>
static inline auto from_integer(Int v, Toward mode) {
  return directed<To, __int128>((To)v, (__int128)v, (__int128)(To)v, mode);
}
static inline float from_double(double v, Toward mode) {
  return directed<float, double>((float)v, v, (double)(float)v, mode);
}
}  // namespace engine

// (A NaN becomes 0, except from double or to 64 bits.)
#define ENGINE_CONVERT(SUFFIX, ROUND, MODE)                                                                          \
  static inline int __float2int_##SUFFIX(float v) { return engine::to_int(ROUND((double)v), 0); }                    \
  static inline unsigned __float2uint_##SUFFIX(float v) { return engine::to_uint(ROUND((double)v), 0); }             \
  static inline long long __float2ll_##SUFFIX(float v) { return engine::to_ll(ROUND((double)v)); }                   \
  static inline unsigned long long __float2ull_##SUFFIX(float v) { return engine::to_ull(ROUND((double)v)); }        \
  static inline int __double2int_##SUFFIX(double v) { return engine::to_int(ROUND(v), INT_MIN); }                    \
  static inline unsigned __double2uint_##SUFFIX(double v) { return engine::to_uint(ROUND(v), 1u << 31); }            \
  static inline long long __double2ll_##SUFFIX(double v) { return engine::to_ll(ROUND(v)); }                         \
  static inline unsigned long long __double2ull_##SUFFIX(double v) { return engine::to_ull(ROUND(v)); }              \
  static inline float __int2float_##SUFFIX(int v) { return engine::from_integer<float>(v, MODE); }                   \
  static inline float __uint2float_##SUFFIX(unsigned v) { return engine::from_integer<float>(v, MODE); }             \
  static inline float __ll2float_##SUFFIX(long long v) { return engine::from_integer<float>(v, MODE); }              \
  static inline float __ull2float_##SUFFIX(unsigned long long v) { return engine::from_integer<float>(v, MODE); }    \
  static inline double __ll2double_##SUFFIX(long long v) { return engine::from_integer<double>(v, MODE); }           \
  static inline double __ull2double_##SUFFIX(unsigned long long v) { return engine::from_integer<double>(v, MODE); } \
  static inline float __double2float_##SUFFIX(double v) { return engine::from_double(v, MODE); }
ENGINE_CONVERT(rn, nearbyint, engine::Toward::nearest)
ENGINE_CONVERT(rz, trunc, engine::Toward::zero)
ENGINE_CONVERT(ru, ceil, engine::Toward::up)
ENGINE_CONVERT(rd, floor, engine::Toward::down)
#undef ENGINE_CONVERT
static inline double __int2double_rn(int v) { return v; }
static inline double __uint2double_rn(unsigned v) { return v; }

// ---------------------------------------------------------------- bits and integers

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
  return r;
}
static inline unsigned long long __brevll(unsigned long long v) {
  return (unsigned long long)__brev((unsigned)v) << 32 | __brev((unsigned)(v >> 32));
}
// The place of the n-th set bit from `base` on, upwards (n > 0) or downwards (n < 0); all ones if there is none.
static inline unsigned __fns(unsigned mask, unsigned base, int n) {
  int step = n < 0 ? -1 : 1, left = n < 0 ? -n : n;
  if (n == 0) return mask >> base & 1 ? base : 0xffffffffu;
  for (int i = (int)base; i >= 0 && i < 32; i += step)
    if ((mask >> i & 1) && --left == 0) return (unsigned)i;
  return 0xffffffffu;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned)(both >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return r;  // bit 3 of a selector, with which prmt repeats the sign, is dropped
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift < 32 ? __funnelshift_l(low, high, shift) : low;
}
static inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift < 32 ? __funnelshift_r(low, high, shift) : high;
}
static inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xFFFFFFu) * (b & 0xFFFFFFu); }
static inline int __mul24(int a, int b) {
  return (int)((unsigned)((int)((unsigned)a << 8) >> 8) * (unsigned)((int)((unsigned)b << 8) >> 8));
}
static inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return (a > b ? a - b : b - a) + c; }
static inline unsigned __sad(int a, int b, unsigned c) {
  return (a > b ? (unsigned)a - (unsigned)b : (unsigned)b - (unsigned)a) + c;
}
static inline int __hadd(int a, int b) { return (int)(((long long)a + b) >> 1); }
static inline int __rhadd(int a, int b) { return (int)(((long long)a + b + 1) >> 1); }
static inline unsigned __uhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b) >> 1); }
static inline unsigned __urhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b + 1) >> 1); }
