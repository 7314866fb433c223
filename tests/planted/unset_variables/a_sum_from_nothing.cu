// A sum begins at no value.
// finds: uninitialised, out[0], thread 0
// launch: <<<1, 64>>>(some(64), out(64), int32(64))
extern "C" __global__ void a_sum_from_nothing(const float *in, float *out, int n) {
  float sum;  // fix: float sum = 0;
  for (int i = 0; i < n; ++i) sum += in[i];
  out[threadIdx.x] = sum;  // here
}
