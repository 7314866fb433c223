// The classic: <= in place of <.
// finds: out of bounds, out[100], block 1, thread 36
// launch: <<<2, 64>>>(some(64), out(100), int32(100))
extern "C" __global__ void one_too_many(const float *in, float *out, int n) {
  int i = blockIdx.x * 64 + threadIdx.x;
  if (i <= n) out[i] = in[i % 64];  // here  // fix: if (i < n) out[i] = in[i % 64];
}
