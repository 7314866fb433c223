// Threads of two blocks add to the same bins without an atomic.
// finds: race, bins
// launch: <<<2, 64>>>(some(128, int32), zeros(2))
extern "C" __global__ void histogram(const int *in, int *bins) {
  int i = blockIdx.x * 64 + threadIdx.x;
  bins[in[i] / 64] += 1;  // here // there  // fix: atomicAdd(&bins[in[i] / 64], 1);
}
