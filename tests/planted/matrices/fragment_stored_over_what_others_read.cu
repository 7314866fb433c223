// Lanes read what store_matrix_sync has written for other lanes, with no __syncwarp.
// finds: race, s
// launch: <<<1, 32>>>(some(256, float16), out(256))
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void fragment_stored_over_what_others_read(const half *in, float *out) {
  __shared__ __align__(32) float s[256];
  int t = threadIdx.x;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
  wmma::fill_fragment(c, 0.0f);
  wmma::load_matrix_sync(a, in, 16);
  wmma::load_matrix_sync(b, in, 16);
  wmma::mma_sync(c, a, b, c);
  wmma::store_matrix_sync(s, c, 16, wmma::mem_row_major);  // there
  // fix: __syncwarp();
  for (int i = 0; i < 8; ++i) out[8 * t + i] = s[8 * t + i];  // here
}
