// The last words of a thread's array are left out, and their weights are 0: 0 * NaN is NaN.
// finds: uninitialised, out[0]
// launch: <<<1, 32>>>(some(64), out(32), int32(3))
extern "C" __global__ void times_zero(const float *in, float *out, int n) {
  float v[4], sum = 0;
  for (int i = 0; i < 4; ++i) {
    if (i < n) v[i] = in[threadIdx.x + i];  // fix: v[i] = i < n ? in[threadIdx.x + i] : 0.0f;
  }
  for (int i = 0; i < 4; ++i) sum += (i < n ? in[i] : 0.0f) * v[i];
  out[threadIdx.x] = sum;  // here
}
