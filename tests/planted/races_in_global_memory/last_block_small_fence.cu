// The fence before the count reaches the block alone; the reader is another block.
// finds: race, part[0], block 3, thread 32
// launch: <<<4, 64>>>(some(256), out(4), out(1), zeros(1, uint32))
extern "C" __global__ void last_block_small_fence(const float *in, float *part, float *out, unsigned *count) {
  __shared__ float s[64];
  __shared__ bool last;
  int t = threadIdx.x;
  s[t] = in[blockIdx.x * 64 + t];
  __syncthreads();
  if (t == 0) {
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += s[i];
    part[blockIdx.x] = sum;  // there
    __threadfence_block();  // fix: __threadfence();
    last = atomicInc(count, gridDim.x) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 32) {
    float sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += part[b];  // here
    out[0] = sum;
    count[0] = 0;
  }
}
