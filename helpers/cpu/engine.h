// What a compiled kernel and the engine say to each other. Kernels see it through cuda_runtime.h.
//
// A CUDA thread is a fiber: a stack of its own, on an OS thread that runs one block at a time. A fiber runs until
// it waits (barrier, warp collective) or ends, so a block needs no locks and its order of events is repeatable.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define ENGINE_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define ENGINE_INLINE static inline __attribute__((always_inline))  // so that a fault in it has the caller's line

struct uint3 {
  unsigned int x, y, z;
};
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};

namespace engine {

// What one thread knows of itself.
struct Lane {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
  unsigned int linear;  // of the thread in its block, x fastest; its warp is linear / 32
};

// A warp-wide operation. Each lane brings one; the last lane of the mask to arrive runs it for all of them.
struct Collective {
  const char *name;                                      // what the source calls it, for messages
  void (*run)(Collective *const *lanes, unsigned mask);  // lanes[i] is null where lane i is not taking part
  unsigned mask;
  const char *file;
  int line;
};

enum class BarrierOp { none, count, all, any };

template <typename T>
struct Same { typedef T type; };
template <typename T>
using Plain = typename Same<T>::type;  // no deduction: atomicAdd(&an_unsigned, 1) takes the 1 as unsigned

}  // namespace engine

extern "C" {
// The same fiber always gets the same answer, so the compiler may keep it over barriers.
const engine::Lane *engine_lane() __attribute__((const));
void engine_collective(engine::Collective *mine);
int engine_barrier(engine::BarrierOp op, int predicate, const char *file, int line);
unsigned engine_activemask(const char *file, int line);
void engine_yield();
char *engine_static_shared();
void *engine_dynamic_shared();
unsigned engine_dynamic_shared_size();
long long engine_clock();
int engine_printf(const char *format, ...) __attribute__((format(printf, 1, 2)));
void engine_fail(const char *message, const char *file, int line) __attribute__((noreturn));
}
