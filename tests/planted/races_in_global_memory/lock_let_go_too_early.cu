// The lock is released with no fence after the sum that it protects.
// finds: race, sum[0], block 1
// launch: <<<4, 64>>>(some(4), zeros(1, float32), zeros(1))
extern "C" __global__ void lock_let_go_too_early(const float *in, float *sum, int *lock) {
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) __nanosleep(100);
    __threadfence();
    sum[0] += in[blockIdx.x];  // here // there
    // fix: __threadfence();
    atomicExch(lock, 0);
  }
}
