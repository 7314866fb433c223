// A thread reads its neighbour's word before a barrier says that it has been written.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void read_too_early(const float *in, float *out) {
  __shared__ float s[64];
  s[threadIdx.x] = in[threadIdx.x];  // here
  // fix: __syncthreads();
  out[threadIdx.x] = s[(threadIdx.x + 1) % 64];  // there
}
