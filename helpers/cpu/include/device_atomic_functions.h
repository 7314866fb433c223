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
// An exchange may be the first write of a word, so it is told from an update, which reads the word.
template <typename T>
ENGINE_INLINE T atomic_exchange(T* address, T value) {
  T before;
  __atomic_exchange(address, &value, &before, __ATOMIC_ACQ_REL);
  return before;
}
}  // namespace engine

#define ENGINE_UPDATE(EXPRESSION) engine::atomic_update(address, [=](T old) -> T { return EXPRESSION; })
#define ENGINE_ATOMIC(NAME, RESULT)                                   \
  template <typename T>                                               \
  ENGINE_INLINE T NAME(T* address, engine::Plain<T> value) {          \
    return RESULT;                                                    \
  }                                                                   \
  template <typename T>                                               \
  ENGINE_INLINE T NAME##_block(T* address, engine::Plain<T> value) {  \
    return NAME(address, value);                                      \
  }                                                                   \
  template <typename T>                                               \
  ENGINE_INLINE T NAME##_system(T* address, engine::Plain<T> value) { \
    return NAME(address, value);                                      \
  }
// clang-format off
ENGINE_ATOMIC(atomicAdd, ENGINE_UPDATE(old + value))
ENGINE_ATOMIC(atomicSub, ENGINE_UPDATE(old - value))
ENGINE_ATOMIC(atomicExch, engine::atomic_exchange(address, value))
ENGINE_ATOMIC(atomicMin, ENGINE_UPDATE(value < old ? value : old))
ENGINE_ATOMIC(atomicMax, ENGINE_UPDATE(old < value ? value : old))
ENGINE_ATOMIC(atomicAnd, ENGINE_UPDATE(old & value))
ENGINE_ATOMIC(atomicOr, ENGINE_UPDATE(old | value))
ENGINE_ATOMIC(atomicXor, ENGINE_UPDATE(old ^ value))
ENGINE_ATOMIC(atomicInc, ENGINE_UPDATE(old >= value ? 0 : old + 1))
ENGINE_ATOMIC(atomicDec, ENGINE_UPDATE(old == 0 || old > value ? value : old - 1))
// clang-format on
#undef ENGINE_ATOMIC
#undef ENGINE_UPDATE

template <typename T>
ENGINE_INLINE T atomicCAS(T* address, engine::Plain<T> compare, engine::Plain<T> value) {
  __atomic_compare_exchange(address, &compare, &value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return compare;
}
