// volatile in place of a barrier between warps.
// finds: race, s
// launch: <<<1, 64>>>(some(64, int32), zeros(64))
extern "C" __global__ void volatile_between_warps(const int *in, int *out) {
  volatile __shared__ int s[64];
  s[threadIdx.x] = in[threadIdx.x];  // here
  // fix: __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];  // there
}
