// Half of the lanes that the mask names never come to the shuffle.
// finds: inactive lane, thread 16
// launch: <<<1, 32>>>(some(32), out(32))
extern "C" __global__ void lanes_that_went_around(const float *in, float *out) {
  float x = in[threadIdx.x];
  if (threadIdx.x < 16) x += __shfl_xor_sync(0xffffffffu, x, 1);  // here  // fix: if (threadIdx.x < 16) x += __shfl_xor_sync(0x0000ffffu, x, 1);
  out[threadIdx.x] = x;
}
