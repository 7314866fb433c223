// The last float4 begins inside the array and ends outside.
// finds: out of bounds, in, thread 16
// launch: <<<1, 64>>>(some(66), zeros(17, float32), int32(66))
extern "C" __global__ void vector_over_the_end(const float *in, float *out, int n) {
  int i = threadIdx.x;
  if (4 * i < n) {  // fix: if (4 * i + 3 < n) {
    float4 v = ((const float4 *)in)[i];  // here
    out[i] = v.x + v.w;
  }
}
