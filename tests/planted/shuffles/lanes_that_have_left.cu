// A lane reads from a lane that has returned.
// finds: inactive lane, thread 19
// launch: <<<1, 32>>>(some(32), out(20), int32(20))
extern "C" __global__ void lanes_that_have_left(const float *in, float *out, int n) {
  if (threadIdx.x >= n) return;
  float x = in[threadIdx.x];
  out[threadIdx.x] = x + __shfl_down_sync(0xffffffffu, x, 1);  // here  // fix: out[threadIdx.x] = x + __shfl_up_sync(0xffffffffu, x, 1);
}
