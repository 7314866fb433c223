// One of the halves is added to before it is written.
// finds: uninitialised, out[5], thread 5
// launch: <<<1, 64>>>(some(64), out(64, float16))
#include <cuda_fp16.h>
extern "C" __global__ void added_to_nothing_in_half(const float *in, __half *out) {
  int t = threadIdx.x;
  if (t != 5) out[t] = __float2half(in[t]);  // fix: out[t] = __float2half(in[t]);
  out[t] = __hadd(out[t], __float2half(1));  // here
}
