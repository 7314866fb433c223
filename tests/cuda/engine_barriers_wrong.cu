// Of tests/test_engine_barriers.py.
extern "C" __global__ void other_barrier(float *a, int n) {
  if (threadIdx.x >= n) return;
  if (threadIdx.x % 2) {
    a[0] = 1;
    __syncthreads();  // odd
  } else {
    a[1] = 1;
    __syncthreads();  // even
  }
}
extern "C" __global__ void exit_shows_it(float *a) {  // the last thread leaves, and the others wait apart
  if (threadIdx.x < 20) __syncthreads();  // low
  else if (threadIdx.x < 63) __syncthreads();  // high
}
extern "C" __global__ void whole_warp_missing(float *a) {  // bar.sync with a count waits for warps, and one has left
  if (threadIdx.x >= 32) return;
  asm volatile("bar.sync 1, 64;" ::: "memory");
  a[threadIdx.x] = 1;
}
extern "C" __global__ void not_a_warp(float *a) { asm volatile("bar.sync 1, 40;" ::: "memory"); }
