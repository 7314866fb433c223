// PTX instructions of Hopper (sm_90a), one per function: mbarriers, TMA copies, products of a
// warpgroup (wgmma), named barriers, the register pool. A warpgroup is four neighbouring warps, 128
// threads; the number of its first warp is a multiple of 4.
//
// Thread 32 w + 4 g + t of a warpgroup (w is 0..3, g 0..7, t 0..3) holds, of an m64nNk16 product,
// D += A B:
//   D, 64 x N:  d[4j], d[4j+1] = (16w + g, 8j + 2t), (16w + g, 8j + 2t + 1)
//               d[4j+2], d[4j+3] = the same of row g+8
//   A, 64 x 16, if it is in registers: as in ptx.cuh, for the 16 rows of its warp
// So d[8k] .. d[8k+7], rounded and packed in pairs, are A of step k of the next product.
//
// A tile in shared memory is one or more panels of 64 columns: rows of 128 bytes, each panel at a
// multiple of 1024 bytes. The 128-byte swizzle puts 16-byte chunk c of row r at chunk c ^ r % 8.
// TMA writes that layout, and wgmma reads it.

#pragma once
#include "ptx.cuh"

constexpr int PANEL_COLUMNS = 64;  // of 2 bytes: the widest box with the 128-byte swizzle

// As cuTensorMapEncodeTiled writes it: the address, sizes and strides of an array, and the box that
// one copy takes.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// ---- mbarriers: 8 bytes of shared memory that count arrivals and bytes; a phase ends with both

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the cluster and to asynchronous copies, as CUTLASS's
// fence_barrier_init; the other threads of the block need a __syncthreads() as well.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival; the phase now also waits for that many more bytes of copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of that parity has ended: 0 for the first, third, ... and 1 for the others. For
// a new mbarrier, parity 1 counts as ended. The hardware may suspend the thread for a limited time
// before it answers.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
  unsigned ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended;
}

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- rings: stages in shared memory that a producer fills and consumers empty, over and over

// Which of a ring's N stages is next, and the parity of its mbarriers' phase: CUTLASS's
// PipelineState. The producer has one, and so has each consumer.
template <int N>
struct PipelineState {
  int index = 0;
  unsigned phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index < N) return;
    index = 0;
    phase ^= 1;
  }
};

// The mbarriers of N stages: `full` of each, which counts copied bytes, then `empty` of each, which
// counts the consumers that have left the stage.
template <int N>
struct Ring {
  static constexpr unsigned BYTES = 2 * N * 8;
  unsigned full, empty;

  __device__ __forceinline__ Ring(unsigned full, unsigned empty) : full(full), empty(empty) {}
  __device__ __forceinline__ explicit Ring(unsigned barriers) : Ring(barriers, barriers + N * 8) {}

  // By one thread; the mbarrier_init_fence() is the caller's.
  __device__ __forceinline__ void init(unsigned consumers) const {
    init_full();
    for (int i = 0; i < N; ++i) mbarrier_init(empty + 8 * i, consumers);
  }
  __device__ __forceinline__ void init_full() const {
    for (int i = 0; i < N; ++i) mbarrier_init(full + 8 * i, 1);
  }

  // The producer: waits until consumers have left the stage. Waiting on parity 1 of a new mbarrier
  // returns at once, hence `^ 1`: the first time through the ring, all stages are empty.
  __device__ __forceinline__ void wait_empty(const PipelineState<N>& stage) const {
    mbarrier_wait(empty + 8 * stage.index, stage.phase ^ 1);
  }
  // Then says how many bytes fill it. Returns the mbarrier that the copies name.
  __device__ __forceinline__ unsigned expect(const PipelineState<N>& stage, unsigned bytes) const {
    mbarrier_arrive_expect_tx(full + 8 * stage.index, bytes);
    return full + 8 * stage.index;
  }

  // A consumer: waits until the bytes are there.
  __device__ __forceinline__ void wait_full(const PipelineState<N>& stage) const {
    mbarrier_wait(full + 8 * stage.index, stage.phase);
  }
  // Then leaves the stage to the producer.
  __device__ __forceinline__ void release(const PipelineState<N>& stage) const {
    mbarrier_arrive(empty + 8 * stage.index);
  }
};

// ---- TMA: one thread copies a box of a four-dimensional array; elements outside of it are zeros

// Global to shared memory. `x` is the first column, `row`, `head` and `batch` the other coordinates
// of the box. The box's bytes, zeros included, count for the mbarrier.
__device__ __forceinline__ void tma_load(
    unsigned target, const TensorMap& map, unsigned barrier, int x, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// `bytes` (a multiple of 16) that lie in a row, without a tensor map.
__device__ __forceinline__ void bulk_load(
    unsigned target, const void* source, unsigned barrier, unsigned bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same from shared to global memory; its end is that of a group, as for tma_store.
__device__ __forceinline__ void bulk_store(void* target, unsigned source, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(source), "r"(bytes)
               : "memory");
}

// Adds floats in shared memory to those in global memory: an atomic addition for each, by one
// instruction of one thread.
__device__ __forceinline__ void bulk_add(float* target, unsigned source, unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
      "r"(source), "r"(bytes)
      : "memory");
}

// Shared to global memory; elements outside of the array are not written.
__device__ __forceinline__ void tma_store(
    const TensorMap& map, unsigned source, int x, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(source), "r"(x), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// All stores and additions that this thread has started since the last commit become one group.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but PENDING of this thread's groups have read their shared memory.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all of this thread's groups are complete: others may see what they wrote.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders this thread's ordinary accesses to shared memory before later accesses by TMA and wgmma
// (the async proxy).
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8 x 8 matrices from registers to shared memory: the inverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(
    unsigned row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same, transposed on the way: the inverse of ldmatrix_x4_trans.
__device__ __forceinline__ void stmatrix_x4_trans(
    unsigned row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// ---- warpgroups

// Waits for `threads` arrivals, this one included. Barrier 0 is that of __syncthreads().
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Sets the registers per thread of a whole warpgroup. An increase waits until other warpgroups have
// given enough registers back.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- products of a warpgroup

// The descriptor of an operand in panels with the 128-byte swizzle: the next eight rows are 1024
// bytes further. panel_stride is the distance of the next 64 columns, needed only if one product
// takes more than a panel: B transposed, as V is.
__device__ __forceinline__ unsigned long long wgmma_descriptor(
    unsigned address, unsigned panel_stride = 0) {
  constexpr unsigned long long SWIZZLE_128B = 1ull << 62, ROWS_STRIDE = 1024 / 16ull << 32;
  return SWIZZLE_128B | ROWS_STRIDE | static_cast<unsigned long long>(panel_stride / 16) << 16 |
         (address & 0x3ffff) / 16;
}

// The descriptor of what is i tiles of so many bytes further.
__device__ __forceinline__ unsigned long long advance_tiles(
    unsigned long long descriptor, int i, unsigned tile_bytes) {
  return descriptor + i * (tile_bytes / 16);
}

// i times 16 rows further.
__device__ __forceinline__ unsigned long long advance_rows(unsigned long long descriptor, int i) {
  return advance_tiles(descriptor, i, 16 * 128);
}

// i times 16 columns further: 32 bytes each, and after four of them the next panel, of `rows` rows.
__device__ __forceinline__ unsigned long long advance_columns(
    unsigned long long descriptor, int i, int rows) {
  return descriptor + (i / 4 * rows * 128 + i % 4 * 32) / 16;
}

// Needed before the first product, and again after other instructions have written registers of D
// or A.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// All products since the last commit become one group, for wgmma_wait.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction. It stops the compiler, which does not know that products in flight use these
// registers, from moving reads or writes of them across this line.
template <int N>
__device__ __forceinline__ void wgmma_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The lists of N / 2 accumulators in an asm statement.
#define WGMMA_D_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D_32 WGMMA_D_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D_48 WGMMA_D_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D_64 WGMMA_D_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D_80 WGMMA_D_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D_96 WGMMA_D_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D_112 WGMMA_D_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D_128 WGMMA_D_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D_144 WGMMA_D_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_D_160 WGMMA_D_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D_176 WGMMA_D_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D_192 WGMMA_D_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D_208 WGMMA_D_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_D_224 WGMMA_D_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D_240 WGMMA_D_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_D_256 WGMMA_D_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_ACC_FROM(i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_ACC_16 WGMMA_ACC_FROM(0)
#define WGMMA_ACC_32 WGMMA_ACC_16, WGMMA_ACC_FROM(8)
#define WGMMA_ACC_48 WGMMA_ACC_32, WGMMA_ACC_FROM(16)
#define WGMMA_ACC_64 WGMMA_ACC_48, WGMMA_ACC_FROM(24)
#define WGMMA_ACC_80 WGMMA_ACC_64, WGMMA_ACC_FROM(32)
#define WGMMA_ACC_96 WGMMA_ACC_80, WGMMA_ACC_FROM(40)
#define WGMMA_ACC_112 WGMMA_ACC_96, WGMMA_ACC_FROM(48)
#define WGMMA_ACC_128 WGMMA_ACC_112, WGMMA_ACC_FROM(56)
#define WGMMA_ACC_144 WGMMA_ACC_128, WGMMA_ACC_FROM(64)
#define WGMMA_ACC_160 WGMMA_ACC_144, WGMMA_ACC_FROM(72)
#define WGMMA_ACC_176 WGMMA_ACC_160, WGMMA_ACC_FROM(80)
#define WGMMA_ACC_192 WGMMA_ACC_176, WGMMA_ACC_FROM(88)
#define WGMMA_ACC_208 WGMMA_ACC_192, WGMMA_ACC_FROM(96)
#define WGMMA_ACC_224 WGMMA_ACC_208, WGMMA_ACC_FROM(104)
#define WGMMA_ACC_240 WGMMA_ACC_224, WGMMA_ACC_FROM(112)
#define WGMMA_ACC_256 WGMMA_ACC_240, WGMMA_ACC_FROM(120)

// D += A B for 64 x N accumulators, or D = A B if `accumulate` is false. The first argument selects
// the type of the elements. wgmma_ss: A (64 x 16) and B^T (N x 16) are in shared memory, with rows
// like those of Q and K, or as A^T (A_TRANSPOSED) or B (B_TRANSPOSED). wgmma_rs: A is in registers
// and B (16 x N) in shared memory, with rows like those of V, which wgmma reads transposed.
// clang-format off
#define WGMMA_TYPE(N, TYPE, PTX, A0, A1, A2, A3, A4, A5)                                        \
  template <int A_TRANSPOSED = 0, int B_TRANSPOSED = 0>                                         \
  __device__ __forceinline__ void wgmma_ss(                                                     \
      TYPE, float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2                                       \
                 ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #PTX "." #PTX " {" WGMMA_D_##N\
                 "}, %" #A0 ", %" #A1 ", p, 1, 1, %" #A3 ", %" #A4 ";\n}"                       \
                 : WGMMA_ACC_##N                                                                \
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED)); \
  }                                                                                             \
  __device__ __forceinline__ void wgmma_rs(                                                     \
      TYPE, float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A5                                       \
                 ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #PTX "." #PTX " {" WGMMA_D_##N\
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1, 1;\n}"        \
                 : WGMMA_ACC_##N                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));   \
  }
// clang-format on
#define WGMMA(N, ...)                     \
  WGMMA_TYPE(N, __half, f16, __VA_ARGS__) \
  WGMMA_TYPE(N, __nv_bfloat16, bf16, __VA_ARGS__)
WGMMA(16, 8, 9, 10, 11, 12, 13)
WGMMA(32, 16, 17, 18, 19, 20, 21)
WGMMA(48, 24, 25, 26, 27, 28, 29)
WGMMA(64, 32, 33, 34, 35, 36, 37)
WGMMA(80, 40, 41, 42, 43, 44, 45)
WGMMA(96, 48, 49, 50, 51, 52, 53)
WGMMA(112, 56, 57, 58, 59, 60, 61)
WGMMA(128, 64, 65, 66, 67, 68, 69)
WGMMA(144, 72, 73, 74, 75, 76, 77)
WGMMA(160, 80, 81, 82, 83, 84, 85)
WGMMA(176, 88, 89, 90, 91, 92, 93)
WGMMA(192, 96, 97, 98, 99, 100, 101)
WGMMA(208, 104, 105, 106, 107, 108, 109)
WGMMA(224, 112, 113, 114, 115, 116, 117)
WGMMA(240, 120, 121, 122, 123, 124, 125)
WGMMA(256, 128, 129, 130, 131, 132, 133)
