// CUDA's mathematical functions that a host's <math.h> lacks, and the fast intrinsics.
#pragma once
#include <math.h>

#include "device_functions.h"

// ---------------------------------------------------------------- maximum and minimum

namespace engine {
// Inlined, unlike libm's, with its rule that a NaN loses against a number.
template <typename T>
static inline auto max_of(T a, T b) {
  return a > b || b != b ? a : b;
}
template <typename T>
static inline auto min_of(T a, T b) {
  return a < b || b != b ? a : b;
}
template <typename T>
struct IsFloating {
  static constexpr bool value = T(0.5) != T(0);
};
}  // namespace engine

static inline float engine_fmaxf(float a, float b) { return engine::max_of(a, b); }
static inline float engine_fminf(float a, float b) { return engine::min_of(a, b); }
static inline float engine_fmax(float a, float b) { return engine::max_of(a, b); }
static inline float engine_fmin(float a, float b) { return engine::min_of(a, b); }
static inline double engine_fmax(double a, double b) { return engine::max_of(a, b); }
static inline double engine_fmin(double a, double b) { return engine::min_of(a, b); }
template <typename A, typename B>
static inline double engine_fmax(A a, B b) {
  return engine::max_of<double>(a, b);
}
template <typename A, typename B>
static inline double engine_fmin(A a, B b) {
  return engine::min_of<double>(a, b);
}
namespace std {
using ::engine_fmax;
using ::engine_fmaxf;
using ::engine_fmin;
using ::engine_fminf;
}  // namespace std
#define fmaxf engine_fmaxf
#define fminf engine_fminf
#define fmax engine_fmax
#define fmin engine_fmin

namespace engine {
template <typename A, typename B>
static inline auto larger(A a, B b) {
  typedef decltype(true ? A() : B()) T;
  if constexpr (IsFloating<T>::value) return max_of<T>(a, b);
  else return (T)a > (T)b ? (T)a : (T)b;
}
template <typename A, typename B>
static inline auto smaller(A a, B b) {
  typedef decltype(true ? A() : B()) T;
  if constexpr (IsFloating<T>::value) return min_of<T>(a, b);
  else return (T)a < (T)b ? (T)a : (T)b;
}
}  // namespace engine

#ifdef ENGINE_AS_NVRTC
// NVRTC has no function of real numbers for integers: sqrt(2), pow(2, 3) and fmax(1, 2) are ambiguous there. The
// host's library has templates for them; beside these, a call is as ambiguous here.
#define ENGINE_NO_INTEGERS(NAME)                                                              \
  template <typename T, typename = typename std::enable_if<std::is_integral<T>::value>::type> \
  void NAME(T);
ENGINE_NO_INTEGERS(sqrt)
ENGINE_NO_INTEGERS(cbrt)
ENGINE_NO_INTEGERS(exp)
ENGINE_NO_INTEGERS(exp2)
ENGINE_NO_INTEGERS(expm1)
ENGINE_NO_INTEGERS(log)
ENGINE_NO_INTEGERS(log2)
ENGINE_NO_INTEGERS(log10)
ENGINE_NO_INTEGERS(log1p)
ENGINE_NO_INTEGERS(sin)
ENGINE_NO_INTEGERS(cos)
ENGINE_NO_INTEGERS(tan)
ENGINE_NO_INTEGERS(asin)
ENGINE_NO_INTEGERS(acos)
ENGINE_NO_INTEGERS(atan)
ENGINE_NO_INTEGERS(sinh)
ENGINE_NO_INTEGERS(cosh)
ENGINE_NO_INTEGERS(tanh)
ENGINE_NO_INTEGERS(asinh)
ENGINE_NO_INTEGERS(acosh)
ENGINE_NO_INTEGERS(atanh)
ENGINE_NO_INTEGERS(floor)
ENGINE_NO_INTEGERS(ceil)
ENGINE_NO_INTEGERS(round)
ENGINE_NO_INTEGERS(trunc)
ENGINE_NO_INTEGERS(rint)
ENGINE_NO_INTEGERS(nearbyint)
ENGINE_NO_INTEGERS(fabs)
ENGINE_NO_INTEGERS(erf)
ENGINE_NO_INTEGERS(erfc)
ENGINE_NO_INTEGERS(lgamma)
ENGINE_NO_INTEGERS(tgamma)
#undef ENGINE_NO_INTEGERS
#define ENGINE_NO_PAIRS(NAME)                                                                                   \
  template <                                                                                                    \
      typename A, typename B,                                                                                   \
      typename = typename std::enable_if<                                                                       \
          (std::is_integral<A>::value && std::is_integral<B>::value) ||                                         \
          (sizeof(A) + sizeof(B) == 12 && engine::IsFloating<A>::value && engine::IsFloating<B>::value)>::type> \
  void NAME(A, B);
ENGINE_NO_PAIRS(pow)
ENGINE_NO_PAIRS(atan2)
ENGINE_NO_PAIRS(fmod)
ENGINE_NO_PAIRS(hypot)
ENGINE_NO_PAIRS(copysign)
ENGINE_NO_PAIRS(remainder)
ENGINE_NO_PAIRS(fdim)
ENGINE_NO_PAIRS(engine_fmax)
ENGINE_NO_PAIRS(engine_fmin)
#undef ENGINE_NO_PAIRS
#else
template <typename A, typename B>
static inline auto max(A a, B b) -> decltype(true ? A() : B()) {
  return engine::larger(a, b);
}
template <typename A, typename B>
static inline auto min(A a, B b) -> decltype(true ? A() : B()) {
  return engine::smaller(a, b);
}
#endif

// CUDA's own are no templates, so that they come before a template of the same name in a namespace that is used.
#define ENGINE_EXTREMES(A, B)                                       \
  static inline auto max(A a, B b) { return engine::larger(a, b); } \
  static inline auto min(A a, B b) { return engine::smaller(a, b); }
ENGINE_EXTREMES(float, float)
ENGINE_EXTREMES(double, double)
ENGINE_EXTREMES(float, double)
ENGINE_EXTREMES(double, float)
#define ENGINE_EXTREMES_OF(A, B) ENGINE_EXTREMES(A, A) ENGINE_EXTREMES(A, B) ENGINE_EXTREMES(B, A) ENGINE_EXTREMES(B, B)
ENGINE_EXTREMES_OF(int, unsigned)
ENGINE_EXTREMES_OF(long, unsigned long)
ENGINE_EXTREMES_OF(long long, unsigned long long)

static inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }
static inline long long llmin(long long a, long long b) { return a < b ? a : b; }
static inline long long llmax(long long a, long long b) { return a > b ? a : b; }
static inline unsigned long long ullmin(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
static inline unsigned long long ullmax(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

// ---------------------------------------------------------------- functions

namespace engine {
constexpr double PI = 3.14159265358979323846;

// The inverse of erfc: a rational first guess, then Halley's steps (Numerical Recipes, 6.2.2).
static inline double inverse_erfc(double p) {
  if (!(p > 0 && p < 2)) return p == 0 ? INFINITY : p == 2 ? -INFINITY : NAN;
  double q = p < 1 ? p : 2 - p, t = sqrt(-2 * log(q / 2));
  double x = -0.70711 * ((2.30753 + t * 0.27061) / (1 + t * (0.99229 + t * 0.04481)) - t);
  for (int i = 0; i < 3; ++i) {
    double error = erfc(x) - q;
    x += error / (1.12837916709551257390 * exp(-x * x) - x * error);
  }
  return p < 1 ? x : -x;
}
static inline double inverse_erf(double y) {
  if (fabs(y) > 0.5) return inverse_erfc(1 - y);
  double x = 0.88622692545275801 * y;  // 1 - y would lose its digits: Newton's steps on erf itself
  for (int i = 0; i < 6; ++i) x -= (erf(x) - y) * 0.88622692545275801 * exp(x * x);
  return x;
}
static inline double scaled_erfc(double x) {
  if (x < 20) return exp(x * x) * erfc(x);
  double r = 1 / (x * x);
  return (1 - r / 2 * (1 - r * 3 / 2)) / (x * sqrt(PI));
}
// The modified Bessel functions by their power series, whose terms are all positive.
static inline double bessel_i(int order, double x) {
  double half = x / 2, term = order ? half : 1, sum = term;
  for (int k = 1; k < 400 && fabs(term) > 1e-18 * fabs(sum); ++k)
    sum += term *= half * half / (k * (double)(k + order));
  return sum;
}
// sin(pi x) and cos(pi x), exact where x is a multiple of one half.
static inline double sin_pi(double x) {
  double r = x - 2 * nearbyint(x / 2);  // in [-1, 1]
  return fabs(r) == 1 ? 0 : fabs(r) > 0.5 ? sin(PI * (copysign(1.0, r) - r)) : sin(PI * r);
}
static inline double cos_pi(double x) {
  double r = fabs(x - 2 * nearbyint(x / 2));
  return r == 0.5 ? 0 : r > 0.5 ? -cos(PI * (1 - r)) : cos(PI * r);
}
template <typename... T>
static inline auto norm(T... v) {
  double sum = 0;
  ((sum += (double)v * v), ...);
  return sqrt(sum);
}
}  // namespace engine

// Newer C libraries have some of these names, or are about to.
#define rsqrt engine_rsqrt
#define rsqrtf engine_rsqrtf
#define sinpi engine_sinpi
#define sinpif engine_sinpif
#define cospi engine_cospi
#define cospif engine_cospif

// In float and in double: sinpif and sinpi. Computed in double, so that the last bit of a float is right.
#define ENGINE_MATH1(NAME, EXPRESSION)   \
  static inline float NAME##f(float a) { \
    double x = a;                        \
    return (float)(EXPRESSION);          \
  }                                      \
  static inline double NAME(double x) { return EXPRESSION; }
ENGINE_MATH1(engine_rsqrt, 1.0 / sqrt(x))
ENGINE_MATH1(rcbrt, 1.0 / cbrt(x))
ENGINE_MATH1(engine_sinpi, engine::sin_pi(x))
ENGINE_MATH1(engine_cospi, engine::cos_pi(x))
ENGINE_MATH1(erfinv, engine::inverse_erf(x))
ENGINE_MATH1(erfcinv, engine::inverse_erfc(x))
ENGINE_MATH1(erfcx, engine::scaled_erfc(x))
ENGINE_MATH1(normcdf, 0.5 * erfc(-x * 0.70710678118654752440))
ENGINE_MATH1(normcdfinv, -1.41421356237309504880 * engine::inverse_erfc(2 * x))
ENGINE_MATH1(cyl_bessel_i0, engine::bessel_i(0, x))
ENGINE_MATH1(cyl_bessel_i1, engine::bessel_i(1, x))
#undef ENGINE_MATH1

#define ENGINE_MATH(T, SUFFIX)                                                                      \
  static inline T rhypot##SUFFIX(T a, T b) { return (T)(1 / hypot((double)a, (double)b)); }         \
  static inline T norm3d##SUFFIX(T a, T b, T c) { return (T)engine::norm(a, b, c); }                \
  static inline T rnorm3d##SUFFIX(T a, T b, T c) { return (T)(1 / engine::norm(a, b, c)); }         \
  static inline T norm4d##SUFFIX(T a, T b, T c, T d) { return (T)engine::norm(a, b, c, d); }        \
  static inline T rnorm4d##SUFFIX(T a, T b, T c, T d) { return (T)(1 / engine::norm(a, b, c, d)); } \
  static inline void sincospi##SUFFIX(T x, T* s, T* c) { *s = engine_sinpi##SUFFIX(x), *c = engine_cospi##SUFFIX(x); }
ENGINE_MATH(float, f)
ENGINE_MATH(double, )
#undef ENGINE_MATH
static inline double norm(int n, const double* v) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += v[i] * v[i];
  return sqrt(sum);
}
static inline float normf(int n, const float* v) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += (double)v[i] * v[i];
  return (float)sqrt(sum);
}
static inline double rnorm(int n, const double* v) { return 1 / norm(n, v); }
static inline float rnormf(int n, const float* v) { return 1 / normf(n, v); }
static inline float fdividef(float a, float b) { return a / b; }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
#ifdef __APPLE__  // lacks what Linux's libraries share with CUDA
static inline float j0f(float x) { return (float)j0(x); }
static inline float j1f(float x) { return (float)j1(x); }
static inline float jnf(int n, float x) { return (float)jn(n, x); }
static inline float y0f(float x) { return (float)y0(x); }
static inline float y1f(float x) { return (float)y1(x); }
static inline float ynf(int n, float x) { return (float)yn(n, x); }
static inline float exp10f(float x) { return (float)pow(10.0, (double)x); }
static inline double exp10(double x) { return pow(10.0, x); }
static inline void sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
static inline void sincos(double x, double* s, double* c) { *s = sin(x), *c = cos(x); }
#endif

// ---------------------------------------------------------------- intrinsics

// The fast intrinsics trade accuracy for speed on a GPU. Here they are the accurate functions: a kernel's error
// on the CPU is no larger than on a GPU, and may be smaller.
// (Macros, because glibc has names of its own such as __expf.)
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __tanhf(x) tanhf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)
#define __fdividef(a, b) ((float)(a) / (float)(b))
#define __frsqrt_rn(x) rsqrtf(x)
