// A loop makes one turn more than its array has elements.
// finds: out of bounds, acc[4], thread 0
// launch: <<<1, 64>>>(some(72), out(64), int32(4))
extern "C" __global__ void one_accumulator_too_many(const float *in, float *out, int n) {
  float acc[4] = {};
  for (int i = 0; i <= n; ++i) acc[i] += in[threadIdx.x + i];  // here  // fix: for (int i = 0; i < n; ++i) acc[i] += in[threadIdx.x + i];
  out[threadIdx.x] = acc[0] + acc[1] + acc[2] + acc[3];
}
