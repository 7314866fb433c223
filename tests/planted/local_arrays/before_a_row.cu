// rows[0][-1]: an index is compared with the row that it is in.
// finds: out of bounds, rows[-1], thread 0
// launch: <<<1, 64>>>(some(64), out(64), int32(-1))
extern "C" __global__ void before_a_row(const float *in, float *out, int back) {
  __shared__ float tile[8][8];
  float rows[2][9];
  tile[0][threadIdx.x] = in[threadIdx.x];  // one row of 64: the address is inside
  __syncthreads();
  for (int i = 0; i < 9; ++i) rows[0][i] = rows[1][i] = tile[0][(threadIdx.x + i) % 64];
  float sum = 0;
  for (int i = 0; i < 9; ++i) sum += rows[1][i] - rows[1][8 - i] * tile[0][i];
  out[threadIdx.x] = rows[0][back] + sum;  // here  // fix: out[threadIdx.x] = rows[0][back + 1] + sum;
}
