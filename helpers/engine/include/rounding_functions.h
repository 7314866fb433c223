// Arithmetic with a rounding mode of its own: __fadd_rz, __dmul_ru, __fmaf_rd, and the forms to nearest, which a compiler
// may not fuse with others.
#pragma once
#include <math.h>

#include "device_functions.h"

#define ENGINE_UNFUSED(T, NAME, EXPRESSION) \
  static inline T NAME(T a, T b) {          \
    volatile T result = EXPRESSION;         \
    return result;                          \
  }
// clang-format off
ENGINE_UNFUSED(float, __fadd_rn, a + b)
ENGINE_UNFUSED(float, __fsub_rn, a - b)
ENGINE_UNFUSED(float, __fmul_rn, a * b)
ENGINE_UNFUSED(double, __dadd_rn, a + b)
ENGINE_UNFUSED(double, __dsub_rn, a - b)
ENGINE_UNFUSED(double, __dmul_rn, a * b)
// clang-format on
#undef ENGINE_UNFUSED
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmaf_ieee_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __drcp_rn(double a) { return 1.0 / a; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

namespace engine {
// A float's operation is a double's and then a conversion: rounded twice in one direction is rounded once.
ENGINE_INLINE float rounded(Operation operation, Toward mode, float a, float b = 0, float c = 0) {
  return from_double(engine_rounded(operation, mode, (double)a, (double)b, (double)c), mode);
}
ENGINE_INLINE double rounded(Operation operation, Toward mode, double a, double b = 0, double c = 0) {
  return engine_rounded(operation, mode, a, b, c);
}
}  // namespace engine

#define ENGINE_ROUNDED(T, F, FMA, SUFFIX, MODE)                                                                      \
  static inline T __##F##add_##SUFFIX(T a, T b) { return engine::rounded(engine::Operation::add, MODE, a, b); }      \
  static inline T __##F##sub_##SUFFIX(T a, T b) { return engine::rounded(engine::Operation::add, MODE, a, -b); }     \
  static inline T __##F##mul_##SUFFIX(T a, T b) { return engine::rounded(engine::Operation::multiply, MODE, a, b); } \
  static inline T __##F##div_##SUFFIX(T a, T b) { return engine::rounded(engine::Operation::divide, MODE, a, b); }   \
  static inline T __##F##rcp_##SUFFIX(T a) { return engine::rounded(engine::Operation::divide, MODE, T(1), a); }     \
  static inline T __##F##sqrt_##SUFFIX(T a) { return engine::rounded(engine::Operation::root, MODE, a); }            \
  static inline T FMA##_##SUFFIX(T a, T b, T c) { return engine::rounded(engine::Operation::fma, MODE, a, b, c); }
ENGINE_ROUNDED(float, f, __fmaf, rz, engine::Toward::zero)
ENGINE_ROUNDED(float, f, __fmaf, ru, engine::Toward::up)
ENGINE_ROUNDED(float, f, __fmaf, rd, engine::Toward::down)
ENGINE_ROUNDED(double, d, __fma, rz, engine::Toward::zero)
ENGINE_ROUNDED(double, d, __fma, ru, engine::Toward::up)
ENGINE_ROUNDED(double, d, __fma, rd, engine::Toward::down)
#undef ENGINE_ROUNDED
#define __fmaf_ieee_rz __fmaf_rz
#define __fmaf_ieee_ru __fmaf_ru
#define __fmaf_ieee_rd __fmaf_rd
