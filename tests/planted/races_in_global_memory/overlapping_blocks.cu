// Blocks step by 63 and have 64 threads, so neighbours write one element both.
// finds: race, out[63], block 1, thread 0
// launch: <<<3, 64>>>(some(192), zeros(192, float32))
extern "C" __global__ void overlapping_blocks(const float *in, float *out) {
  int i = blockIdx.x * 63 + threadIdx.x;  // fix: int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = in[i] + blockIdx.x;  // here // there
}
