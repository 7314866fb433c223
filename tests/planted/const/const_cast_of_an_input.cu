// A kernel writes to an input that it takes as const.
// finds: write to const, in[0], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void const_cast_of_an_input(const float *in, float *out) {
  out[threadIdx.x] = in[threadIdx.x];
  const_cast<float *>(in)[threadIdx.x] = 0;  // here  // fix:
}
