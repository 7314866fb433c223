// A loop whose step is 0.
// finds: endless loop
// launch: <<<1, 64>>>(some(64), out(64), int32(0))
extern "C" __global__ void no_step(const float *in, float *out, int step) {
  float sum = 0;
  for (int i = 0; i < 64; i += step) sum += in[i];  // here  // fix: for (int i = 0; i < 64; i += step + 1) sum += in[i];
  out[threadIdx.x] = sum;
}
