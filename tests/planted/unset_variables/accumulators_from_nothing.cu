// One of four accumulators begins at no value.
// finds: uninitialised, out[0], thread 0
// launch: <<<1, 64>>>(some(64), out(64), int32(64))
extern "C" __global__ void accumulators_from_nothing(const float *in, float *out, int n) {
  float acc[4];
  for (int i = 1; i < 4; ++i) acc[i] = 0;  // fix: for (int i = 0; i < 4; ++i) acc[i] = 0;
  for (int i = 0; i < n; ++i) acc[i % 4] += in[i];
  out[threadIdx.x] = acc[threadIdx.x % 4];  // here
}
