// Two lines write the same vector.
// finds: same value, total, thread 7
// launch: <<<1, 64>>>(ones(64), out(64))
extern "C" __global__ void two_lines_with_one_value(const float *in, float *out) {
  __shared__ float4 total;
  if (threadIdx.x == 3) total = make_float4(1, 2, 3, in[0]);  // there
  // fix: __syncthreads();
  if (threadIdx.x == 7) total = make_float4(1, 2, 3, in[1]);  // here
  __syncthreads();
  out[threadIdx.x] = total.x + total.w;
}
