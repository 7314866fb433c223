// Of tests/test_engine_async.py.
#include <cuda_pipeline.h>
// Three groups of one copy each; what is there when `pending` of them may be left.
extern "C" __global__ void groups(const float *in, float *out, int pending) {
  __shared__ float s[3 * 32];
  int t = threadIdx.x;
  for (int k = 0; k < 3; ++k) s[k * 32 + t] = -1;
  __syncthreads();
  for (int k = 0; k < 3; ++k) {
    unsigned to = (unsigned)__cvta_generic_to_shared(&s[k * 32 + t]);
    asm volatile("cp.async.ca.shared::cta.global.L2::128B [%0], [%1], 4;" :: "r"(to), "l"(&in[k * 32 + t]));
    asm volatile("cp.async.commit_group;");
  }
  if (pending == 0) asm volatile("cp.async.wait_group 0;");
  if (pending == 1) asm volatile("cp.async.wait_group 1;");
  if (pending == 2) asm volatile("cp.async.wait_group %0;" :: "n"(2));
  if (pending == 3) asm volatile("cp.async.wait_group 3;");
  for (int k = 0; k < 3; ++k) out[k * 32 + t] = s[k * 32 + t];
  asm volatile("cp.async.wait_all;");
}
// wait_group knows of committed groups alone, wait_all of everything; an empty group is done at once.
extern "C" __global__ void uncommitted(const float *in, float *out) {
  __shared__ float s[32];
  int t = threadIdx.x;
  s[t] = -1;
  __syncthreads();
  asm volatile("cp.async.commit_group;\n cp.async.wait_group 0;");
  unsigned to = (unsigned)__cvta_generic_to_shared(&s[t]);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(&in[t]));
  asm volatile("cp.async.wait_group 0;");
  out[t] = s[t];
  asm volatile("cp.async.wait_all;");
  out[32 + t] = s[t];
}
extern "C" __global__ void pipeline(const float4 *in, float4 *out, int zeros) {
  __shared__ float4 s[32];
  int t = threadIdx.x;
  __pipeline_memcpy_async(&s[t], &in[t], 16, zeros);
  __pipeline_commit();
  __pipeline_memcpy_async((char *)&s[t], &in[32], 4);
  __pipeline_commit();
  __pipeline_wait_prior(1);
  out[t] = s[t];
  __pipeline_wait_prior(0);
  out[32 + t] = s[t];
}
// The sum of each column of tiles of 32 x 32, two tiles in flight; another thread's copies are read after the barrier.
extern "C" __global__ void column_sums(const float *in, float *out, int tiles) {
  __shared__ __align__(16) float s[2][32 * 32];
  int t = threadIdx.x;
  auto load = [&](int tile) {
    for (int i = 0; i < 8; ++i) {
      int at = (i * 32 + t) * 4;
      unsigned to = (unsigned)__cvta_generic_to_shared(&s[tile % 2][at]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(in + tile * 1024 + at));
    }
    asm volatile("cp.async.commit_group;");
  };
  float sum = 0;
  load(0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      load(tile + 1);
      asm volatile("cp.async.wait_group 1;");
    } else {
      asm volatile("cp.async.wait_group 0;");
    }
    __syncthreads();
    for (int i = 0; i < 32; ++i) sum += s[tile % 2][i * 32 + t];
    __syncthreads();
  }
  out[t] = sum;
}
