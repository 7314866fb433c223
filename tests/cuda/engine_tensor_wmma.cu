// Of tests/test_engine_tensor.py.
#include <mma.h>
using namespace nvcuda;
typedef unsigned short bits_t;
template <class T> struct As;
template <> struct As<__half> {
  static __device__ __half of(int i) { return __ushort_as_half(i); }
  static __device__ int from(__half v) { return __half_as_ushort(v); }
};
template <> struct As<__nv_bfloat16> {
  static __device__ __nv_bfloat16 of(int i) { return __ushort_as_bfloat16(i); }
  static __device__ int from(__nv_bfloat16 v) { return __bfloat16_as_ushort(v); }
};
template <> struct As<float> {
  static __device__ float of(int i) { return __int_as_float(i); }
  static __device__ int from(float v) { return __float_as_int(v); }
};
// Memory holds the index of each element as its bits; each lane tells what its fragment got.
template <class F>
__device__ void tell(const F &f, int *out) {
  for (int i = 0; i < f.num_elements; ++i) out[threadIdx.x * 32 + i] = As<typename F::element_type>::from(f.x[i]);
}
template <class T, int M, int N, int K>
__global__ void factors(int *out, T *global, int in_shared) {
  __shared__ __align__(32) T shared[512];
  T *s = in_shared ? shared : global;
  for (int i = threadIdx.x; i < 512; i += 32) s[i] = As<T>::of(i);
  __syncwarp();
  wmma::fragment<wmma::matrix_a, M, N, K, T, wmma::row_major> a;
  wmma::fragment<wmma::matrix_a, M, N, K, T, wmma::col_major> a_col;
  wmma::fragment<wmma::matrix_b, M, N, K, T, wmma::row_major> b;
  wmma::fragment<wmma::matrix_b, M, N, K, T, wmma::col_major> b_col;
  wmma::load_matrix_sync(a, s, K);
  wmma::load_matrix_sync(a_col, s, M);
  wmma::load_matrix_sync(b, s, N);
  wmma::load_matrix_sync(b_col, s, K);
  tell(a, out), tell(a_col, out + 1024), tell(b, out + 2048), tell(b_col, out + 3072);
}
template <class T, int M, int N, int K>
__global__ void sums(int *out) {
  __shared__ __align__(32) T s[512];
  for (int i = threadIdx.x; i < 512; i += 32) s[i] = As<T>::of(i);
  __syncwarp();
  wmma::fragment<wmma::accumulator, M, N, K, T> c, c_col;
  wmma::load_matrix_sync(c, s, N, wmma::mem_row_major);
  wmma::load_matrix_sync(c_col, s, M, wmma::mem_col_major);
  tell(c, out), tell(c_col, out + 1024);
}
// D = scale * (A B + C), B as its transpose, C by rows and D by columns, rows of D 8 elements longer than needed.
template <class T, class S, int M, int N, int K>
__global__ void product(const T *a, const T *b, const S *c, S *d, S *ones) {
  a += blockIdx.x * M * K, b += blockIdx.x * K * N, c += blockIdx.x * M * N, d += blockIdx.x * (M + 8) * N;
  wmma::fragment<wmma::matrix_a, M, N, K, T, wmma::row_major> A;
  wmma::fragment<wmma::matrix_b, M, N, K, T, wmma::col_major> B;
  wmma::fragment<wmma::accumulator, M, N, K, S> C;
  wmma::load_matrix_sync(A, a, K);
  wmma::load_matrix_sync(B, b, K);
  wmma::load_matrix_sync(C, c, N, wmma::mem_row_major);
  wmma::mma_sync(C, A, B, C);
  wmma::store_matrix_sync(d, C, M + 8, wmma::mem_col_major);
  wmma::fill_fragment(C, S(1.0f));
  wmma::store_matrix_sync(ones, C, N, wmma::mem_row_major);
}
