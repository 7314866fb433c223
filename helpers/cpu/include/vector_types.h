// CUDA's vector types, with CUDA's sizes and alignments, and their make_ functions.
#pragma once
#include "../engine.h"

#define ENGINE_VECTOR(NAME, T, ALIGN1, ALIGN2, ALIGN3, ALIGN4)                                   \
  struct alignas(ALIGN1) NAME##1 { T x; };                                                       \
  struct alignas(ALIGN2) NAME##2 { T x, y; };                                                    \
  struct alignas(ALIGN3) NAME##3 { T x, y, z; };                                                 \
  struct alignas(ALIGN4) NAME##4 { T x, y, z, w; };                                              \
  static inline NAME##1 make_##NAME##1(T x) { return NAME##1{x}; }                               \
  static inline NAME##2 make_##NAME##2(T x, T y) { return NAME##2{x, y}; }                       \
  static inline NAME##3 make_##NAME##3(T x, T y, T z) { return NAME##3{x, y, z}; }               \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return NAME##4{x, y, z, w}; }

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
struct alignas(4) uint1 { unsigned int x; };
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
static inline uint1 make_uint1(unsigned int x) { return uint1{x}; }
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return uint2{x, y}; }
static inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) { return uint3{x, y, z}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return uint4{x, y, z, w};
}
