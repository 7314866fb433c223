// Sums in shared memory begin at no value.
// finds: uninitialised, dynamic shared memory[0], thread 0
// launch: <<<1, 64, 256>>>(some(256), out(64))
extern "C" __global__ void sum_in_shared(const float *in, float *out) {
  extern __shared__ float sums[];
  int t = threadIdx.x;
  // fix: sums[t] = 0;
  for (int i = 0; i < 4; ++i) sums[t] += in[i * 64 + t];  // here
  out[t] = sums[t];
}
