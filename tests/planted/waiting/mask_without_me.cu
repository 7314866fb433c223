// Lanes 16 to 31 shuffle with a mask in which they are not.
// finds: deadlock, thread 16
// launch: <<<1, 32>>>(some(32), out(32))
extern "C" __global__ void mask_without_me(const float *in, float *out) {
  float x = in[threadIdx.x];
  x += __shfl_xor_sync(0x0000ffffu, x, 1);  // here  // fix: x += __shfl_xor_sync(0xffffffffu, x, 1);
  out[threadIdx.x] = x;
}
