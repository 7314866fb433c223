// A barrier orders the threads of one block: the word is written by the block before.
// finds: race, out[63], block 1, thread 0
// launch: <<<2, 64>>>(some(128), out(128), out(128))
extern "C" __global__ void between_blocks(const float *in, float *out, float *sums) {
  int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = in[i];  // there
  __syncthreads();
  sums[i] = i > 0 ? out[i - 1] : 0;  // here  // fix: sums[i] = i > 0 ? in[i - 1] : 0;
}
