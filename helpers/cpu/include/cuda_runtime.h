// CUDA C++ for a host compiler: the part of the language that kernels use, on top of engine.h.
// Every kernel is compiled with this header in front of it, as NVRTC does with its own.
#pragma once
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "vector_types.h"

// ---------------------------------------------------------------- the language

#define __CUDACC__ 1
#define __CUDA_ARCH__ 900
#define __CUDACC_RTC__ 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ thread_local  // a block stays on one OS thread, so this is one copy per block
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (engine_lane()->thread_index)
#define blockIdx (engine_lane()->block_index)
#define blockDim (engine_lane()->block_size)
#define gridDim (engine_lane()->grid_size)
static constexpr int warpSize = 32;

// ---------------------------------------------------------------- barriers and fences

static inline void __syncthreads(ENGINE_HERE) { engine_barrier(engine::BarrierOp::none, 0, file, line); }
static inline int __syncthreads_count(int predicate, ENGINE_HERE) {
  return engine_barrier(engine::BarrierOp::count, predicate, file, line);
}
static inline int __syncthreads_and(int predicate, ENGINE_HERE) {
  return engine_barrier(engine::BarrierOp::all, predicate, file, line);
}
static inline int __syncthreads_or(int predicate, ENGINE_HERE) {
  return engine_barrier(engine::BarrierOp::any, predicate, file, line);
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---------------------------------------------------------------- warp-wide operations

namespace engine {

static inline unsigned lane_id() { return engine_lane()->linear % 32; }

// One lane's part in a collective that turns an In of every lane into an Out of every lane.
template <typename In, typename Out>
struct Exchange : Collective {
  In in;
  Out out;
  int source;  // of a shuffle: the lane to read from
};

template <typename In, typename Out>
static inline Out exchange(const char *name, void (*run)(Collective *const *, unsigned), unsigned mask, In in,
                           int source, const char *file, int line) {
  Exchange<In, Out> mine;
  mine.name = name;
  mine.run = run;
  mine.mask = mask;
  mine.file = file;
  mine.line = line;
  mine.in = in;
  mine.source = source;
  engine_collective(&mine);
  return mine.out;
}

template <typename F>
static inline void for_lanes(unsigned mask, F f) {
  for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

template <typename T>
void run_shuffle(Collective *const *lanes, unsigned mask) {
  for_lanes(mask, [&](int lane) {
    auto *mine = static_cast<Exchange<T, T> *>(lanes[lane]);
    auto *other = static_cast<Exchange<T, T> *>(lanes[mine->source]);
    // A lane that takes no part has no value to give: what comes is poison, as its value is undefined on a GPU.
    if (other) mine->out = other->in;
    else memset((void *)&mine->out, 0xFF, sizeof(T));
  });
}

template <typename T>
static inline T shuffle(const char *name, unsigned mask, T value, int source, const char *file, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves values of at most 8 bytes");
  return exchange<T, T>(name, run_shuffle<T>, mask, value, source, file, line);
}

// Every lane gets the same answer, computed once from all the values: f(accumulated, value).
template <typename T, typename F>
void run_fold(Collective *const *lanes, unsigned mask) {
  T total = static_cast<Exchange<T, T> *>(lanes[__builtin_ctz(mask)])->in;
  for_lanes(mask & (mask - 1), [&](int lane) { total = F()(total, static_cast<Exchange<T, T> *>(lanes[lane])->in); });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<T, T> *>(lanes[lane])->out = total; });
}

static inline void run_nothing(Collective *const *, unsigned) {}

static inline void run_ballot(Collective *const *lanes, unsigned mask) {
  unsigned votes = 0;
  for_lanes(mask, [&](int lane) { votes |= (unsigned)(static_cast<Exchange<int, unsigned> *>(lanes[lane])->in != 0) << lane; });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<int, unsigned> *>(lanes[lane])->out = votes; });
}

static inline void run_all(Collective *const *lanes, unsigned mask) {
  unsigned every = 1;
  for_lanes(mask, [&](int lane) { every &= static_cast<Exchange<int, unsigned> *>(lanes[lane])->in != 0; });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<int, unsigned> *>(lanes[lane])->out = every; });
}

static inline void run_uniform(Collective *const *lanes, unsigned mask) {
  bool first = static_cast<Exchange<int, unsigned> *>(lanes[__builtin_ctz(mask)])->in != 0;
  unsigned same = 1;
  for_lanes(mask, [&](int lane) { same &= (static_cast<Exchange<int, unsigned> *>(lanes[lane])->in != 0) == first; });
  for_lanes(mask, [&](int lane) { static_cast<Exchange<int, unsigned> *>(lanes[lane])->out = same; });
}

template <typename T>
void run_match(Collective *const *lanes, unsigned mask) {
  for_lanes(mask, [&](int lane) {
    auto *mine = static_cast<Exchange<T, unsigned> *>(lanes[lane]);
    mine->out = 0;
    for_lanes(mask, [&](int other) {
      if (memcmp(&mine->in, &static_cast<Exchange<T, unsigned> *>(lanes[other])->in, sizeof(T)) == 0)
        mine->out |= 1u << other;
    });
  });
}

struct Add { template <typename T> T operator()(T a, T b) const { return a + b; } };
struct Min { template <typename T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <typename T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <typename T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <typename T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <typename T> T operator()(T a, T b) const { return a ^ b; } };

}  // namespace engine

static inline void __syncwarp(unsigned mask = 0xffffffffu, ENGINE_HERE) {
  engine::exchange<int, int>("__syncwarp", engine::run_nothing, mask, 0, 0, file, line);
}

template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, ENGINE_HERE) {
  unsigned lane = engine::lane_id(), segment = lane & ~(unsigned)(width - 1);
  return engine::shuffle("__shfl_sync", mask, value, (int)(segment | ((unsigned)source & (unsigned)(width - 1))), file, line);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, ENGINE_HERE) {
  int lane = (int)engine::lane_id(), source = lane - (int)delta;
  return engine::shuffle("__shfl_up_sync", mask, value, source < (lane & ~(width - 1)) ? lane : source, file, line);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, ENGINE_HERE) {
  int lane = (int)engine::lane_id();
  return engine::shuffle("__shfl_down_sync", mask, value,
                         (lane & (width - 1)) + (int)delta >= width ? lane : lane + (int)delta, file, line);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, ENGINE_HERE) {
  int lane = (int)engine::lane_id(), source = lane ^ lane_mask;
  return engine::shuffle("__shfl_xor_sync", mask, value, source >= (lane & ~(width - 1)) + width ? lane : source, file, line);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return engine::exchange<int, unsigned>("__ballot_sync", engine::run_ballot, mask, predicate, 0, file, line);
}
static inline int __any_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return (int)engine::exchange<int, unsigned>("__all_sync", engine::run_all, mask, predicate, 0, file, line);
}
static inline int __uni_sync(unsigned mask, int predicate, ENGINE_HERE) {
  return (int)engine::exchange<int, unsigned>("__uni_sync", engine::run_uniform, mask, predicate, 0, file, line);
}
template <typename T>
static inline unsigned __match_any_sync(unsigned mask, T value, ENGINE_HERE) {
  return engine::exchange<T, unsigned>("__match_any_sync", engine::run_match<T>, mask, value, 0, file, line);
}
template <typename T>
static inline unsigned __match_all_sync(unsigned mask, T value, int *predicate, ENGINE_HERE) {
  unsigned same = engine::exchange<T, unsigned>("__match_all_sync", engine::run_match<T>, mask, value, 0, file, line);
  *predicate = same == mask;
  return *predicate ? mask : 0;
}
static inline unsigned __activemask(ENGINE_HERE) { return engine_activemask(file, line); }

#define ENGINE_REDUCE(NAME, OP, T)                                                                         \
  static inline T NAME(unsigned mask, T value, ENGINE_HERE) {                                              \
    return engine::exchange<T, T>(#NAME, engine::run_fold<T, engine::OP>, mask, value, 0, file, line);     \
  }
ENGINE_REDUCE(__reduce_add_sync, Add, unsigned)
ENGINE_REDUCE(__reduce_add_sync, Add, int)
ENGINE_REDUCE(__reduce_min_sync, Min, unsigned)
ENGINE_REDUCE(__reduce_min_sync, Min, int)
ENGINE_REDUCE(__reduce_max_sync, Max, unsigned)
ENGINE_REDUCE(__reduce_max_sync, Max, int)
ENGINE_REDUCE(__reduce_and_sync, And, unsigned)
ENGINE_REDUCE(__reduce_or_sync, Or, unsigned)
ENGINE_REDUCE(__reduce_xor_sync, Xor, unsigned)
#undef ENGINE_REDUCE

// ---------------------------------------------------------------- atomics: blocks do run at the same time

namespace engine {
template <typename T>
struct Same { typedef T type; };
template <typename T>
using Plain = typename Same<T>::type;  // no deduction: atomicAdd(&an_unsigned, 1) takes the 1 as unsigned

template <typename T, typename F>
static inline T atomic_update(T *address, F next) {
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do after = next(before);
  while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
}  // namespace engine

#define ENGINE_ATOMIC(NAME, EXPRESSION)                                                                \
  template <typename T>                                                                                \
  static inline T NAME(T *address, engine::Plain<T> value) {                                           \
    return engine::atomic_update(address, [=](T old) -> T { return EXPRESSION; });                     \
  }                                                                                                    \
  template <typename T>                                                                                \
  static inline T NAME##_block(T *address, engine::Plain<T> value) { return NAME(address, value); }    \
  template <typename T>                                                                                \
  static inline T NAME##_system(T *address, engine::Plain<T> value) { return NAME(address, value); }
ENGINE_ATOMIC(atomicAdd, old + value)
ENGINE_ATOMIC(atomicSub, old - value)
ENGINE_ATOMIC(atomicExch, ((void)old, value))
ENGINE_ATOMIC(atomicMin, value < old ? value : old)
ENGINE_ATOMIC(atomicMax, old < value ? value : old)
ENGINE_ATOMIC(atomicAnd, old &value)
ENGINE_ATOMIC(atomicOr, old | value)
ENGINE_ATOMIC(atomicXor, old ^ value)
ENGINE_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
ENGINE_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef ENGINE_ATOMIC

template <typename T>
static inline T atomicCAS(T *address, engine::Plain<T> compare, engine::Plain<T> value) {
  __atomic_compare_exchange(address, &compare, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return compare;
}

// ---------------------------------------------------------------- loads, bits, conversions

template <typename T>
static inline T __ldg(const T *p) { return *p; }
template <typename T>
static inline T __ldcg(const T *p) { return *p; }
template <typename T>
static inline T __ldca(const T *p) { return *p; }
template <typename T>
static inline T __ldcs(const T *p) { return *p; }
template <typename T>
static inline void __stcg(T *p, T v) { *p = v; }
template <typename T>
static inline void __stcs(T *p, T v) { *p = v; }
template <typename T>
static inline void __stwt(T *p, T v) { *p = v; }

namespace engine {
template <typename To, typename From>
static inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
// Out of range saturates and NaN gives 0, as on a GPU; in C++ it would be undefined.
template <typename To, typename From>
static inline To saturating(From v, From low, From high, To lowest, To highest) {
  return v != v ? To(0) : v <= low ? lowest : v >= high ? highest : To(v);
}
static inline int to_int(double v) { return saturating<int>(v, -2147483648.0, 2147483647.0, INT_MIN, INT_MAX); }
static inline unsigned to_uint(double v) { return saturating<unsigned>(v, 0.0, 4294967295.0, 0u, UINT_MAX); }
}  // namespace engine

static inline int __float_as_int(float v) { return engine::bits<int>(v); }
static inline unsigned __float_as_uint(float v) { return engine::bits<unsigned>(v); }
static inline float __int_as_float(int v) { return engine::bits<float>(v); }
static inline float __uint_as_float(unsigned v) { return engine::bits<float>(v); }
static inline long long __double_as_longlong(double v) { return engine::bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return engine::bits<double>(v); }
static inline int __double2hiint(double v) { return (int)(engine::bits<unsigned long long>(v) >> 32); }
static inline int __double2loint(double v) { return (int)engine::bits<unsigned long long>(v); }

#define ENGINE_CONVERT(SUFFIX, ROUND)                                                            \
  static inline int __float2int_##SUFFIX(float v) { return engine::to_int(ROUND((double)v)); }   \
  static inline unsigned __float2uint_##SUFFIX(float v) { return engine::to_uint(ROUND((double)v)); } \
  static inline int __double2int_##SUFFIX(double v) { return engine::to_int(ROUND(v)); }
ENGINE_CONVERT(rn, nearbyint)
ENGINE_CONVERT(rz, trunc)
ENGINE_CONVERT(ru, ceil)
ENGINE_CONVERT(rd, floor)
#undef ENGINE_CONVERT
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __uint2float_rn(unsigned v) { return (float)v; }
static inline float __double2float_rn(double v) { return (float)v; }
static inline double __int2double_rn(int v) { return v; }
static inline float __ll2float_rn(long long v) { return (float)v; }

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
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned s = selector >> (4 * i) & 0xF, byte = (unsigned)(both >> (8 * (s & 7)) & 0xFF);
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;  // replicate the sign
    r |= byte << (8 * i);
  }
  return r;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
static inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline int __mul24(int a, int b) { return (int)((unsigned)(a << 8 >> 8) * (unsigned)(b << 8 >> 8)); }
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
  return c;
}
static inline unsigned __sad(int a, int b, unsigned c) { return (unsigned)(a > b ? a - b : b - a) + c; }

// ---------------------------------------------------------------- arithmetic

#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif

// Inlined, unlike libm's, with its rule that a NaN loses against a number.
#define fmaxf(a, b) engine::max_of<float>(a, b)
#define fminf(a, b) engine::min_of<float>(a, b)
#define fmax(a, b) engine::max_of<double>(a, b)
#define fmin(a, b) engine::min_of<double>(a, b)
namespace engine {
template <typename T>
static inline T max_of(T a, T b) { return a > b || b != b ? a : b; }
template <typename T>
static inline T min_of(T a, T b) { return a < b || b != b ? a : b; }
template <typename T>
struct IsFloating { static constexpr bool value = T(0.5) != T(0); };
}  // namespace engine

template <typename A, typename B>
static inline auto max(A a, B b) -> decltype(true ? A() : B()) {
  typedef decltype(true ? A() : B()) T;
  if constexpr (engine::IsFloating<T>::value) return engine::max_of<T>(a, b);
  else return (T)a > (T)b ? (T)a : (T)b;
}
template <typename A, typename B>
static inline auto min(A a, B b) -> decltype(true ? A() : B()) {
  typedef decltype(true ? A() : B()) T;
  if constexpr (engine::IsFloating<T>::value) return engine::min_of<T>(a, b);
  else return (T)a < (T)b ? (T)a : (T)b;
}

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float fdividef(float a, float b) { return a / b; }
static inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
static inline float rhypotf(float x, float y) { return 1.0f / hypotf(x, y); }
static inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
static inline float erfcxf(float x) { return (float)(exp((double)x * x) * erfc((double)x)); }
static inline float sinpif(float x) { return (float)sin(x * 3.14159265358979323846); }
static inline float cospif(float x) { return (float)cos(x * 3.14159265358979323846); }
static inline void sincospif(float x, float *s, float *c) { *s = sinpif(x), *c = cospif(x); }
static inline float norm3df(float a, float b, float c) { return (float)sqrt((double)a * a + (double)b * b + (double)c * c); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// The fast intrinsics trade accuracy for speed on a GPU. Here they are the accurate functions: a kernel's error
// on the CPU is no larger than on a GPU, and may be smaller.
// (Macros, because glibc has names of its own such as __expf.)
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, x)
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

// Only round-to-nearest is offered: a host has no per-operation rounding mode.
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// ---------------------------------------------------------------- time, output, stopping

static inline long long clock64() { return engine_clock(); }
#define clock() ((long)engine_clock())
static inline unsigned long long __globaltimer() { return (unsigned long long)engine_clock(); }
static inline void __nanosleep(unsigned) {}
static inline void __brkpt() {}
static inline void __trap(ENGINE_HERE) { engine_fail("the kernel called __trap()", file, line); }
static inline unsigned __dynamic_smem_size() { return engine_dynamic_shared_size(); }

#define printf(...) engine_printf(__VA_ARGS__)
#include "assert.h"

// ---------------------------------------------------------------- describing kernels to the engine

namespace engine {

template <typename T>
struct Name {  // any other type: only its size is known
  static constexpr char kind = 'S';
  static constexpr const char *text = "struct";
};
#define ENGINE_NAME(T, TEXT)                       \
  template <>                                      \
  struct Name<T> {                                 \
    static constexpr char kind = 's';              \
    static constexpr const char *text = TEXT;      \
  };
ENGINE_NAME(float, "float32")
ENGINE_NAME(double, "float64")
ENGINE_NAME(bool, "bool")
ENGINE_NAME(char, "int8")
ENGINE_NAME(signed char, "int8")
ENGINE_NAME(unsigned char, "uint8")
ENGINE_NAME(short, "int16")
ENGINE_NAME(unsigned short, "uint16")
ENGINE_NAME(int, "int32")
ENGINE_NAME(unsigned int, "uint32")
ENGINE_NAME(long, "int64")
ENGINE_NAME(unsigned long, "uint64")
ENGINE_NAME(long long, "int64")
ENGINE_NAME(unsigned long long, "uint64")
ENGINE_NAME(float2, "float32")
ENGINE_NAME(float4, "float32")
ENGINE_NAME(int2, "int32")
ENGINE_NAME(int4, "int32")
ENGINE_NAME(uint2, "uint32")
ENGINE_NAME(uint4, "uint32")
ENGINE_NAME(double2, "float64")

template <typename T>
struct Unqualified { typedef T type; static constexpr bool is_const = false; };
template <typename T>
struct Unqualified<const T> { typedef T type; static constexpr bool is_const = true; };
template <typename T>
struct Unqualified<volatile T> { typedef T type; static constexpr bool is_const = false; };

// kind: 'p' pointer, 's' scalar, 'S' struct by value
struct Parameter { char kind; const char *text; bool is_const; unsigned size; };

template <typename T>
struct Describe {
  static constexpr Parameter value = {Name<T>::kind, Name<T>::text, false, (unsigned)sizeof(T)};
};
template <typename T>
struct Describe<T *> {
  typedef typename Unqualified<T>::type E;
  static constexpr Parameter value = {'p', Name<E>::text, Unqualified<T>::is_const, (unsigned)sizeof(E)};
};
template <>
struct Describe<void *> { static constexpr Parameter value = {'p', "void", false, 1}; };
template <>
struct Describe<const void *> { static constexpr Parameter value = {'p', "void", true, 1}; };

template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I>
struct MakeIndices<0, I...> { typedef Indices<I...> type; };

template <auto Function, typename Type = decltype(Function)>
struct Kernel;
template <auto Function, typename... A>
struct Kernel<Function, void (*)(A...)> {
  template <size_t... I>
  static void call(void **args, Indices<I...>) {
    (void)args;
    Function(*static_cast<typename Unqualified<A>::type *>(args[I])...);
  }
  static void run(void **args) { call(args, typename MakeIndices<sizeof...(A)>::type()); }
  static constexpr int count = sizeof...(A);
  static constexpr Parameter parameters[sizeof...(A) + 1] = {Describe<typename Unqualified<A>::type>::value..., {0, "", false, 0}};
};

struct Entry {
  const char *name;
  void *function;
  void (*run)(void **);
  int count;
  const Parameter *parameters;
};

template <auto Function>
static inline Entry entry(const char *name) {
  typedef Kernel<Function> K;
  return Entry{name, (void *)Function, K::run, K::count, K::parameters};
}

}  // namespace engine
