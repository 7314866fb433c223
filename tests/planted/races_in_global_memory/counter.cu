// Threads count with += in place of an atomic.
// finds: race, count[0], thread 5
// launch: <<<1, 64>>>(some(64), zeros(1))
extern "C" __global__ void counter(const float *in, int *count) {
  if (in[threadIdx.x] > 3) count[0] += 1;  // here // there  // fix: if (in[threadIdx.x] > 3) atomicAdd(&count[0], 1);
}
