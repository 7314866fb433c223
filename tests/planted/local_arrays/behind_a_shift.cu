// Brackets within brackets, and << and >> that are no brackets of a template.
// finds: out of bounds, bits[4]
// launch: <<<1, 64>>>(out(64), int32(3))
extern "C" __global__ void behind_a_shift(float *out, int n) {
  const int bits[4] = {1, 2, 3, 4};
  out[threadIdx.x] = (float)((1 << n) >> 1) + bits[bits[n << 1 >> 1] - (n >> 4)];  // here  // fix: out[threadIdx.x] = (float)((1 << n) >> 1) + bits[bits[n - 1 << 1 >> 1] - (n >> 4)];
}
