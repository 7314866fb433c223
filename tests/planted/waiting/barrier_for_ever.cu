// The condition that ends the loop never changes.
// finds: endless loop
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void barrier_for_ever(const float *in, float *out) {
  __shared__ float left;
  if (threadIdx.x == 0) left = in[0];
  __syncthreads();
  while (left < 3) __syncthreads();  // here  // fix: while (left < 0) __syncthreads();
  out[threadIdx.x] = left;
}
