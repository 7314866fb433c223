// Of tests/test_engine_wmma.py.
#include <mma.h>
using namespace nvcuda;
template <int M, int N, int K, typename Factor, typename T, typename C, typename LayoutA, typename LayoutB>
__global__ void product(const T* a, const T* b, const C* c, C* d, int lda, int ldb, int ldc, int sizea,
                        bool by_columns) {
  __shared__ alignas(32) T tile[2 * M * K];  // A from shared memory and B from global
  for (int i = threadIdx.x; i < sizea; i += 32) tile[i] = a[i];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, M, N, K, Factor, LayoutA> A;
  wmma::fragment<wmma::matrix_b, M, N, K, Factor, LayoutB> B;
  wmma::fragment<wmma::accumulator, M, N, K, C> S;
  static_assert(sizeof(A.x) / sizeof(A.x[0]) == M * K / 32 && sizeof(S.x) / sizeof(S.x[0]) == M * N / 32, "");
  wmma::load_matrix_sync(A, tile, lda);
  wmma::load_matrix_sync(B, b, ldb);
  wmma::load_matrix_sync(S, c, ldc, by_columns ? wmma::mem_col_major : wmma::mem_row_major);
  ROUND
  wmma::mma_sync(S, A, B, SCALED);
  for (int i = 0; i < S.num_elements; ++i) S.x[i] = S.x[i] * C(2);
  wmma::store_matrix_sync(d, S, ldc, by_columns ? wmma::mem_col_major : wmma::mem_row_major);
}
