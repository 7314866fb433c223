// The last four elements are left out.
// finds: never written, out[124]
// launch: <<<2, 64>>>(some(128), out(128), int32(128))
extern "C" __global__ void grid_too_small(const float *in, float *out, int n) {
  int i = blockIdx.x * 64 + threadIdx.x;
  if (i < n - 4) out[i] = in[i];  // fix: if (i < n) out[i] = in[i];
}
