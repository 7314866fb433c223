// Halves of a warp wait for each other in different operations.
// finds: deadlock
// launch: <<<1, 32>>>(some(32), out(32))
extern "C" __global__ void two_operations(const float *in, float *out) {
  float x = in[threadIdx.x];
  if (threadIdx.x < 16)
    x += __shfl_xor_sync(0xffffffffu, x, 1);  // there  // fix: x += __shfl_xor_sync(0x0000ffffu, x, 1);
  else
    x += __ballot_sync(0xffffffffu, x > 3);  // here  // fix: x += __ballot_sync(0xffff0000u, x > 3);
  out[threadIdx.x] = x;
}
