// An input that was allocated and never filled.
// finds: uninitialised, bias[0], thread 0
// launch: <<<1, 64>>>(some(64), empty(64), out(64))
extern "C" __global__ void an_input_of_nobody(const float *in, const float *bias, float *out) {
  out[threadIdx.x] = in[threadIdx.x] + bias[threadIdx.x];  // here  // fix: out[threadIdx.x] = in[threadIdx.x];
}
