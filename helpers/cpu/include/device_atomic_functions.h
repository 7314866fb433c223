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

// IS_LOOK: whether it only read what others write, or did not get what others hold.
#define ENGINE_ATOMIC(NAME, EXPRESSION, IS_LOOK)                                    \
  template <typename T>                                                             \
  ENGINE_INLINE T NAME(T* address, engine::Plain<T> value) {                        \
    T old = engine::atomic_update(address, [=](T old) -> T { return EXPRESSION; }); \
    if (IS_LOOK) engine_look(address);                                              \
    return old;                                                                     \
  }                                                                                 \
  template <typename T>                                                             \
  ENGINE_INLINE T NAME##_block(T* address, engine::Plain<T> value) {                \
    return NAME(address, value);                                                    \
  }                                                                                 \
  template <typename T>                                                             \
  ENGINE_INLINE T NAME##_system(T* address, engine::Plain<T> value) {               \
    return NAME(address, value);                                                    \
  }
// clang-format off
ENGINE_ATOMIC(atomicAdd, old + value, value == T(0))
ENGINE_ATOMIC(atomicSub, old - value, value == T(0))
ENGINE_ATOMIC(atomicExch, ((void)old, value), old == value)
ENGINE_ATOMIC(atomicMin, value < old ? value : old, false)
ENGINE_ATOMIC(atomicMax, old < value ? value : old, false)
ENGINE_ATOMIC(atomicAnd, old & value, false)
ENGINE_ATOMIC(atomicOr, old | value, value == T(0))
ENGINE_ATOMIC(atomicXor, old ^ value, false)
ENGINE_ATOMIC(atomicInc, old >= value ? 0 : old + 1, false)
ENGINE_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1, false)
// clang-format on
#undef ENGINE_ATOMIC

template <typename T>
ENGINE_INLINE T atomicCAS(T* address, engine::Plain<T> compare, engine::Plain<T> value) {
  if (!__atomic_compare_exchange(address, &compare, &value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    engine_look(address);
  return compare;
}
