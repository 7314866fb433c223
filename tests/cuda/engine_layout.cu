// Of tests/test_engine_layout.py.
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;
typedef unsigned long long Address;

// Every array is written and read, or a GPU's compiler leaves it out.
#define USE(a) ((volatile char *)&a)[i]
#define AT(k, a) out[k] = (Address)&a - (Address)&first, USE(a) = 1, out[k + 16] = USE(a)
extern "C" __global__ void offsets(Address *out, int i) {
  __shared__ half first[256], second[256];
  __shared__ char odd[5];
  __shared__ float real[33];
  __shared__ char more[3];
  __shared__ double wide;
  __shared__ half last[3];
  AT(0, first);
  AT(1, second);
  AT(2, odd);
  AT(3, real);
  AT(4, more);
  AT(5, wide);
  AT(6, last);
  out[7] = (Address)first % 128;
}
template <int N> __global__ void of_template(Address *out, int i) {
  __shared__ half first[N];
  __shared__ char odd;
  __shared__ float second[N];
  AT(0, first);
  AT(1, odd);
  AT(2, second);
  out[7] = (Address)first % 128;
}
extern "C" __global__ void tiles(float *out, const half *in) {
  __shared__ half s_a[256], s_b[256];
  for (int i = threadIdx.x; i < 256; i += 32) s_a[i] = in[i], s_b[i] = in[256 + i];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::fill_fragment(c, 0.0f);
  wmma::load_matrix_sync(a, s_a, 16);
  wmma::load_matrix_sync(b, s_b, 16);
  wmma::mma_sync(c, a, b, c);
  wmma::store_matrix_sync(out, c, 16, wmma::mem_row_major);
}
extern "C" __global__ void past_16_bytes(float *out, const half *in) {
  __shared__ half s[8 + 256];
  for (int i = threadIdx.x; i < 256; i += 32) s[8 + i] = in[i];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::load_matrix_sync(a, s + 8, 16);
  float sum = 0;
  for (int i = 0; i < a.num_elements; i++) sum += __half2float(a.x[i]);
  out[threadIdx.x] = sum;
}
extern "C" __global__ void as_vectors(float *out, int i) {
  __shared__ char flag;
  __shared__ float odd[8];
  flag = 1;
  odd[threadIdx.x] = threadIdx.x;
  __syncthreads();
  float4 v = *(float4 *)(odd + i);
  out[threadIdx.x] = v.x + v.w + flag;
}
