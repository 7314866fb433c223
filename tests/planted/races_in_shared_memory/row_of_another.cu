// A transposed read takes words that other threads write, with no barrier between.
// finds: race, dynamic shared memory
// launch: <<<1, 64, 256>>>(some(64), out(64))
extern "C" __global__ void row_of_another(const float *in, float *out) {
  extern __shared__ float tile[];
  int x = threadIdx.x % 8, y = threadIdx.x / 8;
  tile[y * 8 + x] = in[threadIdx.x];  // here
  // fix: __syncthreads();
  out[threadIdx.x] = tile[x * 8 + y];  // there
}
