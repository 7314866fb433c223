// Threads make different numbers of turns, and the barrier is inside the loop.
// finds: barrier divergence
// launch: <<<1, 64>>>(some(100), out(64), int32(100))
extern "C" __global__ void barrier_in_a_loop(const float *in, float *out, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += 64) {
    sum += in[i];
    __syncthreads();  // here  // fix:
  }
  __syncthreads();  // there
  out[threadIdx.x] = sum;
}
