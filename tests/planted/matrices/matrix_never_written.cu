// ldmatrix reads words that nobody has written.
// finds: uninitialised, s
// launch: <<<1, 32>>>(some(64), out(32))
#include "async.cuh"
extern "C" __global__ void matrix_never_written(const float *in, float *out) {
  __shared__ __align__(16) unsigned short s[128];
  int t = threadIdx.x;
  unsigned r;
  s[t] = (unsigned short)in[t], s[t + 32] = (unsigned short)in[t];
  // fix: s[t + 64] = s[t + 96] = 0;
  __syncwarp();
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at(&s[t % 8 * 16])));  // here
  out[t] = (float)r;
}
