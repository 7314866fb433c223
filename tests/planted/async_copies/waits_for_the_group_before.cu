// The wait leaves one group in flight, and the tile that is read is of that group.
// finds: not waited for, s
// launch: <<<1, 64>>>(some(192), out(64))
#include "async.cuh"
extern "C" __global__ void waits_for_the_group_before(const float *in, float *out) {
  __shared__ float s[2][64];
  int t = threadIdx.x;
  float sum = 0;
  copy(&s[0][t], &in[t]);
  COMMIT();
  for (int i = 0; i < 3; ++i) {
    if (i < 2) copy(&s[(i + 1) % 2][t], &in[64 * (i + 1) + t]);  // there
    COMMIT();
    WAIT(1 /* but not for the last */);
    __syncthreads();
    sum += s[(i + 1) % 2 + 0 * i][63 - t];  // here  // fix: sum += s[i % 2][63 - t];
    __syncthreads();
  }
  out[t] = sum;
  WAIT(0);
}
