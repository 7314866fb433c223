// ldmatrix needs rows that begin at multiples of 16 bytes.
// finds: misaligned
// launch: <<<1, 32>>>(some(64), out(32))
#include "async.cuh"
extern "C" __global__ void matrix_rows_not_aligned(const float *in, float *out) {
  __shared__ __align__(16) unsigned short s[128];
  int t = threadIdx.x;
  unsigned r;
  for (int i = t; i < 128; i += 32) s[i] = (unsigned short)in[t];
  __syncwarp();
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at(&s[t % 8 * 12])));  // here  // fix: asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(at(&s[t % 8 * 16])));
  out[t] = (float)r;
}
