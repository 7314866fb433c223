// CUDA C++ for a host compiler: the part of the language that kernels use, on top of engine.h.
// Every kernel is compiled with this header in front of it, as NVRTC does with its own.
// Templates that these headers use themselves return auto, whatever they return: g++ then makes their instances when the
// headers are precompiled, and not once more, used or unused, at the end of each kernel's compilation.
#pragma once
// The host's headers come before the names below are given away; a source may include them again. libstdc++'s <math.h>
// would bring std::sph_bessel and its like, which take longer to read than all of the engine's headers.
#include <cstddef>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cstdio>
#include <ctime>
#include <initializer_list>  // NVRTC declares it in every source, and placement new and std::move
#include <new>
#include <utility>
#ifdef ENGINE_LIBRARIES
#include <string>  // some of its versions say __attribute__((__noinline__)), which is a macro below
#endif

#include "driver_types.h"
#include "vector_types.h"

// ---------------------------------------------------------------- the language

#define __CUDACC__ 1
#define __CUDA_ARCH__ 900
#define __CUDACC_RTC__ 1
#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __CUDACC_VER_BUILD__ 86
#define __CUDA_ARCH_LIST__ 900
#define CUDART_VERSION 12090  // as NVRTC and nvcc have it in every source; CUDA_VERSION comes with <cuda.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
// A block stays on one OS thread, so this is one copy per block. used: a compiler that sees no write would fold the
// reads to 0, where a GPU reads arbitrary contents.
#define __shared__ thread_local __attribute__((used))
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __block_size__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// What a macro's `extern __shared__ T name[]` becomes. A capture is legal in functions alone, as the memory is.
#define ENGINE_EXTERN_SHARED(...) [&] { return (__VA_ARGS__*)engine_dynamic_shared(); }()
#define ENGINE_ALIGNAS(...) __attribute__((aligned(engine::alignment<__VA_ARGS__>())))
#define __builtin_align__(n) __align__(n)
#ifndef __clang__
#define __builtin_assume(condition) ((void)0)
#endif

// Before a variable whose initial value is computed: by the compiler, as no host runs before a kernel.
#if !defined(ENGINE_AS_NVRTC)
#define ENGINE_CONSTINIT
#elif defined(__clang__)
#define ENGINE_CONSTINIT __attribute__((require_constant_initialization))
#elif __GNUC__ >= 10
#define ENGINE_CONSTINIT __constinit
#else
#define ENGINE_CONSTINIT
#endif

namespace engine {  // of a number or of a type, as alignas takes both
template <size_t N>
constexpr size_t alignment() {
  return N;
}
template <typename T>
constexpr size_t alignment() {
  return alignof(T);
}
}  // namespace engine

#define threadIdx (engine_lane()->thread_index)
#define blockIdx (engine_lane()->block_index)
#define blockDim (engine_lane()->block_size)
#define gridDim (engine_lane()->grid_size)
static constexpr int warpSize = 32;

#ifdef __linux__
// What compilers call for the address of a thread-local variable. A kernel's only ones are its __shared__ arrays, and
// the engine keeps those between guards: an index past their end is a fault with a line, not a broken heap.
extern "C" __attribute__((visibility("hidden"), used, no_sanitize("thread"))) void* __tls_get_addr(size_t* variable) {
#ifdef ENGINE_HAS_TLS_ROOM
  return engine_static_base + variable[1];
#else
  return engine_static_shared() + variable[1];
#endif
}
#endif
static thread_local char engine_anchor_byte;
extern "C" char* engine_anchor() { return &engine_anchor_byte; }

// ---------------------------------------------------------------- barriers and fences

static inline void __syncthreads(ENGINE_HERE) { engine_barrier(engine::BarrierOp::none, 0, file, line); }
static inline int __syncthreads_count(int predicate, ENGINE_HERE) {
  return engine_barrier(engine::BarrierOp::count, predicate, file, line);
}
static inline int __syncthreads_and(int predicate, ENGINE_HERE) {
  return engine_barrier(engine::BarrierOp::all, predicate, file, line);
}
static inline int __syncthreads_or(int predicate, ENGINE_HERE) {
  return engine_barrier(engine::BarrierOp::any, predicate, file, line);
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---------------------------------------------------------------- time, output, stopping

static inline long long clock64() { return engine_clock(); }
static inline clock_t engine_clock32() { return (clock_t)(int)engine_clock(); }
#define clock engine_clock32
static inline void __nanosleep(unsigned) { engine_yield(); }
static inline void __brkpt() {}
static inline void __trap(ENGINE_HERE) { engine_fail("the kernel called __trap()", file, line); }
// Addresses within shared memory; the pointers of the engine are generic and global ones at once.
static inline size_t __cvta_generic_to_shared(const void* pointer, ENGINE_HERE) {
  return engine_shared_offset(pointer, file, line);
}
static inline void* __cvta_shared_to_generic(size_t address, ENGINE_HERE) {
  return engine_cluster_pointer((unsigned)address, 1, "__cvta_shared_to_generic", file, line);
}
static inline size_t __cvta_generic_to_global(const void* pointer) { return (size_t)pointer; }
static inline void* __cvta_global_to_generic(size_t address) { return (void*)address; }
// Where a pointer points to. Constant, local and global memory are one here.
static inline unsigned __isShared(const void* pointer) { return engine_is_shared(pointer) != 0; }
static inline unsigned __isClusterShared(const void* pointer) { return engine_is_cluster_shared(pointer) != 0; }
static inline unsigned __isGlobal(const void* pointer) { return !engine_is_cluster_shared(pointer); }
static inline unsigned __isConstant(const void*) { return 0; }
static inline unsigned __isGridConstant(const void*) { return 0; }
static inline unsigned __isLocal(const void*) { return 0; }
static inline unsigned __dynamic_smem_size() { return engine_dynamic_shared_size(); }

#define printf(...) engine_printf(__VA_ARGS__)

#include "assert.h"
#ifdef ENGINE_LIBRARIES
#include "libraries/runtime_api.h"
#endif

#include "arithmetic.h"
#include "device_atomic_functions.h"
#include "device_functions.h"
#include "engine_entries.h"
#include "math_functions.h"
#include "rounding_functions.h"
#include "simd_functions.h"
#include "warp_functions.h"
