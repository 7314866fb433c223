// ldmatrix reads rows that other lanes have written, with no __syncwarp.
// finds: race, s
// launch: <<<1, 32>>>(some(64), out(32))
#include "async.cuh"
extern "C" __global__ void matrix_read_too_early(const float *in, float *out) {
  __shared__ __align__(16) unsigned short s[64];
  int t = threadIdx.x;
  unsigned r;
  ((unsigned *)s)[t] = (unsigned)in[t];  // here
  // fix: __syncwarp();
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at(&s[t % 8 * 8])));  // there
  out[t] = (float)r;
}
