// The instructions that asm statements may hold. ptx.py rewrites a statement into calls of what stands here.
#pragma once
#include "cuda_bf16.h"

namespace engine {
namespace ptx {

// ---------------------------------------------------------------- operands, as their constraints say

template <typename T>
struct IsFloat {
  static constexpr bool value = false;
};
template <>
struct IsFloat<float> {
  static constexpr bool value = true;
};
template <>
struct IsFloat<double> {
  static constexpr bool value = true;
};

template <char Constraint, typename T>
constexpr bool fits() {
  return Constraint == 'f'   ? IsFloat<T>::value && sizeof(T) == 4
         : Constraint == 'd' ? IsFloat<T>::value && sizeof(T) == 8
         : Constraint == 'h' ? !IsFloat<T>::value && sizeof(T) == 2
         : Constraint == 'l' ? !IsFloat<T>::value && sizeof(T) == 8
                             : !IsFloat<T>::value && sizeof(T) == 4;
}

template <char Constraint, typename T>
ENGINE_INLINE T in(T value) {
  static_assert(fits<Constraint, T>(), "an asm operand has another size or type than its constraint says");
  return value;
}
template <char Constraint, typename T>
ENGINE_INLINE T& out(T& value) {
  static_assert(fits<Constraint, T>(), "an asm operand has another size or type than its constraint says");
  return value;
}

// The same bits as another type.
template <typename To, typename From>
ENGINE_INLINE To as(From value) {
  static_assert(sizeof(To) == sizeof(From), "an operand of this instruction has another size");
  To to;
  __builtin_memcpy(&to, &value, sizeof to);
  return to;
}

template <typename T, typename V>
ENGINE_INLINE void set(T& target, V value) {
  target = as<T>(value);
}

// Up to four registers in, and out again.
template <typename... T>
ENGINE_INLINE Words words(T... values) {
  return Words{as<unsigned>(values)...};
}
template <typename... T>
ENGINE_INLINE void take(Words found, T&... targets) {
  int i = 0;
  ((targets = as<T>((unsigned)found[i++])), ...);
}

// ---------------------------------------------------------------- matrices between shared memory and registers

template <int N, bool Transposed>
ENGINE_INLINE Words ldmatrix(unsigned address, ENGINE_HERE) {
  Words row = {};
  if (lane_id() < 8 * N) row = *(const Words*)engine_shared_pointer(address, 16, "ldmatrix", file, line);
  return engine_ldmatrix("ldmatrix", N + 8 * Transposed, row, file, line);
}

template <int N, bool Transposed>
ENGINE_INLINE void stmatrix(unsigned address, Words words, ENGINE_HERE) {
  const Words row = engine_stmatrix("stmatrix", N + 8 * Transposed, words, file, line);
  if (lane_id() < 8 * N) *(Words*)engine_shared_pointer(address, 16, "stmatrix", file, line) = row;
}

// ---------------------------------------------------------------- asynchronous copies

// The first `given` bytes come from memory, the others are zeros.
template <int Bytes>
ENGINE_INLINE void async_copy(void* target, const void* source, unsigned given, ENGINE_HERE) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if ((uintptr_t)source % Bytes != 0)
    engine_misaligned("cp.async reads from an address that is a multiple of its size", file, line);
  if (given > Bytes) engine_fail("cp.async: src-size is more than cp-size", file, line);
  Words data = {};
  if (given == Bytes) {
    // In one read: a checked run counts it.
    const unsigned long long low = Bytes == 8   ? *(const unsigned long long*)source
                                   : Bytes == 4 ? *(const unsigned*)source
                                                : 0;
    data = Bytes == 16 ? *(const Words*)source : Words{(unsigned)low, (unsigned)(low >> 32)};
  } else {
    for (unsigned i = 0; i < given; ++i) data[i / 4] |= (unsigned)((const unsigned char*)source)[i] << i % 4 * 8;
  }
  engine_async_copy(target, data, Bytes);
}

template <int Bytes, int Least, typename Source>
ENGINE_INLINE void cp_async(unsigned target, Source source, unsigned given = Bytes, ENGINE_HERE) {
  static_assert(Bytes >= Least, "cp.async.cg copies 16 bytes");
  async_copy<Bytes>(
      engine_shared_pointer(target, Bytes, "cp.async", file, line), as<const void*>(source), given, file, line);
}

// ---------------------------------------------------------------- barriers with a number

ENGINE_INLINE unsigned block_threads() {
  const dim3& size = engine_lane()->block_size;
  return size.x * size.y * size.z;
}

// Of all threads, it is __syncthreads. wait: not for bar.arrive.
ENGINE_INLINE void bar_sync(unsigned number, unsigned threads, bool wait, ENGINE_HERE) {
  if (number == 0 && wait && threads == block_threads()) __syncthreads(file, line);
  else engine_named_barrier(number, threads, wait, file, line);
}

// ---------------------------------------------------------------- functions

// A GPU's own results differ from these in the last bits; .ftz: a subnormal argument or result is 0.
ENGINE_INLINE float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
#define ENGINE_APPROX(NAME, EXPRESSION)                                \
  template <bool Flush>                                                \
  ENGINE_INLINE float NAME(float value) {                              \
    const float x = Flush ? flush(value) : value, y = (EXPRESSION);    \
    return y != y ? __int_as_float(0x7fffffff) : Flush ? flush(y) : y; \
  }
ENGINE_APPROX(ex2, exp2f(x))
ENGINE_APPROX(lg2, log2f(x))
ENGINE_APPROX(rcp, 1.0f / x)
ENGINE_APPROX(rsqrt, (float)(1.0 / sqrt((double)x)))
ENGINE_APPROX(sqrt_, sqrtf(x))
ENGINE_APPROX(sin_, sinf(x))
ENGINE_APPROX(cos_, cosf(x))
ENGINE_APPROX(tanh_, tanhf(x))
#undef ENGINE_APPROX

// Pairs of 16-bit floats.
template <typename Format, Round Mode, bool Relu>
ENGINE_INLINE unsigned cvt_pair(float high, float low) {
  auto one = [](float x) { return (unsigned)Format::from_float(Relu && x <= 0 ? 0.0f : x, Mode); };
  return one(high) << 16 | one(low);
}
template <typename Format, Round Mode, bool Relu>
ENGINE_INLINE unsigned short cvt_one(float x) {
  return Format::from_float(Relu && x <= 0 ? 0.0f : x, Mode);
}
template <typename Format, typename F>
ENGINE_INLINE unsigned each(unsigned pair, F f) {
  return (unsigned)Format::from_float(f(Format::to_float((unsigned short)(pair >> 16)))) << 16 |
         Format::from_float(f(Format::to_float((unsigned short)pair)));
}
template <typename Format, bool Flush>
ENGINE_INLINE unsigned ex2_pair(unsigned pair) {
  return each<Format>(pair, [](float x) { return ex2<Flush>(x); });
}
template <typename Format>
ENGINE_INLINE unsigned tanh_pair(unsigned pair) {
  return each<Format>(pair, [](float x) { return tanh_<false>(x); });
}

// ---------------------------------------------------------------- integers, special registers

ENGINE_INLINE unsigned prmt(unsigned a, unsigned b, unsigned selector) {
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = __byte_perm(a, b, selector >> (4 * i)) & 0xFF;
    if (selector >> (4 * i) & 8) byte = byte & 0x80 ? 0xFF : 0;  // the sign, repeated
    r |= byte << (8 * i);
  }
  return r;
}

template <unsigned Table>
ENGINE_INLINE unsigned lop3(unsigned a, unsigned b, unsigned c) {
  unsigned found = 0;
  for (int i = 0; i < 8; ++i)
    if (Table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return found;
}

ENGINE_INLINE unsigned warp_id() {  // a GPU promises only that it differs between the warps of an SM
  return engine_lane()->linear / 32;
}
ENGINE_INLINE unsigned sm_id() {  // a block is an SM of its own here
  const Lane& l = *engine_lane();
  return (l.block_index.z * l.grid_size.y + l.block_index.y) * l.grid_size.x + l.block_index.x;
}

}  // namespace ptx
}  // namespace engine
