// Complex numbers as pairs: cuFloatComplex is a float2, cuDoubleComplex a double2, and functions do the arithmetic.
#pragma once
#include "cuda_runtime.h"

typedef float2 cuFloatComplex;
typedef double2 cuDoubleComplex;
typedef cuFloatComplex cuComplex;

// A quotient is scaled by what |re| + |im| of the divisor is, and a magnitude by the larger part, as CUDA's: the square
// of a part may be too large for the type although the result is not.
#define ENGINE_COMPLEX(T, C, NAME, F, ABS, SQRT, FMA, LARGEST)                                    \
  static inline T cuCreal##F(C z) { return z.x; }                                                 \
  static inline T cuCimag##F(C z) { return z.y; }                                                 \
  static inline C make_##NAME(T re, T im) { return C{re, im}; }                                   \
  static inline C cuConj##F(C z) { return C{z.x, -z.y}; }                                         \
  static inline C cuCadd##F(C a, C b) { return C{a.x + b.x, a.y + b.y}; }                         \
  static inline C cuCsub##F(C a, C b) { return C{a.x - b.x, a.y - b.y}; }                         \
  static inline C cuCmul##F(C a, C b) { return C{a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; } \
  static inline C cuCdiv##F(C a, C b) {                                                           \
    const T scale = T(1) / (ABS(b.x) + ABS(b.y));                                                 \
    const C p = {a.x * scale, a.y * scale}, q = {b.x * scale, b.y * scale};                       \
    const T inverse = T(1) / (q.x * q.x + q.y * q.y);                                             \
    return C{(p.x * q.x + p.y * q.y) * inverse, (p.y * q.x - p.x * q.y) * inverse};               \
  }                                                                                               \
  static inline T cuCabs##F(C z) {                                                                \
    const T x = ABS(z.x), y = ABS(z.y), more = x > y ? x : y, less = x > y ? y : x;               \
    if (more == 0 || more > LARGEST || less > LARGEST) return more + less;                        \
    const T ratio = less / more;                                                                  \
    return more * SQRT(T(1) + ratio * ratio);                                                     \
  }                                                                                               \
  static inline C cuCfma##F(C a, C b, C c) {                                                      \
    return C{FMA(-a.y, b.y, FMA(a.x, b.x, c.x)), FMA(a.y, b.x, FMA(a.x, b.y, c.y))};              \
  }
ENGINE_COMPLEX(float, cuFloatComplex, cuFloatComplex, f, fabsf, sqrtf, fmaf, 3.402823466e38f)
ENGINE_COMPLEX(double, cuDoubleComplex, cuDoubleComplex, , fabs, sqrt, fma, 1.79769313486231570e+308)
#undef ENGINE_COMPLEX

static inline cuComplex make_cuComplex(float re, float im) { return make_cuFloatComplex(re, im); }
static inline cuDoubleComplex cuComplexFloatToDouble(cuFloatComplex z) { return cuDoubleComplex{z.x, z.y}; }
static inline cuFloatComplex cuComplexDoubleToFloat(cuDoubleComplex z) {
  return cuFloatComplex{(float)z.x, (float)z.y};
}
