// Of tests/test_engine_ptx.py.
#include <mma.h>
using namespace nvcuda;
#define LOAD(ADDRESS) \
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(ADDRESS) : "memory")
#define MMA(R)                                                                                                    \
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4}, {%4}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(R))
__device__ unsigned at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void nobody_else(float *out) {
  if (threadIdx.x < 32) asm volatile("bar.sync 3, 64;");
  out[threadIdx.x] = 1;
}
extern "C" __global__ void odd_count(float *out) {
  asm volatile("bar.sync 3, 50;");
  out[threadIdx.x] = 1;
}
extern "C" __global__ void misaligned(float *out) {
  __shared__ __align__(16) unsigned short s[256];
  unsigned r;
  LOAD(at(s + 9 * (threadIdx.x % 8)));
  out[threadIdx.x] = (float)r;
}
extern "C" __global__ void global_address(float *out) {
  unsigned r;
  LOAD((unsigned)__cvta_generic_to_shared(out));
  out[threadIdx.x] = (float)r;
}
extern "C" __global__ void half_a_warp(float *out) {
  float d[4] = {0, 0, 0, 0};
  if (threadIdx.x % 32 < 16) MMA(0u);
  __syncthreads();
  out[threadIdx.x] = d[0];
}
extern "C" __global__ void some_have_left(float *out) {
  float d[4] = {0, 0, 0, 0};
  if (threadIdx.x == 5) return;
  MMA(0u);
  out[threadIdx.x] = d[0];
}
extern "C" __global__ void small_block(float *out) {
  float d[4] = {0, 0, 0, 0};
  MMA(0u);
  out[threadIdx.x] = d[0];
}
extern "C" __global__ void two_operations(float *out) {
  float d[4] = {0, 0, 0, 0};
  if (threadIdx.x < 16) MMA(0u);
  else __syncwarp();
  out[threadIdx.x] = d[0];
}
extern "C" __global__ void wmma_misaligned(float *out) {
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::load_matrix_sync(c, out + 2, 16, wmma::mem_row_major);
}
extern "C" __global__ void wmma_distance(float *out) {
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::load_matrix_sync(c, out, 18, wmma::mem_row_major);
}
extern "C" __global__ void wmma_half_a_warp(float *out) {
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::fill_fragment(c, 1.0f);
  if (threadIdx.x >= 16) return;
  wmma::store_matrix_sync(out, c, 16, wmma::mem_row_major);
}
extern "C" __global__ void wild_load(float *out) {
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::load_matrix_sync(c, out + 100000, 16, wmma::mem_row_major);
  out[0] = c.x[0];
}
