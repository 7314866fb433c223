// An index of -1 lands in the shared array before.
// finds: out of bounds, second[-1], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void before_a_shared_array(const float *in, float *out) {
  __shared__ float first[32][2];
  __shared__ float second[64];
  int t = threadIdx.x;
  first[t / 2][t % 2] = in[t];
  second[t] = 0;
  if (t == 0) second[t - 1] = 0;  // here  // fix:
  __syncthreads();
  out[t] = first[t / 2][t % 2] + second[63 - t];
}
