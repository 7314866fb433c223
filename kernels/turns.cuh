// PTX for blocks that take turns by a counter in global memory: a load, an addition, and the order
// of the memory accesses around them. Notebook 08 explains the turns of 08_backward_mma.cu.

#pragma once

__device__ __forceinline__ int load_relaxed(const int* counter) {
  int count;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// The same, and what follows in this thread comes after what the blocks before did before their
// add_release.
__device__ __forceinline__ int load_acquire(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// What follows in this thread comes after what the blocks before did before their add_release.
__device__ __forceinline__ void fence_acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The next number of a counter that starts at 0, for all threads of a block; one of them calls
// counter() for its address. Blocks draw as they start, so one that waits for those before it waits
// for running blocks only.
template <typename Counter>
__device__ __forceinline__ unsigned draw_number(const Counter& counter) {
  __shared__ unsigned drawn;
  if (threadIdx.x == 0) drawn = atomicAdd(counter(), 1);
  __syncthreads();  // without it, the number could be read before it is drawn
  return drawn;
}

// Adds 1, after all that this thread and those it has met at a barrier have written.
__device__ __forceinline__ void add_release(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
