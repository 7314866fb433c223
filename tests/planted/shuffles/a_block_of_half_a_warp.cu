// A block of 16 threads shuffles as if it had 32.
// finds: inactive lane
// launch: <<<1, 16>>>(some(16), out(1))
extern "C" __global__ void a_block_of_half_a_warp(const float *in, float *out) {
  float x = in[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);  // here  // fix: for (int step = 8; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step, 16);
  if (threadIdx.x == 0) out[0] = x;
}
