// One 16-bit float type and its pair, with every function that CUDA has for them. Read once for each type, so there
// is no include guard: cuda_fp16.h and cuda_bf16.h set the names below.
//   ENGINE_H, ENGINE_H2        the types: __half, __half2
//   ENGINE_RAW, ENGINE_RAW2    their bits as plain structs
//   ENGINE_WORD, ENGINE_WORD2  what the functions call them: half, half2
//   ENGINE_FORMAT              how they are converted: engine::Binary16
//   ENGINE_DTYPE, ENGINE_OTHER its name in NumPy; the other 16-bit type
//   ENGINE_NO_CONVERSIONS, ENGINE_NO_OPERATORS, ENGINE_NO_OPERATORS2: 1 if the source defines the macro that disables them
// Arithmetic is done in float and rounded once for each operation, as the hardware does: for + - * / and sqrt a float
// has enough bits (2 * 11 + 2) that rounding twice is rounding once.

#define ENGINE_JOIN_(a, b, c) a##b##c
#define ENGINE_JOIN(a, b, c) ENGINE_JOIN_(a, b, c)

struct alignas(2) ENGINE_RAW {
  unsigned short x;
};
struct alignas(4) ENGINE_RAW2 {
  unsigned short x, y;
};

// ---------------------------------------------------------------- the types

struct alignas(2) ENGINE_H {
  unsigned short __x;

  ENGINE_H() = default;  // trivial, so that `__shared__ half s[64];` is as uninitialised as on a GPU
  constexpr ENGINE_H(const ENGINE_RAW& raw) : __x(raw.x) {}
  operator ENGINE_RAW() const { return ENGINE_RAW{__x}; }
  operator ENGINE_RAW() const volatile { return ENGINE_RAW{__x}; }
  ENGINE_H& operator=(const ENGINE_RAW& raw) { return __x = raw.x, *this; }
  volatile ENGINE_H& operator=(const ENGINE_RAW& raw) volatile { return __x = raw.x, *this; }

  static constexpr ENGINE_H engine_of_bits(unsigned short all) { return ENGINE_H(ENGINE_RAW{all}); }
  static ENGINE_H engine_of(float value) { return engine_of_bits(ENGINE_FORMAT::from_float(value)); }
  static ENGINE_H engine_of(double value) { return engine_of(engine::to_odd(value)); }
  float engine_value() const { return ENGINE_FORMAT::to_float(__x); }

#if !ENGINE_NO_CONVERSIONS
  // Exactly CUDA's set: with one more or one less, other expressions would be ambiguous than on a GPU.
  explicit ENGINE_H(ENGINE_OTHER value);
  ENGINE_H(float value) : ENGINE_H(engine_of(value)) {}
  ENGINE_H(double value) : ENGINE_H(engine_of(value)) {}
  operator float() const { return engine_value(); }
  operator bool() const { return (__x & 0x7FFF) != 0; }
#define ENGINE_FROM(T) \
  ENGINE_H(T value) : ENGINE_H(engine_of(engine::integer_to_odd(value))) {}
#define ENGINE_TO(T) \
  operator T() const { return engine::float_to_integer<T>(truncf(engine_value())); }
  // clang-format off
  ENGINE_FROM(short) ENGINE_FROM(int) ENGINE_FROM(long) ENGINE_FROM(long long)
  ENGINE_FROM(unsigned short) ENGINE_FROM(unsigned int) ENGINE_FROM(unsigned long) ENGINE_FROM(unsigned long long)
  ENGINE_TO(char) ENGINE_TO(signed char) ENGINE_TO(short) ENGINE_TO(int) ENGINE_TO(long) ENGINE_TO(long long)
  ENGINE_TO(unsigned char) ENGINE_TO(unsigned short) ENGINE_TO(unsigned int) ENGINE_TO(unsigned long)
  ENGINE_TO(unsigned long long)
  // clang-format on
#undef ENGINE_FROM
#undef ENGINE_TO
#endif
};

struct alignas(4) ENGINE_H2 {
  ENGINE_H x, y;

#ifdef ENGINE_CHECKED
  ENGINE_COPIES(ENGINE_H2)
#else
  ENGINE_H2() = default;
#endif
  constexpr ENGINE_H2(const ENGINE_H& low, const ENGINE_H& high) : x(low), y(high) {}
  ENGINE_H2(const ENGINE_RAW2& raw) : x(ENGINE_RAW{raw.x}), y(ENGINE_RAW{raw.y}) {}
  operator ENGINE_RAW2() const { return ENGINE_RAW2{x.__x, y.__x}; }
};

namespace engine {
ENGINE_NAME(ENGINE_H, ENGINE_DTYPE)
ENGINE_NAME(ENGINE_H2, ENGINE_DTYPE)
}  // namespace engine

// ---------------------------------------------------------------- conversions

static inline ENGINE_H ENGINE_JOIN(__float2, ENGINE_WORD, )(float a) { return ENGINE_H::engine_of(a); }
static inline ENGINE_H ENGINE_JOIN(__double2, ENGINE_WORD, )(double a) { return ENGINE_H::engine_of(a); }
static inline float ENGINE_JOIN(__, ENGINE_WORD, 2float)(ENGINE_H a) { return a.engine_value(); }

// Each rounding mode: from a float, from the integers, and to the integers.
#define ENGINE_INTEGER(T, NAME, SUFFIX, MODE, WHOLE)                                      \
  static inline T ENGINE_JOIN(__, ENGINE_WORD, 2##NAME##_##SUFFIX)(ENGINE_H a) {          \
    return engine::float_to_integer<T>(WHOLE(a.engine_value()));                          \
  }                                                                                       \
  static inline ENGINE_H ENGINE_JOIN(__##NAME##2, ENGINE_WORD, _##SUFFIX)(T a) {          \
    float top = engine::integer_to_odd(a);                                                \
    return ENGINE_H::engine_of_bits(ENGINE_FORMAT::from_float(top, engine::Round::MODE)); \
  }
#define ENGINE_ROUND(SUFFIX, MODE, WHOLE)                                               \
  static inline ENGINE_H ENGINE_JOIN(__float2, ENGINE_WORD, _##SUFFIX)(float a) {       \
    return ENGINE_H::engine_of_bits(ENGINE_FORMAT::from_float(a, engine::Round::MODE)); \
  }                                                                                     \
  ENGINE_INTEGER(short, short, SUFFIX, MODE, WHOLE)                                     \
  ENGINE_INTEGER(unsigned short, ushort, SUFFIX, MODE, WHOLE)                           \
  ENGINE_INTEGER(int, int, SUFFIX, MODE, WHOLE)                                         \
  ENGINE_INTEGER(unsigned int, uint, SUFFIX, MODE, WHOLE)                               \
  ENGINE_INTEGER(long long, ll, SUFFIX, MODE, WHOLE)                                    \
  ENGINE_INTEGER(unsigned long long, ull, SUFFIX, MODE, WHOLE)
ENGINE_ROUND(rn, nearest, nearbyintf)
ENGINE_ROUND(rz, zero, truncf)
ENGINE_ROUND(ru, up, ceilf)
ENGINE_ROUND(rd, down, floorf)
#undef ENGINE_ROUND
#undef ENGINE_INTEGER
static inline signed char ENGINE_JOIN(__, ENGINE_WORD, 2char_rz)(ENGINE_H a) {
  return engine::float_to_integer<signed char>(truncf(a.engine_value()));
}
static inline unsigned char ENGINE_JOIN(__, ENGINE_WORD, 2uchar_rz)(ENGINE_H a) {
  return engine::float_to_integer<unsigned char>(truncf(a.engine_value()));
}

static inline short ENGINE_JOIN(__, ENGINE_WORD, _as_short)(ENGINE_H a) { return (short)a.__x; }
static inline unsigned short ENGINE_JOIN(__, ENGINE_WORD, _as_ushort)(ENGINE_H a) { return a.__x; }
static inline ENGINE_H ENGINE_JOIN(__short_as_, ENGINE_WORD, )(short a) {
  return ENGINE_H::engine_of_bits((unsigned short)a);
}
static inline ENGINE_H ENGINE_JOIN(__ushort_as_, ENGINE_WORD, )(unsigned short a) {
  return ENGINE_H::engine_of_bits(a);
}

// Pairs: made, taken apart, shuffled.
static inline ENGINE_H2 ENGINE_JOIN(make_, ENGINE_WORD2, )(ENGINE_H x, ENGINE_H y) { return ENGINE_H2(x, y); }
static inline ENGINE_H2 ENGINE_JOIN(__halves2, ENGINE_WORD2, )(ENGINE_H a, ENGINE_H b) { return ENGINE_H2(a, b); }
static inline ENGINE_H2 ENGINE_JOIN(__, ENGINE_WORD, ENGINE_JOIN(2, ENGINE_WORD2, ))(ENGINE_H a) {
  return ENGINE_H2(a, a);
}
static inline ENGINE_H2 ENGINE_JOIN(__floats2, ENGINE_WORD2, _rn)(float a, float b) {
  return ENGINE_H2(ENGINE_H::engine_of(a), ENGINE_H::engine_of(b));
}
static inline ENGINE_H2 ENGINE_JOIN(__float2, ENGINE_WORD2, _rn)(float a) {
  return ENGINE_H2(ENGINE_H::engine_of(a), ENGINE_H::engine_of(a));
}
static inline ENGINE_H2 ENGINE_JOIN(__float22, ENGINE_WORD2, _rn)(float2 a) {
  return ENGINE_H2(ENGINE_H::engine_of(a.x), ENGINE_H::engine_of(a.y));
}
static inline float2 ENGINE_JOIN(__, ENGINE_WORD2, 2float2)(ENGINE_H2 a) {
  return float2{a.x.engine_value(), a.y.engine_value()};
}
static inline float __low2float(ENGINE_H2 a) { return a.x.engine_value(); }
static inline float __high2float(ENGINE_H2 a) { return a.y.engine_value(); }
static inline ENGINE_H ENGINE_JOIN(__low2, ENGINE_WORD, )(ENGINE_H2 a) { return a.x; }
static inline ENGINE_H ENGINE_JOIN(__high2, ENGINE_WORD, )(ENGINE_H2 a) { return a.y; }
static inline ENGINE_H2 ENGINE_JOIN(__low2, ENGINE_WORD2, )(ENGINE_H2 a) { return ENGINE_H2(a.x, a.x); }
static inline ENGINE_H2 ENGINE_JOIN(__high2, ENGINE_WORD2, )(ENGINE_H2 a) { return ENGINE_H2(a.y, a.y); }
static inline ENGINE_H2 ENGINE_JOIN(__lows2, ENGINE_WORD2, )(ENGINE_H2 a, ENGINE_H2 b) { return ENGINE_H2(a.x, b.x); }
static inline ENGINE_H2 ENGINE_JOIN(__highs2, ENGINE_WORD2, )(ENGINE_H2 a, ENGINE_H2 b) { return ENGINE_H2(a.y, b.y); }
static inline ENGINE_H2 __lowhigh2highlow(ENGINE_H2 a) { return ENGINE_H2(a.y, a.x); }

// ---------------------------------------------------------------- arithmetic

// A function of one, two or three numbers, and the same on pairs. x, y and z are the arguments as floats.
#define ENGINE_PAIR1(PAIR, NAME) \
  static inline ENGINE_H2 PAIR(ENGINE_H2 a) { return ENGINE_H2(NAME(a.x), NAME(a.y)); }
#define ENGINE_PAIR2(PAIR, NAME) \
  static inline ENGINE_H2 PAIR(ENGINE_H2 a, ENGINE_H2 b) { return ENGINE_H2(NAME(a.x, b.x), NAME(a.y, b.y)); }
#define ENGINE_PAIR3(PAIR, NAME)                                        \
  static inline ENGINE_H2 PAIR(ENGINE_H2 a, ENGINE_H2 b, ENGINE_H2 c) { \
    return ENGINE_H2(NAME(a.x, b.x, c.x), NAME(a.y, b.y, c.y));         \
  }
#define ENGINE_BINARY(NAME, PAIR, EXPRESSION)           \
  static inline ENGINE_H NAME(ENGINE_H a, ENGINE_H b) { \
    float x = a.engine_value(), y = b.engine_value();   \
    return ENGINE_H::engine_of(EXPRESSION);             \
  }                                                     \
  ENGINE_PAIR2(PAIR, NAME)
#define ENGINE_FMA(NAME, PAIR, CLAMP)                                                   \
  static inline ENGINE_H NAME(ENGINE_H a, ENGINE_H b, ENGINE_H c) {                     \
    double product = (double)a.engine_value() * b.engine_value(), z = c.engine_value(); \
    float sum = engine::to_odd(engine::sum_to_odd(product, z, product + z));            \
    return ENGINE_H::engine_of(CLAMP(sum));                                             \
  }                                                                                     \
  ENGINE_PAIR3(PAIR, NAME)
#define ENGINE_AS_IT_IS(x) (x)
#define ENGINE_RELU(x) ((x) <= 0.0f ? 0.0f : (x))

// (A GPU's compiler may fuse __hmul and __hadd; the _rn forms forbid it. Here nothing is fused.)
// clang-format off
ENGINE_BINARY(__hadd, __hadd2, x + y)
ENGINE_BINARY(__hsub, __hsub2, x - y)
ENGINE_BINARY(__hmul, __hmul2, x * y)
ENGINE_BINARY(__hdiv, __h2div, x / y)
ENGINE_BINARY(__hadd_rn, __hadd2_rn, x + y)
ENGINE_BINARY(__hsub_rn, __hsub2_rn, x - y)
ENGINE_BINARY(__hmul_rn, __hmul2_rn, x * y)
ENGINE_BINARY(__hadd_sat, __hadd2_sat, __saturatef(x + y))
ENGINE_BINARY(__hsub_sat, __hsub2_sat, __saturatef(x - y))
ENGINE_BINARY(__hmul_sat, __hmul2_sat, __saturatef(x * y))
ENGINE_FMA(__hfma, __hfma2, ENGINE_AS_IT_IS)
ENGINE_FMA(__hfma_sat, __hfma2_sat, __saturatef)
ENGINE_FMA(__hfma_relu, __hfma2_relu, ENGINE_RELU)
// clang-format on

static inline bool __hisnan(ENGINE_H a) { return a.engine_value() != a.engine_value(); }
static inline ENGINE_H __hneg(ENGINE_H a) { return ENGINE_H::engine_of_bits(__hisnan(a) ? 0x7FFF : a.__x ^ 0x8000); }
static inline ENGINE_H __habs(ENGINE_H a) { return ENGINE_H::engine_of_bits(__hisnan(a) ? 0x7FFF : a.__x & 0x7FFF); }
ENGINE_PAIR1(__hneg2, __hneg)
ENGINE_PAIR1(__habs2, __habs)
static inline int __hisinf(ENGINE_H a) { return fabsf(a.engine_value()) != INFINITY ? 0 : a.__x >> 15 ? -1 : 1; }
static inline ENGINE_H2 __hisnan2(ENGINE_H2 a) {
  return ENGINE_H2(ENGINE_H::engine_of(__hisnan(a.x) ? 1.0f : 0.0f), ENGINE_H::engine_of(__hisnan(a.y) ? 1.0f : 0.0f));
}

// A NaN loses against a number, and +0 is more than -0: equal numbers differ at most in the sign bit, so "and" keeps
// it clear where one of them has it clear.
#define ENGINE_EXTREME(NAME, PAIR, MORE, ZERO)                                                 \
  static inline ENGINE_H NAME(ENGINE_H a, ENGINE_H b) {                                        \
    float x = a.engine_value(), y = b.engine_value();                                          \
    if (x != x || y != y) return x != x ? (y != y ? ENGINE_H::engine_of_bits(0x7FFF) : b) : a; \
    return x == y ? ENGINE_H::engine_of_bits(a.__x ZERO b.__x) : x MORE y ? a : b;             \
  }                                                                                            \
  static inline ENGINE_H NAME##_nan(ENGINE_H a, ENGINE_H b) {                                  \
    return __hisnan(a) || __hisnan(b) ? ENGINE_H::engine_of_bits(0x7FFF) : NAME(a, b);         \
  }                                                                                            \
  ENGINE_PAIR2(PAIR, NAME)                                                                     \
  ENGINE_PAIR2(PAIR##_nan, NAME##_nan)
ENGINE_EXTREME(__hmax, __hmax2, >, &)
ENGINE_EXTREME(__hmin, __hmin2, <, |)

// Complex numbers: a * b + c.
static inline ENGINE_H2 __hcmadd(ENGINE_H2 a, ENGINE_H2 b, ENGINE_H2 c) {
  return ENGINE_H2(__hfma(__hneg(a.y), b.y, __hfma(a.x, b.x, c.x)), __hfma(a.y, b.x, __hfma(a.x, b.y, c.y)));
}

// ---------------------------------------------------------------- comparisons

// Each as bool, as a pair of 1.0 and 0.0, as a pair of masks, and as "both".
#define ENGINE_COMPARE(OP, EXPRESSION)                                                                               \
  static inline bool __h##OP(ENGINE_H a, ENGINE_H b) {                                                               \
    float x = a.engine_value(), y = b.engine_value();                                                                \
    return EXPRESSION;                                                                                               \
  }                                                                                                                  \
  static inline ENGINE_H2 __h##OP##2(ENGINE_H2 a, ENGINE_H2 b) {                                                     \
    return ENGINE_H2(                                                                                                \
        ENGINE_H::engine_of(__h##OP(a.x, b.x) ? 1.0f : 0.0f), ENGINE_H::engine_of(__h##OP(a.y, b.y) ? 1.0f : 0.0f)); \
  }                                                                                                                  \
  static inline unsigned __h##OP##2_mask(ENGINE_H2 a, ENGINE_H2 b) {                                                 \
    return (__h##OP(a.x, b.x) ? 0xFFFFu : 0) | (__h##OP(a.y, b.y) ? 0xFFFF0000u : 0);                                \
  }                                                                                                                  \
  static inline bool __hb##OP##2(ENGINE_H2 a, ENGINE_H2 b) { return __h##OP(a.x, b.x) && __h##OP(a.y, b.y); }
// clang-format off
ENGINE_COMPARE(eq, x == y)
ENGINE_COMPARE(ne, x < y || x > y)
ENGINE_COMPARE(lt, x < y)
ENGINE_COMPARE(le, x <= y)
ENGINE_COMPARE(gt, x > y)
ENGINE_COMPARE(ge, x >= y)
ENGINE_COMPARE(equ, !(x < y || x > y))  // u: unordered, true where one is NaN
ENGINE_COMPARE(neu, x != y)
ENGINE_COMPARE(ltu, !(x >= y))
ENGINE_COMPARE(leu, !(x > y))
ENGINE_COMPARE(gtu, !(x <= y))
ENGINE_COMPARE(geu, !(x < y))
// clang-format on

// ---------------------------------------------------------------- functions

// Computed in double, so that the last bit is right wherever the host's library comes from.
#define ENGINE_FUNCTION(NAME, PAIR, EXPRESSION)       \
  static inline ENGINE_H NAME(ENGINE_H a) {           \
    double x = a.engine_value();                      \
    return ENGINE_H::engine_of((double)(EXPRESSION)); \
  }                                                   \
  ENGINE_PAIR1(PAIR, NAME)
ENGINE_FUNCTION(hsqrt, h2sqrt, sqrt(x))
ENGINE_FUNCTION(hrsqrt, h2rsqrt, 1.0 / sqrt(x))
ENGINE_FUNCTION(hrcp, h2rcp, 1.0 / x)
ENGINE_FUNCTION(hexp, h2exp, exp(x))
ENGINE_FUNCTION(hexp2, h2exp2, exp2(x))
ENGINE_FUNCTION(hexp10, h2exp10, pow(10.0, x))
ENGINE_FUNCTION(hlog, h2log, log(x))
ENGINE_FUNCTION(hlog2, h2log2, log2(x))
ENGINE_FUNCTION(hlog10, h2log10, log10(x))
ENGINE_FUNCTION(hsin, h2sin, sin(x))
ENGINE_FUNCTION(hcos, h2cos, cos(x))
ENGINE_FUNCTION(htanh, h2tanh, tanh(x))
ENGINE_FUNCTION(htanh_approx, h2tanh_approx, tanh(x))
ENGINE_FUNCTION(htrunc, h2trunc, trunc(x))
ENGINE_FUNCTION(hceil, h2ceil, ceil(x))
ENGINE_FUNCTION(hfloor, h2floor, floor(x))
ENGINE_FUNCTION(hrint, h2rint, nearbyint(x))

#if !ENGINE_NO_CONVERSIONS
// CUDA's sqrt(float) also takes a half. The host has a sqrt(long double) as well, and could not choose.
#define ENGINE_FLOAT_FUNCTION(NAME) \
  static inline float NAME(ENGINE_H a) { return NAME(a.engine_value()); }
// clang-format off
ENGINE_FLOAT_FUNCTION(sqrt) ENGINE_FLOAT_FUNCTION(cbrt) ENGINE_FLOAT_FUNCTION(exp) ENGINE_FLOAT_FUNCTION(exp2)
ENGINE_FLOAT_FUNCTION(expm1) ENGINE_FLOAT_FUNCTION(log) ENGINE_FLOAT_FUNCTION(log2) ENGINE_FLOAT_FUNCTION(log10)
ENGINE_FLOAT_FUNCTION(log1p) ENGINE_FLOAT_FUNCTION(sin) ENGINE_FLOAT_FUNCTION(cos) ENGINE_FLOAT_FUNCTION(tan)
ENGINE_FLOAT_FUNCTION(asin) ENGINE_FLOAT_FUNCTION(acos) ENGINE_FLOAT_FUNCTION(atan) ENGINE_FLOAT_FUNCTION(sinh)
ENGINE_FLOAT_FUNCTION(cosh) ENGINE_FLOAT_FUNCTION(tanh) ENGINE_FLOAT_FUNCTION(erf) ENGINE_FLOAT_FUNCTION(erfc)
ENGINE_FLOAT_FUNCTION(fabs) ENGINE_FLOAT_FUNCTION(floor) ENGINE_FLOAT_FUNCTION(ceil) ENGINE_FLOAT_FUNCTION(trunc)
ENGINE_FLOAT_FUNCTION(round) ENGINE_FLOAT_FUNCTION(rint)
// clang-format on
#undef ENGINE_FLOAT_FUNCTION
#endif

    // Not the template of cuda_runtime.h, which needs the operators that a source may switch off.
    static inline ENGINE_H atomicAdd(ENGINE_H* address, ENGINE_H value) {
  return engine::atomic_update(address, [=](ENGINE_H old) { return __hadd(old, value); });
}
static inline ENGINE_H2 atomicAdd(ENGINE_H2* address, ENGINE_H2 value) {
  // As a word: clang's atomics require trivially copyable types, which pairs are not in a checked build.
  auto pair_of = [](unsigned int word) {
    ENGINE_H2 pair;
    __builtin_memcpy((void*)&pair, &word, sizeof pair);
    return pair;
  };
  return pair_of(engine::atomic_update((unsigned int*)address, [=](unsigned int old) {
    const ENGINE_H2 sum = __hadd2(pair_of(old), value);
    unsigned int word;
    __builtin_memcpy(&word, &sum, sizeof word);
    return word;
  }));
}

// ---------------------------------------------------------------- operators

#define ENGINE_OPERATORS(T, ADD, SUB, MUL, DIV, NEG, ONE)                 \
  static inline T operator+(const T& a, const T& b) { return ADD(a, b); } \
  static inline T operator-(const T& a, const T& b) { return SUB(a, b); } \
  static inline T operator*(const T& a, const T& b) { return MUL(a, b); } \
  static inline T operator/(const T& a, const T& b) { return DIV(a, b); } \
  static inline T& operator+=(T& a, const T& b) { return a = ADD(a, b); } \
  static inline T& operator-=(T& a, const T& b) { return a = SUB(a, b); } \
  static inline T& operator*=(T& a, const T& b) { return a = MUL(a, b); } \
  static inline T& operator/=(T& a, const T& b) { return a = DIV(a, b); } \
  static inline T operator+(const T& a) { return a; }                     \
  static inline T operator-(const T& a) { return NEG(a); }                \
  static inline T& operator++(T& a) { return a = ADD(a, ONE); }           \
  static inline T& operator--(T& a) { return a = SUB(a, ONE); }           \
  static inline T operator++(T& a, int) {                                 \
    T before = a;                                                         \
    a = ADD(a, ONE);                                                      \
    return before;                                                        \
  }                                                                       \
  static inline T operator--(T& a, int) {                                 \
    T before = a;                                                         \
    a = SUB(a, ONE);                                                      \
    return before;                                                        \
  }
#define ENGINE_RELATIONS(T, EQ, NEU, LT, LE, GT, GE)                          \
  static inline bool operator==(const T& a, const T& b) { return EQ(a, b); }  \
  static inline bool operator!=(const T& a, const T& b) { return NEU(a, b); } \
  static inline bool operator<(const T& a, const T& b) { return LT(a, b); }   \
  static inline bool operator<=(const T& a, const T& b) { return LE(a, b); }  \
  static inline bool operator>(const T& a, const T& b) { return GT(a, b); }   \
  static inline bool operator>=(const T& a, const T& b) { return GE(a, b); }
#if !ENGINE_NO_OPERATORS
ENGINE_OPERATORS(ENGINE_H, __hadd, __hsub, __hmul, __hdiv, __hneg, ENGINE_H::engine_of(1.0f))
ENGINE_RELATIONS(ENGINE_H, __heq, __hneu, __hlt, __hle, __hgt, __hge)
#endif
#if !ENGINE_NO_OPERATORS2
ENGINE_OPERATORS(
    ENGINE_H2, __hadd2, __hsub2, __hmul2, __h2div, __hneg2,
    ENGINE_H2(ENGINE_H::engine_of(1.0f), ENGINE_H::engine_of(1.0f)))
ENGINE_RELATIONS(ENGINE_H2, __hbeq2, __hbneu2, __hblt2, __hble2, __hbgt2, __hbge2)
#endif

#undef ENGINE_AS_IT_IS
#undef ENGINE_BINARY
#undef ENGINE_COMPARE
#undef ENGINE_EXTREME
#undef ENGINE_FMA
#undef ENGINE_FUNCTION
#undef ENGINE_JOIN
#undef ENGINE_JOIN_
#undef ENGINE_OPERATORS
#undef ENGINE_PAIR1
#undef ENGINE_PAIR2
#undef ENGINE_PAIR3
#undef ENGINE_RELATIONS
#undef ENGINE_RELU

#undef ENGINE_H
#undef ENGINE_H2
#undef ENGINE_RAW
#undef ENGINE_RAW2
#undef ENGINE_WORD
#undef ENGINE_WORD2
#undef ENGINE_DTYPE
#undef ENGINE_FORMAT
#undef ENGINE_OTHER
#undef ENGINE_NO_CONVERSIONS
#undef ENGINE_NO_OPERATORS
#undef ENGINE_NO_OPERATORS2
