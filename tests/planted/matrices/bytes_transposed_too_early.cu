// ldmatrix.trans and a byte permutation transpose rows of bytes that another warp has not stored yet.
// finds: race, s
// launch: <<<1, 64>>>(some(256, "uint32"), out(256))
#include "async.cuh"
extern "C" __global__ void bytes_transposed_too_early(const unsigned *in, float *out) {
  __shared__ __align__(16) unsigned s[256];  // 64 rows of 16 bytes
  int t = threadIdx.x, other = (t + 32) % 64;
  for (int i = 0; i < 4; ++i) s[4 * t + i] = in[4 * t + i];  // here
  // fix: __syncthreads();
  unsigned r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"  // there
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at(&s[4 * other])) : "memory");
  out[4 * t] = (float)__byte_perm(r[0], r[1], 0x6420);
  out[4 * t + 1] = (float)__byte_perm(r[0], r[1], 0x7531);
  out[4 * t + 2] = (float)__byte_perm(r[2], r[3], 0x6420);
  out[4 * t + 3] = (float)__byte_perm(r[2], r[3], 0x7531);
}
