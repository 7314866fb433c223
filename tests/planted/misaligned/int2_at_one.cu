// An int2 must begin at a multiple of 8 bytes.
// finds: misaligned, in, thread 0
// launch: <<<1, 8>>>(some(64, int32), zeros(8))
extern "C" __global__ void int2_at_one(const int *in, int *out) {
  int2 v = *(const int2 *)(in + 2 * threadIdx.x + 1);  // here  // fix: int2 v = *(const int2 *)(in + 2 * threadIdx.x + 0);
  out[threadIdx.x] = v.x + v.y;
}
