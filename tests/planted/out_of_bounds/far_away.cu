// An index that is far outside of all arrays.
// finds: out of bounds, in[400000], thread 7
// launch: <<<1, 64>>>(some(64), out(64), int32(400_000))
extern "C" __global__ void far_away(const float *in, float *out, int far) {
  out[threadIdx.x] = threadIdx.x == 7 ? in[far] : 0;  // here  // fix: out[threadIdx.x] = threadIdx.x == 7 ? in[far % 64] : 0;
}
