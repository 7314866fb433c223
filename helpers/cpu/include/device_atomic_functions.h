// Atomics. Blocks do run at the same time, so these are the host's own.
#pragma once
#include "../engine/engine.h"

namespace engine {
template <typename T, typename F>
ENGINE_INLINE T atomic_update(T* address, F next) {
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do after = next(before);
  while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return before;
}
}  // namespace engine

namespace engine {
// The types that CUDA has each of them for. For others there is no such function, and the line that calls it is told.
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

// IS_LOOK: whether it only read what others write, or did not get what others hold.
#define ENGINE_ATOMIC(NAME, EXPRESSION, IS_LOOK, ...)                                         \
  template <typename T, typename engine::Exists<engine::is_one_of<T, __VA_ARGS__>>::type = 0> \
  ENGINE_INLINE T NAME(T* address, engine::Plain<T> value) {                                  \
    T old = engine::atomic_update(address, [=](T old) -> T { return EXPRESSION; });           \
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
ENGINE_ATOMIC(atomicAdd, old + value, value == T(0), int, unsigned, engine::ull, float, double)
ENGINE_ATOMIC(atomicSub, old - value, value == T(0), int, unsigned)
ENGINE_ATOMIC(atomicExch, ((void)old, value), old == value, int, unsigned, engine::ull, float)
ENGINE_ATOMIC(atomicMin, value < old ? value : old, false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicMax, old < value ? value : old, false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicAnd, old & value, false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicOr, old | value, value == T(0), int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicXor, old ^ value, false, int, unsigned, long long, engine::ull)
ENGINE_ATOMIC(atomicInc, old >= value ? 0 : old + 1, false, unsigned)
ENGINE_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1, false, unsigned)
// clang-format on
#undef ENGINE_ATOMIC

template <
    typename T, typename engine::Exists<engine::is_one_of<T, int, unsigned, engine::ull, unsigned short>>::type = 0>
ENGINE_INLINE T atomicCAS(T* address, engine::Plain<T> compare, engine::Plain<T> value) {
  if (!__atomic_compare_exchange(address, &compare, &value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    engine_look(address);
  return compare;
}
