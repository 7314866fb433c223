// Atomics. Blocks do run at the same time, so these are the host's own.
#pragma once
#include "../cpp/engine.h"

namespace engine {
template <typename T, typename F>
ENGINE_INLINE auto atomic_update(T* address, F next) {
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do after = next(before);
  while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return before;
}
// One instruction, where there is one; a checked build has the read and the write. In the block's own shared memory it
// needs no lock of the bus: the block's threads are on one OS thread, and an interrupt comes between two instructions.
template <typename T>
ENGINE_INLINE auto atomic_add(T* address, T value) {
#ifndef ENGINE_CHECKED
  if constexpr (T(0.5) == T(0)) {
#if defined(__x86_64__) && defined(ENGINE_HAS_TLS_ROOM) && !defined(ENGINE_LIBRARIES)  // there asm is PTX
    if ((uintptr_t)address - (uintptr_t)engine_own_shared < engine::SHARED_BYTES) {
      asm volatile("xadd %0, %1" : "+r"(value), "+m"(*address) : : "memory", "cc");
      return value;
    }
#endif
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
  }
#endif
  return engine::atomic_update(address, [=](T old) -> T { return old + value; });
}
// An exchange may be the first write of a word, so it differs from an update, which reads the word.
template <typename T>
ENGINE_INLINE T atomic_exchange(T* address, T value) {
  T before;
  __atomic_exchange(address, &value, &before, __ATOMIC_ACQ_REL);
  return before;
}
}  // namespace engine

namespace engine {
// The types that CUDA has each of them for. Others have no such function, and the error names the line that calls it.
template <typename T, typename U>
struct SameType {
  static constexpr bool value = false;
};
template <typename T>
struct SameType<T, T> {
  static constexpr bool value = true;
};
template <typename T, typename... Types>
constexpr bool is_one_of = (engine::SameType<T, Types>::value || ...);
template <bool>
struct Exists {};
template <>
struct Exists<true> {
  typedef int type;
};
typedef unsigned long long ull;
}  // namespace engine

#define ENGINE_UPDATE(EXPRESSION) engine::atomic_update(address, [=](T old) -> T { return EXPRESSION; })
// IS_LOOK: whether it only read what others write, or did not get what others hold.
#define ENGINE_ATOMIC(NAME, RESULT, IS_LOOK, ...)                                             \
  template <typename T, typename engine::Exists<engine::is_one_of<T, __VA_ARGS__>>::type = 0> \
  ENGINE_INLINE T NAME(T* address, engine::Plain<T> value) {                                  \
    T old = RESULT;                                                                           \
    if (IS_LOOK) engine_look(address);                                                        \
    return old;                                                                               \
  }                                                                                           \
  template <typename T, typename engine::Exists<engine::is_one_of<T, __VA_ARGS__>>::type = 0> \
  ENGINE_INLINE T NAME##_block(T* address, engine::Plain<T> value) {                          \
    return NAME(address, value);                                                              \
  }                                                                                           \
  template <typename T, typename engine::Exists<engine::is_one_of<T, __VA_ARGS__>>::type = 0> \
  ENGINE_INLINE T NAME##_system(T* address, engine::Plain<T> value) {                         \
    return NAME(address, value);                                                              \
  }
// clang-format off
ENGINE_ATOMIC(atomicAdd, engine::atomic_add(address, value), value == T(0), int, unsigned, engine::ull, float, double)
ENGINE_ATOMIC(atomicSub, engine::atomic_add(address, T(0) - value), value == T(0), int, unsigned)
ENGINE_ATOMIC(atomicExch, engine::atomic_exchange(address, value), old == value, int, unsigned, engine::ull, float)
ENGINE_ATOMIC(atomicMin, ENGINE_UPDATE(value < old ? value : old), false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicMax, ENGINE_UPDATE(old < value ? value : old), false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicAnd, ENGINE_UPDATE(old & value), false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicOr, ENGINE_UPDATE(old | value), value == T(0), int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicXor, ENGINE_UPDATE(old ^ value), false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicInc, ENGINE_UPDATE(old >= value ? 0 : old + 1), false, unsigned)
ENGINE_ATOMIC(atomicDec, ENGINE_UPDATE(old == 0 || old > value ? value : old - 1), false, unsigned)
// clang-format on
#undef ENGINE_ATOMIC
#undef ENGINE_UPDATE

// From compute capability 9.0 on. Each float is added atomically, the vector as a whole is not.
#define ENGINE_ADD_FLOATS(NAME)                                                                  \
  ENGINE_INLINE float2 NAME(float2* address, float2 value, ENGINE_HERE) {                        \
    const engine::Floats values = {value.x, value.y};                                            \
    const engine::Floats old = engine_add_floats((float*)address, values, 2, #NAME, file, line); \
    return float2{old[0], old[1]};                                                               \
  }                                                                                              \
  ENGINE_INLINE float4 NAME(float4* address, float4 value, ENGINE_HERE) {                        \
    const engine::Floats values = {value.x, value.y, value.z, value.w};                          \
    const engine::Floats old = engine_add_floats((float*)address, values, 4, #NAME, file, line); \
    return float4{old[0], old[1], old[2], old[3]};                                               \
  }
ENGINE_ADD_FLOATS(atomicAdd)
ENGINE_ADD_FLOATS(atomicAdd_block)
ENGINE_ADD_FLOATS(atomicAdd_system)
#undef ENGINE_ADD_FLOATS

#define ENGINE_CAS(NAME)                                                                                               \
  template <                                                                                                           \
      typename T, typename engine::Exists<engine::is_one_of<T, int, unsigned, engine::ull, unsigned short>>::type = 0> \
  ENGINE_INLINE T NAME(T* address, engine::Plain<T> compare, engine::Plain<T> value) {                                 \
    if (!__atomic_compare_exchange(address, &compare, &value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))              \
      engine_look(address);                                                                                            \
    return compare;                                                                                                    \
  }
ENGINE_CAS(atomicCAS)
ENGINE_CAS(atomicCAS_block)
ENGINE_CAS(atomicCAS_system)
#undef ENGINE_CAS
