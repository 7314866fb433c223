// A float4 must begin at a multiple of 16 bytes.
// finds: misaligned, in, thread 0
// launch: <<<1, 8>>>(some(64), out(8))
extern "C" __global__ void float4_at_one(const float *in, float *out) {
  float4 v = *(const float4 *)(in + 4 * threadIdx.x + 1);  // here  // fix: float4 v = *(const float4 *)(in + 4 * threadIdx.x + 0);
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
