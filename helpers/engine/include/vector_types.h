// CUDA's vector types, with CUDA's sizes and alignments, and their make_ functions.
#pragma once
#include "../cpp/engine.h"

#ifdef ENGINE_CHECKED
// A checked run counts accesses, so a vector must be copied as a GPU copies it: 2, 4, 8 or 16 bytes at once. Compilers
// copy a plain struct member by member. The price: these types are no aggregates, and not trivially copyable.
typedef unsigned short __attribute__((may_alias)) engine_2_bytes;
typedef unsigned int __attribute__((may_alias)) engine_4_bytes;
typedef unsigned long long __attribute__((may_alias)) engine_8_bytes;
typedef unsigned long long __attribute__((vector_size(16), may_alias)) engine_16_bytes;
template <class T>
static inline __attribute__((always_inline)) auto engine_copy(T* to, const T* from) {
  if constexpr (alignof(T) == 2) *(engine_2_bytes*)to = *(const engine_2_bytes*)from;
  else if constexpr (alignof(T) == 4) *(engine_4_bytes*)to = *(const engine_4_bytes*)from;
  else if constexpr (alignof(T) == 8) *(engine_8_bytes*)to = *(const engine_8_bytes*)from;
  else
    for (unsigned i = 0; i < sizeof(T) / 16; ++i) ((engine_16_bytes*)to)[i] = ((const engine_16_bytes*)from)[i];
}
// A trait that lets libraries copy them as bytes.
template <class T, class = void>
struct engine_is_bytes {
  static constexpr bool value = __is_trivially_copyable(T);
};
template <class T>
struct engine_is_bytes<T, typename T::engine_is_vector> {
  static constexpr bool value = true;
};
#define __is_trivially_copyable(...) engine_is_bytes<__VA_ARGS__>::value
#define ENGINE_COPIES(NAME)                                                             \
  typedef void engine_is_vector;                                                        \
  NAME() = default;                                                                     \
  __attribute__((always_inline)) NAME(const NAME& other) { engine_copy(this, &other); } \
  __attribute__((always_inline)) NAME& operator=(const NAME& other) { return engine_copy(this, &other), *this; }
#define ENGINE_COPIES_2(NAME, T) \
  ENGINE_COPIES(NAME) constexpr NAME(T a, T b = 0) : x(a), y(b) {}
#define ENGINE_COPIES_4(NAME, T) \
  ENGINE_COPIES(NAME) constexpr NAME(T a, T b = 0, T c = 0, T d = 0) : x(a), y(b), z(c), w(d) {}
#else
#define ENGINE_COPIES_2(NAME, T)
#define ENGINE_COPIES_4(NAME, T)
#endif

// clang-format off
#define ENGINE_VECTOR(NAME, T, ALIGN1, ALIGN2, ALIGN3, ALIGN4)                                   \
  struct alignas(ALIGN1) NAME##1 { T x; };                                                       \
  struct alignas(ALIGN2) NAME##2 { T x, y; ENGINE_COPIES_2(NAME##2, T) };                        \
  struct alignas(ALIGN3) NAME##3 { T x, y, z; };                                                 \
  struct alignas(ALIGN4) NAME##4 { T x, y, z, w; ENGINE_COPIES_4(NAME##4, T) };                  \
  static inline NAME##1 make_##NAME##1(T x) { return NAME##1{x}; }                               \
  static inline NAME##2 make_##NAME##2(T x, T y) { return NAME##2{x, y}; }                       \
  static inline NAME##3 make_##NAME##3(T x, T y, T z) { return NAME##3{x, y, z}; }               \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return NAME##4{x, y, z, w}; }
// clang-format on

typedef unsigned char engine_uchar;
typedef unsigned short engine_ushort;
typedef unsigned int engine_uint;
typedef unsigned long engine_ulong;
typedef long long engine_longlong;
typedef unsigned long long engine_ulonglong;

ENGINE_VECTOR(char, signed char, 1, 2, 1, 4)
ENGINE_VECTOR(uchar, engine_uchar, 1, 2, 1, 4)
ENGINE_VECTOR(short, short, 2, 4, 2, 8)
ENGINE_VECTOR(ushort, engine_ushort, 2, 4, 2, 8)
ENGINE_VECTOR(int, int, 4, 8, 4, 16)
ENGINE_VECTOR(long, long, 8, 16, 8, 16)
ENGINE_VECTOR(ulong, engine_ulong, 8, 16, 8, 16)
ENGINE_VECTOR(longlong, engine_longlong, 8, 16, 8, 16)
ENGINE_VECTOR(ulonglong, engine_ulonglong, 8, 16, 8, 16)
ENGINE_VECTOR(float, float, 4, 8, 4, 16)
ENGINE_VECTOR(double, double, 8, 16, 8, 16)
#undef ENGINE_VECTOR

// uint3 comes with engine.h: threadIdx is one.
struct alignas(4) uint1 {
  unsigned int x;
};
struct alignas(8) uint2 {
  unsigned int x, y;
  ENGINE_COPIES_2(uint2, unsigned int)
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
  ENGINE_COPIES_4(uint4, unsigned int)
};
static inline uint1 make_uint1(unsigned int x) { return uint1{x}; }
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return uint2{x, y}; }
static inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) { return uint3{x, y, z}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return uint4{x, y, z, w};
}
