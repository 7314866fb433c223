// An array of half2.
// finds: out of bounds
// launch: <<<1, 64>>>(out(64), int32(5))
#include <cuda_fp16.h>
extern "C" __global__ void of_half_pairs(float *out, int n) {
  half2 kept[4];
  for (int i = 0; i < n; ++i) kept[i] = __floats2half2_rn(i, i);  // here  // fix: for (int i = 0; i < n - 1; ++i) kept[i] = __floats2half2_rn(i, i);
  out[threadIdx.x] = __low2float(kept[0]);
}
