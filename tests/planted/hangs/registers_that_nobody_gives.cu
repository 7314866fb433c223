// Two consumers ask for more registers, and the producer keeps its own.
// finds: deadlock, block 0, thread 128
// launch: <<<1, 384>>>(out(384))
#include "hopper.cuh"
extern "C" __global__ void __launch_bounds__(384, 1) registers_that_nobody_gives(float *out) {
  if (threadIdx.x >= 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;" ::: "memory");  // here
  } else {
    // fix: asm volatile("setmaxnreg.dec.sync.aligned.u32 24;" ::: "memory");
  }
  __syncthreads();
  out[threadIdx.x] = 1;
}
