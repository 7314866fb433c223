// A shuffle of 16 lanes reads from a lane that is not in its mask.
// finds: inactive lane, thread 0
// launch: <<<1, 32>>>(some(32), out(32))
extern "C" __global__ void half_a_warp_reads_the_other(const float *in, float *out) {
  float x = in[threadIdx.x];
  if (threadIdx.x < 16) {
    x += __shfl_xor_sync(0x0000ffffu, x, 16);  // here  // fix: x += __shfl_xor_sync(0x0000ffffu, x, 8);
  }
  out[threadIdx.x] = x;
}
