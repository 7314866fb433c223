// The last thread writes behind the bytes that the launch gave.
// finds: out of bounds, dynamic shared memory[64], thread 63
// launch: <<<1, 64, 256>>>(some(64), out(64))
extern "C" __global__ void dynamic_shared(const float *in, float *out) {
  extern __shared__ float s[];
  s[threadIdx.x + 1] = in[threadIdx.x];  // here  // fix: s[(threadIdx.x + 1) % 64] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[1 + threadIdx.x / 2];
}
