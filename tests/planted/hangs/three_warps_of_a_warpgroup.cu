// wgmma takes four warps, and one of them waits at a barrier of the block.
// finds: deadlock, block 0, thread 0
// launch: <<<1, 128>>>(out(128))
#include "hopper.cuh"
extern "C" __global__ void three_warps_of_a_warpgroup(float *out) {
  wg_fence();
  wg_commit();
  if (threadIdx.x < 96)  // fix:
    wg_wait<0>();  // here
  __syncthreads();
  out[threadIdx.x] = 1;
}
