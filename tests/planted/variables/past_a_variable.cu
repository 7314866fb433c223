// A write behind a __device__ array, where another one may stand.
// finds: out of bounds, table[48], thread 48
// launch: <<<1, 64>>>(some(64, int32), zeros(64), int32(49))
__device__ int table[48];
__device__ int beside[48];
extern "C" __global__ void past_a_variable(const int *in, int *out, int n) {
  int t = threadIdx.x;
  if (t < n) table[t] = in[t];  // here  // fix: if (t < n - 1) table[t] = in[t];
  if (t < 48) beside[t] = 0;
  __syncthreads();
  out[t] = table[t % 48] + beside[t % 48];
}
