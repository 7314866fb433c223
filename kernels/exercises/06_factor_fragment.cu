// Exercise 06: O = the sum of P V over tiles of 16 keys. At every tile each row of acc is
// multiplied by its factor.
//
// Launch   grid N / 16, block 32: a warp has 16 rows of P
// Shapes   P (N, N_kv), V (N_kv, HEAD_DIM): float16; M (N_kv / 16, N), O (N, HEAD_DIM): float32;
//          all but M's first dimension are multiples of 16. M holds each row's maximum after each
//          tile; scores are exponents of 2, so the factor is 2^(old maximum - new maximum)
// Limit    at most 64 bytes written to shared memory for a tile: the 16 factors make the trip, acc
//          does not
#include <cuda_fp16.h>
#include <mma.h>

#ifndef HEAD_DIM
#define HEAD_DIM 32
#endif

namespace tc = nvcuda::wmma;
using Accumulator = tc::fragment<tc::accumulator, 16, 16, 16, float>;

extern "C" __global__ void __launch_bounds__(32)
    rescaled_sum(const __half* P, const __half* V, const float* M, float* O, int N, int N_kv) {
  __shared__ __align__(128) float factors[16];
  const int lane = threadIdx.x, first_row = blockIdx.x * 16, row = first_row + lane % 16;
  Accumulator acc[HEAD_DIM / 16];
  for (int n = 0; n < HEAD_DIM / 16; ++n) tc::fill_fragment(acc[n], 0.0f);

  for (int tile = 0; tile < N_kv / 16; ++tile) {
    // Lanes r and r + 16 compute the factor of row r.
    const float rescale = tile == 0 ? 1.0f : exp2f(M[(tile - 1) * N + row] - M[tile * N + row]);
    // BEGIN hole: about 3 lines - lanes 0 to 15 store their factors; none may load or overwrite too early
    __syncwarp();
    if (lane < 16) factors[lane] = rescale;
    __syncwarp();
    // END hole

    // BEGIN hole: about 4 lines - load a fragment whose 16 columns all are the factors; multiply acc[n]
    Accumulator factor;
    tc::load_matrix_sync(factor, factors, 0, tc::mem_col_major);
    for (int n = 0; n < HEAD_DIM / 16; ++n)
      for (int e = 0; e < factor.num_elements; ++e) acc[n].x[e] *= factor.x[e];
    // END hole

    tc::fragment<tc::matrix_a, 16, 16, 16, __half, tc::row_major> p_frag;
    tc::load_matrix_sync(p_frag, P + first_row * N_kv + tile * 16, N_kv);
    for (int n = 0; n < HEAD_DIM / 16; ++n) {
      tc::fragment<tc::matrix_b, 16, 16, 16, __half, tc::row_major> v_frag;
      tc::load_matrix_sync(v_frag, V + tile * 16 * HEAD_DIM + 16 * n, HEAD_DIM);
      tc::mma_sync(acc[n], p_frag, v_frag, acc[n]);
    }
  }
  for (int n = 0; n < HEAD_DIM / 16; ++n)
    tc::store_matrix_sync(O + first_row * HEAD_DIM + 16 * n, acc[n], HEAD_DIM, tc::mem_row_major);
}
