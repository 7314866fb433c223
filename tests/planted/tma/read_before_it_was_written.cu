// A thread waits until its store has read shared memory, and reads what it may not have written yet.
// finds: not waited for, out[0], thread 0
// launch: <<<1, 32>>>(out(32), out(32))
#include "hopper.cuh"
extern "C" __global__ void read_before_it_was_written(float *out, float *copy) {
  __shared__ __align__(128) float s[32];
  int t = threadIdx.x;
  s[t] = t;
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" :: "l"(out), "r"(at(s)) : "memory");  // there
    commit();
    wait_read();  // fix: asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncthreads();
  copy[t] = out[t];  // here
}
