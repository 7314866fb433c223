// volatile writes, plain reads, no barrier.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void volatile_beside_plain(const float *in, float *out) {
  __shared__ float s[64];
  volatile float *v = s;
  v[threadIdx.x] = in[threadIdx.x];  // here
  // fix: __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];  // there
}
