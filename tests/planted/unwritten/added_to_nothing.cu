// += on an output that nobody has written.
// finds: uninitialised, out[0], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void added_to_nothing(const float *in, float *out) {
  out[threadIdx.x] += in[threadIdx.x];  // here  // fix: out[threadIdx.x] = in[threadIdx.x];
}
