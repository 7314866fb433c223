// Half of the warp shuffles with the mask of the whole warp.
// finds: deadlock
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void half_a_shuffle(const float *in, float *out) {
  float x = in[threadIdx.x];
  if (threadIdx.x < 16) x += __shfl_xor_sync(0xffffffffu, x, 1);  // here  // fix: if (threadIdx.x < 16) x += __shfl_xor_sync(0x0000ffffu, x, 1);
  __syncthreads();  // there
  out[threadIdx.x] = x;
}
