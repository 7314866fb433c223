// load_matrix_sync reads a row behind its array.
// finds: out of bounds, in
// launch: <<<1, 32>>>(some(256, float16), out(32))
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void fragment_past_the_end(const half *in, float *out) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
  wmma::load_matrix_sync(a, in + 16, 16);  // here  // fix: wmma::load_matrix_sync(a, in, 16);
  out[threadIdx.x] = (float)a.x[0];
}
