// The index is in a macro.
// finds: out of bounds, acc[4]
// launch: <<<1, 64>>>(out(64), int32(3))
#define AT(array, i) array[(i) + 1]
extern "C" __global__ void by_a_macro(float *out, int n) {
  float acc[4] = {1, 2, 3, 4};
  out[threadIdx.x] = AT(acc, n);  // here  // fix: out[threadIdx.x] = AT(acc, n - 1);
}
