// The next tile is loaded while slower threads still read the last one.
// finds: race, s
// launch: <<<1, 64>>>(some(192), out(64))
extern "C" __global__ void written_too_early(const float *in, float *out) {
  __shared__ float s[64];
  float sum = 0;
  for (int tile = 0; tile < 3; ++tile) {
    s[threadIdx.x] = in[tile * 64 + threadIdx.x];  // here
    __syncthreads();
    for (int i = 0; i < 64; ++i) sum += s[i];  // there
    // fix: __syncthreads();
  }
  out[threadIdx.x] = sum;
}
