// Lane 0 waits for its own warp, which has to come to a __syncwarp together first.
// finds: deadlock, block 0, thread 1
// launch: <<<1, 64>>>(out(64))
#include "hopper.cuh"
extern "C" __global__ void a_lane_waits_elsewhere(float *out) {
  int t = threadIdx.x;
  if (t == 0) asm volatile("bar.sync 1, 64;" ::: "memory");  // there  // fix:
  __syncwarp();  // here
  asm volatile("bar.sync 1, 64;" ::: "memory");
  out[t] = 1;
}
