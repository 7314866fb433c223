// A variable gets its value in one branch alone, and is used after both.
// finds: uninitialised, out[50], thread 50
// launch: <<<1, 64>>>(some(64), zeros(64, float32), int32(50))
extern "C" __global__ void set_in_one_branch(const float *in, float *out, int n) {
  float x;
  if (threadIdx.x < n) x = in[threadIdx.x];
  out[threadIdx.x] = 2 * x;  // here  // fix: if (threadIdx.x < n) out[threadIdx.x] = 2 * x;
}
