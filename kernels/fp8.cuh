// FP8 on Hopper (sm_90a): e4m3 elements, products of a warpgroup whose operands have 8 bits, and the
// order of keys in which P stays in registers. For 16_fp8.cu; 16's notebook explains it.
//
// An e4m3 has a sign, 4 bits of exponent and 3 of significand: 448 is the largest, 2^-9 the smallest
// above 0; there is a NaN and no infinity. One wgmma takes 32 of them along the contraction, and both
// operands must be K-major: neighbours along the contraction lie side by side, so B of P V is V^T.
//
// Thread 4 g + t of a warp holds, of S in the accumulators, keys 8 n + 2 t and 8 n + 2 t + 1 of rows g
// and g + 8, but of A it has to give four neighbours, 4 t .. 4 t + 3 of each 16. The product adds over
// keys and does not ask in which order, so the four that the thread has take these places: place p of
// each 16 is that of key KEY_AT(p), and V^T's columns are permuted alike.

#pragma once
#include "hopper.cuh"

struct e4m3 {};  // selects the type of a product's elements

// The key of each 16 that takes place p: 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
__host__ __device__ constexpr int KEY_AT(int p) { return p / 4 * 2 + p % 2 + p / 2 % 2 * 8; }

// Four floats as e4m3, the first in the lowest byte, each rounded to nearest; beyond 448 they become 448.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
  unsigned r;
  asm("{\n.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// The descriptor of an operand in rows of ROW_BYTES (128, 64 or 32) with the swizzle of as many bytes:
// the next eight rows follow at once.
template <int ROW_BYTES>
__device__ __forceinline__ unsigned long long wgmma_descriptor_of_rows(unsigned address) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 64 || ROW_BYTES == 32, "a swizzle");
  constexpr unsigned long long SWIZZLE = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
  return SWIZZLE << 62 | 8ull * ROW_BYTES / 16 << 32 | (address & 0x3ffff) / 16;
}

// That swizzle: chunk c of 16 bytes of a row lies at c ^ chunk_xor(row).
template <int ROW_BYTES>
__device__ __forceinline__ constexpr int chunk_xor(int row) {
  return ROW_BYTES == 128 ? row % 8 : ROW_BYTES == 64 ? row / 2 % 4 : row / 4 % 2;
}

// i times 32 bytes further along rows of ROW_BYTES; behind a row's end is the next panel, of `rows`.
template <int ROW_BYTES>
__device__ __forceinline__ unsigned long long advance_bytes(
    unsigned long long descriptor, int i, int rows) {
  return descriptor + (i * 32 / ROW_BYTES * rows * ROW_BYTES + i * 32 % ROW_BYTES) / 16;
}

#define WGMMA_OUT_FROM(i)                                                          \
  "=&f"(d[i]), "=&f"(d[i + 1]), "=&f"(d[i + 2]), "=&f"(d[i + 3]), "=&f"(d[i + 4]), \
      "=&f"(d[i + 5]), "=&f"(d[i + 6]), "=&f"(d[i + 7])
#define WGMMA_OUT_16 WGMMA_OUT_FROM(0)
#define WGMMA_OUT_32 WGMMA_OUT_16, WGMMA_OUT_FROM(8)
#define WGMMA_OUT_48 WGMMA_OUT_32, WGMMA_OUT_FROM(16)
#define WGMMA_OUT_64 WGMMA_OUT_48, WGMMA_OUT_FROM(24)
#define WGMMA_OUT_80 WGMMA_OUT_64, WGMMA_OUT_FROM(32)
#define WGMMA_OUT_96 WGMMA_OUT_80, WGMMA_OUT_FROM(40)
#define WGMMA_OUT_112 WGMMA_OUT_96, WGMMA_OUT_FROM(48)
#define WGMMA_OUT_128 WGMMA_OUT_112, WGMMA_OUT_FROM(56)
#define WGMMA_OUT_144 WGMMA_OUT_128, WGMMA_OUT_FROM(64)
#define WGMMA_OUT_160 WGMMA_OUT_144, WGMMA_OUT_FROM(72)
#define WGMMA_OUT_176 WGMMA_OUT_160, WGMMA_OUT_FROM(80)
#define WGMMA_OUT_192 WGMMA_OUT_176, WGMMA_OUT_FROM(88)
#define WGMMA_OUT_208 WGMMA_OUT_192, WGMMA_OUT_FROM(96)
#define WGMMA_OUT_224 WGMMA_OUT_208, WGMMA_OUT_FROM(104)
#define WGMMA_OUT_240 WGMMA_OUT_224, WGMMA_OUT_FROM(112)
#define WGMMA_OUT_256 WGMMA_OUT_240, WGMMA_OUT_FROM(120)

// As in hopper.cuh, for 32 elements of the contraction. wgmma_ss: A (64 x 32) and B^T (N x 32) in shared
// memory. wgmma_rs: A in registers. wgmma_rs_new: D = A B, so that D's registers are free before.
// clang-format off
#define WGMMA_E4M3(N, A0, A1, A2, A3, A4, A5)                                                        \
  __device__ __forceinline__ void wgmma_ss(                                                          \
      e4m3, float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_D_##N            \
                 "}, %" #A0 ", %" #A1 ", p, 1, 1;\n}"                                                \
                 : WGMMA_ACC_##N                                                                     \
                 : "l"(a), "l"(b), "r"((int)accumulate));                                            \
  }                                                                                                  \
  __device__ __forceinline__ void wgmma_ss_new(                                                      \
      e4m3, float (&d)[N / 2], unsigned long long a, unsigned long long b) {                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_D_##N            \
                 "}, %" #A0 ", %" #A1 ", p, 1, 1;\n}"                                                \
                 : WGMMA_OUT_##N                                                                     \
                 : "l"(a), "l"(b));                                                                  \
  }                                                                                                  \
  __device__ __forceinline__ void wgmma_rs(                                                          \
      e4m3, float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A5 ", 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_D_##N            \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1;\n}"                \
                 : WGMMA_ACC_##N                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));        \
  }                                                                                                  \
  __device__ __forceinline__ void wgmma_rs_new(                                                      \
      e4m3, float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_D_##N            \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1;\n}"                \
                 : WGMMA_OUT_##N                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
  }
// The same with A in registers and eight columns more.
#define WGMMA_E4M3_AND_8(COLUMNS, N, D0, D1, D2, D3, A0, A1, A2, A3, A4)                             \
  __device__ __forceinline__ void wgmma_rs(                                                          \
      e4m3, float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, bool) {                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_D_##COLUMNS      \
                 ", %" #D0 ", %" #D1 ", %" #D2 ", %" #D3                                             \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1;\n}"                \
                 : WGMMA_ACC_##COLUMNS, "+f"(d[D0]), "+f"(d[D1]), "+f"(d[D2]), "+f"(d[D3])           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
  }                                                                                                  \
  __device__ __forceinline__ void wgmma_rs_new(                                                      \
      e4m3, float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_D_##COLUMNS      \
                 ", %" #D0 ", %" #D1 ", %" #D2 ", %" #D3                                             \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1;\n}"                \
                 : WGMMA_OUT_##COLUMNS, "=&f"(d[D0]), "=&f"(d[D1]), "=&f"(d[D2]), "=&f"(d[D3])       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                              \
  }
// clang-format on
WGMMA_E4M3(16, 8, 9, 10, 11, 12, 13)
WGMMA_E4M3(32, 16, 17, 18, 19, 20, 21)
WGMMA_E4M3(48, 24, 25, 26, 27, 28, 29)
WGMMA_E4M3(64, 32, 33, 34, 35, 36, 37)
WGMMA_E4M3(80, 40, 41, 42, 43, 44, 45)
WGMMA_E4M3(96, 48, 49, 50, 51, 52, 53)
WGMMA_E4M3(112, 56, 57, 58, 59, 60, 61)
WGMMA_E4M3(128, 64, 65, 66, 67, 68, 69)
WGMMA_E4M3(144, 72, 73, 74, 75, 76, 77)
WGMMA_E4M3(160, 80, 81, 82, 83, 84, 85)
WGMMA_E4M3(176, 88, 89, 90, 91, 92, 93)
WGMMA_E4M3(192, 96, 97, 98, 99, 100, 101)
WGMMA_E4M3(208, 104, 105, 106, 107, 108, 109)
WGMMA_E4M3(224, 112, 113, 114, 115, 116, 117)
WGMMA_E4M3(240, 120, 121, 122, 123, 124, 125)
WGMMA_E4M3(256, 128, 129, 130, 131, 132, 133)
WGMMA_E4M3_AND_8(16, 24, 8, 9, 10, 11, 12, 13, 14, 15, 16)
WGMMA_E4M3_AND_8(32, 40, 16, 17, 18, 19, 20, 21, 22, 23, 24)
WGMMA_E4M3_AND_8(48, 56, 24, 25, 26, 27, 28, 29, 30, 31, 32)
WGMMA_E4M3_AND_8(64, 72, 32, 33, 34, 35, 36, 37, 38, 39, 40)
WGMMA_E4M3_AND_8(80, 88, 40, 41, 42, 43, 44, 45, 46, 47, 48)
WGMMA_E4M3_AND_8(96, 104, 48, 49, 50, 51, 52, 53, 54, 55, 56)
WGMMA_E4M3_AND_8(112, 120, 56, 57, 58, 59, 60, 61, 62, 63, 64)
WGMMA_E4M3_AND_8(128, 136, 64, 65, 66, 67, 68, 69, 70, 71, 72)
