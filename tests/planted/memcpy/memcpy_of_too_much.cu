// memcpy of one word more than fits.
// finds: out of bounds, dynamic shared memory[64], thread 0
// launch: <<<1, 64, 256>>>(some(65), out(64), int32(256))
extern "C" __global__ void memcpy_of_too_much(const float *in, float *out, int bytes) {
  extern __shared__ float s[];
  if (threadIdx.x == 0) memcpy(s, in, bytes + 4);  // here  // fix: if (threadIdx.x == 0) memcpy(s, in, bytes);
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
