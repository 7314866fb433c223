// An array of 63 halves is written by 64 threads.
// finds: out of bounds, a[63], thread 63
// launch: <<<1, 64>>>(out(63, float16))
#include <cuda_fp16.h>
extern "C" __global__ void halves(__half *a) {
  int i = threadIdx.x;
  a[i] = __float2half(2.0f);  // here  // fix: if (i < 63) a[i] = __float2half(2.0f);
}
