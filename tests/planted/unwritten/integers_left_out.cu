// One integer of the output is not written.
// finds: never written, out[7]
// launch: <<<1, 64>>>(some(64, int32), empty(64, int32))
extern "C" __global__ void integers_left_out(const int *in, int *out) {
  if (in[threadIdx.x] != 7) out[threadIdx.x] = -1;  // fix: out[threadIdx.x] = -1;
}
