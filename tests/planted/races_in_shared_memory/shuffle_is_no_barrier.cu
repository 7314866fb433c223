// A shuffle exchanges registers and orders nothing in shared memory.
// finds: race, s
// launch: <<<1, 32>>>(some(32), out(32))
extern "C" __global__ void shuffle_is_no_barrier(const float *in, float *out) {
  __shared__ float s[32];
  int t = threadIdx.x;
  s[t] = in[t];  // there
  float other = __shfl_xor_sync(0xffffffffu, in[t], 16);
  // fix: __syncwarp();
  out[t] = other + s[t ^ 16];  // here
}
