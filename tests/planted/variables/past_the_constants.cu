// A read behind a __constant__ array.
// finds: out of bounds, past_weights[4]
// launch: <<<1, 64>>>(some(72), out(64), int32(5))
__constant__ float past_weights[4] = {1, 2, 3, 4};
extern "C" __global__ void past_the_constants(const float *in, float *out, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += past_weights[i] * in[threadIdx.x + i];  // here  // fix: for (int i = 0; i < n - 1; ++i) sum += past_weights[i] * in[threadIdx.x + i];
  out[threadIdx.x] = sum;
}
