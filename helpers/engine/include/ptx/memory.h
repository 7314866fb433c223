// Loads, stores, atomics and copies of inline PTX. Each access is one of the kernel's own for a checked run.
#pragma once
#include "floats.h"

namespace engine {
namespace ptx {

// Pointers of the engine are generic and global ones at once; shared memory has addresses of 32 bits of its own. cluster:
// that of any block of the cluster.
enum class Space { generic, shared, cluster };
enum class Order { weak, is_volatile, relaxed };  // .acquire and .release are relaxed with a fence
enum class Scope { none, cta, gpu };

ENGINE_INLINE void fence(Scope scope) {
  if (scope == Scope::cta) __threadfence_block();
  if (scope == Scope::gpu) __threadfence();
}

template <typename A>
ENGINE_INLINE uintptr_t number(A address) {
  return (uintptr_t)address;
}

template <Space S, unsigned Bytes, typename A>
ENGINE_INLINE void* pointer(A base, long long offset, const char* name, const char* file, int line) {
  const uintptr_t address = number(base) + (uintptr_t)offset;
  if constexpr (S == Space::shared) return engine_shared_pointer((unsigned)address, Bytes, name, file, line);
  if constexpr (S == Space::cluster) return engine_cluster_pointer((unsigned)address, Bytes, name, file, line);
  static_assert(
      S != Space::generic || sizeof(A) == 8, "an address of global or generic memory is another size: it has 64 bits");
  if (address % Bytes != 0)
    engine_misaligned("ld, st, atom and red take an address that is a multiple of what they access", file, line);
  return (void*)address;
}

// One access of so many bytes.
template <Order O, typename R>
ENGINE_INLINE R read(const void* p) {
  if constexpr (O == Order::weak) return *(const R*)p;
  else if constexpr (O == Order::is_volatile || sizeof(R) == 16) return *(const volatile R*)p;
  else return __atomic_load_n((const R*)p, __ATOMIC_RELAXED);
}
template <Order O, typename R>
ENGINE_INLINE void write(void* p, R value) {
  if constexpr (O == Order::weak) *(R*)p = value;
  else if constexpr (O == Order::is_volatile || sizeof(R) == 16) *(volatile R*)p = value;
  else __atomic_store_n((R*)p, value, __ATOMIC_RELAXED);
}
template <size_t Bytes>
struct AccessOf : BitsOf<Bytes> {};
template <>
struct AccessOf<16> {
  typedef Words type;
};

template <typename T, int N>
struct Vector {
  T v[N];
};

template <typename T, int N, Space S, Order O, Scope Fence, typename A>
ENGINE_INLINE Vector<T, N> load(A base, long long offset, const char* name, ENGINE_HERE) {
  typedef typename AccessOf<sizeof(T) * N>::type R;
  const void* const p = pointer<S, sizeof(R), A>(base, offset, name, file, line);
  const R found = read<O, R>(p);
  if (O != Order::weak) engine_look(p);
  fence(Fence);
  return as<Vector<T, N>>(found);
}
template <typename T, int N, Space S, Order O, Scope Fence, typename A>
ENGINE_INLINE void store(A base, long long offset, const char* name, Vector<T, N> values, ENGINE_HERE) {
  typedef typename AccessOf<sizeof(T) * N>::type R;
  fence(Fence);
  write<O, R>(pointer<S, sizeof(R), A>(base, offset, name, file, line), as<R>(values));
}

// ---------------------------------------------------------------- atomics

// What an atomic makes of the old number and its operand.
#define ENGINE_NEXT(NAME, EXPRESSION) \
  struct NAME {                       \
    template <typename T>             \
    static T next(T old, T value) {   \
      (void)old;                      \
      return EXPRESSION;              \
    }                                 \
  };
ENGINE_NEXT(Add_, (sum_of<T>(old, value)))
ENGINE_NEXT(Min_, (extreme_of<T, false>(old, value)))
ENGINE_NEXT(Max_, (extreme_of<T, true>(old, value)))
ENGINE_NEXT(And_, old& value)
ENGINE_NEXT(Or_, old | value)
ENGINE_NEXT(Xor_, old ^ value)
ENGINE_NEXT(Exchange_, value)
ENGINE_NEXT(Increment, old >= value ? T(0) : T(old + 1))
ENGINE_NEXT(Decrement, old == 0 || old > value ? value : T(old - 1))
#undef ENGINE_NEXT

// What was there, of one element. The update works on bits, so that every type has it.
template <typename Op, typename T>
ENGINE_INLINE T update(void* p, T value) {
  typedef Raw<T> R;
  return as<T>(engine::atomic_update((R*)p, [=](R old) { return as<R>(Op::next(as<T>(old), value)); }));
}

template <typename Op, typename T, int N, Space S, Scope Before, Scope After, typename A>
ENGINE_INLINE Vector<T, N> atomic(A base, long long offset, const char* name, Vector<T, N> values, ENGINE_HERE) {
  char* p = (char*)pointer<S, sizeof(T) * N, A>(base, offset, name, file, line);
  fence(Before);
  if constexpr (N > 1 && engine::SameType<T, float>::value && engine::SameType<Op, Add_>::value) {
    engine::Floats given = {};
    for (int i = 0; i < N; ++i) given[i] = values.v[i];
    const engine::Floats old = engine_add_floats((float*)p, given, N, name, file, line);
    for (int i = 0; i < N; ++i) values.v[i] = old[i];
    fence(After);
    return values;
  }
  for (int i = 0; i < N; ++i) {
    const T value = values.v[i];
    values.v[i] = update<Op, T>(p + i * sizeof(T), value);
    // It only read what others write, or did not get what others hold.
    const Raw<T> old = as<Raw<T>>(values.v[i]), next = as<Raw<T>>(Op::next(values.v[i], value));
    if (old == next) engine_look((const void*)p);
  }
  fence(After);
  return values;
}

template <typename T, Space S, Scope Before, Scope After, typename A>
ENGINE_INLINE T compare_and_swap(A base, long long offset, const char* name, T expected, T value, ENGINE_HERE) {
  typedef Raw<T> R;
  R* p = (R*)pointer<S, sizeof(T), A>(base, offset, name, file, line);
  R old = as<R>(expected), desired = as<R>(value);
  fence(Before);
  if (!__atomic_compare_exchange(p, &old, &desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    engine_look((const void*)p);
  fence(After);
  return as<T>(old);
}

// ---------------------------------------------------------------- addresses

template <typename A>
ENGINE_INLINE unsigned long long to_shared(A generic, ENGINE_HERE) {
  return engine_shared_offset((const void*)number(generic), file, line);
}
template <typename A>
ENGINE_INLINE unsigned long long from_shared(A address, ENGINE_HERE) {
  return (uintptr_t)engine_cluster_pointer((unsigned)number(address), 1, "cvta.shared", file, line);
}
template <typename A>
ENGINE_INLINE bool is_shared(A generic) {
  return engine_is_shared((const void*)number(generic));
}

template <typename A>
ENGINE_INLINE bool is_cluster_shared(A generic) {
  return engine_is_cluster_shared((const void*)number(generic));
}
// mapa and getctarank, of an address of 32 bits or of a generic one.
template <Space S, typename A>
ENGINE_INLINE unsigned long long map_shared(A address, unsigned rank, ENGINE_HERE) {
  const uintptr_t at = number(address);
  void* const p = S == Space::generic ? (void*)at : engine_cluster_pointer((unsigned)at, 1, "mapa", file, line);
  void* const there = engine_map_shared(p, rank, "mapa", file, line);
  return S == Space::generic ? (uintptr_t)there : engine_shared_offset(there, file, line);
}
template <Space S, typename A>
ENGINE_INLINE unsigned shared_rank(A address, ENGINE_HERE) {
  const uintptr_t at = number(address);
  const void* const p =
      S == Space::generic ? (const void*)at : engine_cluster_pointer((unsigned)at, 1, "getctarank", file, line);
  return engine_shared_rank(p, "getctarank", file, line);
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
  static_assert(sizeof(Source) == 8, "an operand of this instruction has another size");
  void* const place = engine_shared_pointer(target, Bytes, "cp.async", file, line);
  async_copy<Bytes>(place, (const void*)number(source), given, file, line);
}
// The target's address and the source's with their offsets.
template <int Bytes, int Least, typename Target, typename Source>
ENGINE_INLINE void cp_async_at(
    Target target, long long to, Source source, long long from, unsigned given = Bytes, ENGINE_HERE) {
  static_assert(sizeof(Source) == 8, "an operand of this instruction has another size");
  cp_async<Bytes, Least>(
      (unsigned)(number(target) + (uintptr_t)to), number(source) + (uintptr_t)from, given, file, line);
}

}  // namespace ptx
}  // namespace engine
