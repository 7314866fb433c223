// What the compiler's -fsanitize=thread calls before every access of an instrumented kernel, and -fsanitize-coverage at
// every basic block. The library that belongs to them is not linked: these take its names.
//
// Nearly all the time of a checked run is spent here, so an access that repeats is a glance at what its instruction
// found the last time. The glance is inlined into each hook: the caller it sees is the kernel, the frame is the hook's.
#include <stdio.h>

#include "books.h"

namespace {

inline __attribute__((always_inline)) void access(void* address, unsigned size, Kind kind, How how, void* caller) {
  const uintptr_t a = (uintptr_t)address, pc = (uintptr_t)caller;
  void* const frame = __builtin_frame_address(0);  // the hook's, as this is inlined
  Cached& hint = slot_of(cache, pc);
  const uintptr_t offset = a - hint.begin;
  if (__builtin_expect(hint.pc != pc || offset > hint.span, 0)) return access_first(a, size, kind, how, pc, frame);
  if (profile.running) {
    remember_event(a, pc, frame);
    // Other lanes may have run meanwhile, and the slot may be another instruction's, or empty.
    if (__builtin_expect(hint.pc != pc || a - hint.begin > hint.span, 0)) return access_found(a, size, kind, how, pc);
  }
  ++*hint.count;
  if (hint.fetches && (a & (size - 1)) == 0) {
    ++hint.fetches[offset >> hint.shift];
    return;
  }
  if (kind == READ && hint.cells && (a & (size - 1)) == 0) {
    // The common case: written by this block before the last barrier, and now only read.
    Cell& cell = hint.cells[offset >> hint.shift];
    if (cell.write < books.barrier_tag && cell.write >= books.block_tag) {
      remember_read(cell, tag_of(books.epoch, current.thread, how), hint.site);
      return;
    }
  }
  access_books(hint, a, size, kind, how, pc);
}

// One OS thread runs the blocks of a checked launch, so the plain operation is atomic enough. These are inlined: the
// frame and the caller are the hook's.
template <typename T>
__attribute__((always_inline)) inline void before_atomic_write(volatile T* p, void* caller) {
  take_up((uintptr_t)p);
  access((void*)p, sizeof(T), WRITE, ATOMIC, caller);
  release((uintptr_t)p);
}

template <typename T>
__attribute__((always_inline)) inline T compare_exchange(volatile T* p, T expected, T v, void* caller) {
  compare((uintptr_t)p, sizeof(T));
  before_atomic_write(p, caller);
  T old = *p;
  if (old == expected) *p = v;
  return old;
}

template <typename T>
__attribute__((always_inline)) inline int compare_exchange_at(volatile T* p, T* expected, T v, void* caller) {
  T old = compare_exchange(p, *expected, v, caller);
  if (old == *expected) return 1;
  *expected = old;
  return 0;
}

}  // namespace

extern "C" {

#define CALLER __builtin_return_address(0)
#define HOOKS(SIZE)                                                                               \
  void __tsan_read##SIZE(void* p) { access(p, SIZE, READ, PLAIN, CALLER); }                       \
  void __tsan_write##SIZE(void* p) { access(p, SIZE, WRITE, PLAIN, CALLER); }                     \
  void __tsan_unaligned_read##SIZE(void* p) { access(p, SIZE, READ, PLAIN, CALLER); }             \
  void __tsan_unaligned_write##SIZE(void* p) { access(p, SIZE, WRITE, PLAIN, CALLER); }           \
  /* volatile is how older kernels signal each other: it may carry an order, see may_meet */      \
  void __tsan_volatile_read##SIZE(void* p) {                                                      \
    engine_look(p);                                                                               \
    take_up((uintptr_t)p);                                                                        \
    observe((uintptr_t)p, SIZE);                                                                  \
    access(p, SIZE, READ, VOLATILE, CALLER);                                                      \
  }                                                                                               \
  void __tsan_volatile_write##SIZE(void* p) {                                                     \
    access(p, SIZE, WRITE, volatile_write(), CALLER);                                             \
    release((uintptr_t)p);                                                                        \
  }                                                                                               \
  void __tsan_unaligned_volatile_read##SIZE(void* p) { access(p, SIZE, READ, VOLATILE, CALLER); } \
  void __tsan_unaligned_volatile_write##SIZE(void* p) { access(p, SIZE, WRITE, volatile_write(), CALLER); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
#undef HOOKS

// Compilers have no atomic of several floats, so a GPU's is reported here.
engine::Floats engine_add_floats(
    float* address, engine::Floats values, unsigned n, const char* name, const char* file, int line) {
  if (engine_is_shared(address)) {
    char message[128];
    snprintf(message, sizeof message, "%s of several floats takes an address of global memory, not shared", name);
    engine_fail(message, file, line);
  }
  const unsigned bytes = n * sizeof(float);
  if (!books.running) {
    if ((uintptr_t)address % bytes != 0)
      engine_misaligned("an atomic of several floats takes an address that is a multiple of their bytes", file, line);
    engine::Floats before = {};
    for (unsigned i = 0; i < n; ++i) before[i] = add_float(&address[i], values[i]);
    return before;
  }
  for (unsigned i = 0; i < n; ++i) take_up((uintptr_t)&address[i]);
  access(address, bytes, WRITE, ATOMIC, CALLER);
  for (unsigned i = 0; i < n; ++i) release((uintptr_t)&address[i]);
  engine::Floats before = {};
  for (unsigned i = 0; i < n; ++i) before[i] = address[i], address[i] += values[i];
  return before;
}

// Whether a write of many pieces, all reported before the first is done, changes the memory.
enum Change { SAME, OTHER, UNKNOWN };

static void range(void* p, size_t bytes, Kind kind, void* caller, Change change = UNKNOWN) {
  for (size_t i = 0; i < bytes;) {
    unsigned size = 16;  // in pieces as wide as a GPU would take them
    while (size > 1 && (size > bytes - i || ((uintptr_t)p + i) % size)) size /= 2;
    access((char*)p + i, size, kind, PLAIN, caller);
    // Two writes of one place: of lanes of a warp by one instruction nothing is said where the values are not known.
    if (kind == WRITE && change != SAME && books.same_value.is_open && (change == OTHER || size < bytes)) {
      if (change == UNKNOWN && books.same_value.one_step) books.same_value.is_open = false;
      else settle_same_value(true);
    }
    i += size;
  }
}
// A copied struct is reported as two ranges, and may then be a call of memcpy: it is not reported twice.
static struct {
  void* p;
  size_t bytes;
  uintptr_t pc;
} told[2];

static void range_once(void* p, size_t bytes, Kind kind, void* caller, Change change = UNKNOWN) {
  const uintptr_t pc = (uintptr_t)caller;
  const bool again = told[kind].p == p && told[kind].bytes == bytes && pc > told[kind].pc && pc < told[kind].pc + 128;
  told[kind].p = nullptr;
  const bool is_local = (uintptr_t)p < current.stack_top && (uintptr_t)p + STACK_REACH > current.stack_top;
  if (!again && !is_local) range(p, bytes, kind, caller, change);
}

void __tsan_read_range(void* p, size_t bytes) {
  range(p, bytes, READ, CALLER);
  told[READ] = {p, bytes, (uintptr_t)CALLER};
}
void __tsan_write_range(void* p, size_t bytes) {
  range(p, bytes, WRITE, CALLER);
  told[WRITE] = {p, bytes, (uintptr_t)CALLER};
}
// What an instrumented kernel calls for memcpy and its like (assembly.py): newer clangs by the second names.
static void told_copy(void* target, const void* source, size_t bytes, void* caller) {
  range_once((void*)source, bytes, READ, caller);
  range_once(target, bytes, WRITE, caller, memcmp(target, source, bytes) ? OTHER : SAME);
}

static void told_fill(void* target, int value, size_t bytes, void* caller) {
  const unsigned char* p = (const unsigned char*)target;
  const bool same = std::all_of(p, p + bytes, [&](unsigned char byte) { return byte == (unsigned char)value; });
  range_once(target, bytes, WRITE, caller, same ? SAME : OTHER);
}

#define COPIES(PREFIX)                                                    \
  void* PREFIX##memcpy(void* target, const void* source, size_t bytes) {  \
    told_copy(target, source, bytes, CALLER);                             \
    return memmove(target, source, bytes);                                \
  }                                                                       \
  void* PREFIX##memmove(void* target, const void* source, size_t bytes) { \
    told_copy(target, source, bytes, CALLER);                             \
    return memmove(target, source, bytes);                                \
  }                                                                       \
  void* PREFIX##memset(void* target, int value, size_t bytes) {           \
    told_fill(target, value, bytes, CALLER);                              \
    return memset(target, value, bytes);                                  \
  }
COPIES(engine_checked_)
COPIES(__tsan_)
#undef COPIES
void __tsan_init() {}
// At the start of every basic block of a profiled kernel.
void __sanitizer_cov_trace_pc() {
  if (!profile.running) return;
  const uintptr_t pc = (uintptr_t)CALLER;
  LaneTrace& lane = *current.trace;
  if (pc <= lane.last_block) remember_event(0, pc, __builtin_frame_address(0));
  lane.last_block = pc;
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_atomic_thread_fence(int order) {
  if (books.running) check_fence(order != __ATOMIC_SEQ_CST);  // as cuda_runtime.h spells __threadfence_block
}
void __tsan_atomic_signal_fence(int) {}

#define ATOMICS(BITS, T)                                                                                 \
  T __tsan_atomic##BITS##_load(const volatile T* p, int) {                                               \
    engine_look((const void*)p);                                                                         \
    take_up((uintptr_t)p);                                                                               \
    observe((uintptr_t)p, BITS / 8);                                                                     \
    access((void*)p, BITS / 8, READ, ATOMIC, CALLER);                                                    \
    return *p;                                                                                           \
  }                                                                                                      \
  void __tsan_atomic##BITS##_store(volatile T* p, T v, int) {                                            \
    before_atomic_write(p, CALLER);                                                                      \
    *p = v;                                                                                              \
  }                                                                                                      \
  T __tsan_atomic##BITS##_exchange(volatile T* p, T v, int) {                                            \
    before_atomic_write(p, CALLER);                                                                      \
    T old = *p;                                                                                          \
    *p = v;                                                                                              \
    return old;                                                                                          \
  }                                                                                                      \
  int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {         \
    return compare_exchange_at(p, expected, v, CALLER);                                                  \
  }                                                                                                      \
  int __tsan_atomic##BITS##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {           \
    return compare_exchange_at(p, expected, v, CALLER);                                                  \
  }                                                                                                      \
  T __tsan_atomic##BITS##_compare_exchange_val(volatile T* p, T expected, T v, int, int) { /* clang's */ \
    return compare_exchange(p, expected, v, CALLER);                                                     \
  }
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
#undef ATOMICS

}  // extern "C"
