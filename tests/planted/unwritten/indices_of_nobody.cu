// Indices that were allocated and never filled.
// finds: uninitialised, indices[0], thread 0
// launch: <<<1, 64>>>(some(64), empty(64, int32), out(64))
extern "C" __global__ void indices_of_nobody(const float *in, const int *indices, float *out) {
  out[threadIdx.x] = in[indices[threadIdx.x] & 63];  // here  // fix: out[threadIdx.x] = in[threadIdx.x & 63];
}
