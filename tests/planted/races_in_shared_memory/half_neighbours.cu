// Two threads store to one half. In the twin, neighbours share only a word of 4 bytes, which is no race.
// finds: race, s, thread 1
// launch: <<<1, 64>>>(some(64), out(64))
#include <cuda_fp16.h>
extern "C" __global__ void half_neighbours(const float *in, float *out) {
  __shared__ __half s[64];
  int t = threadIdx.x;
  s[t / 2] = __float2half(in[t]);  // here // there  // fix: s[t] = __float2half(in[t]);
  __syncthreads();
  out[t] = __half2float(s[t / 2]);
}
