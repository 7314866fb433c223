// The tile has eight rows, the loop nine.
// finds: out of bounds, tile[512], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void a_row_too_many(const float *in, float *out) {
  __shared__ float tile[8][64];
  for (int row = 0; row <= 8; ++row) tile[row][threadIdx.x] = in[threadIdx.x];  // here  // fix: for (int row = 0; row < 8; ++row) tile[row][threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[7][63 - threadIdx.x];
}
