// Each half of the warp synchronizes by itself, then reads words of the other half.
// finds: race, s
// launch: <<<1, 32>>>(some(32), out(32))
extern "C" __global__ void half_a_syncwarp(const float *in, float *out) {
  __shared__ float s[32];
  int t = threadIdx.x;
  s[t] = in[t];  // here
  if (t < 16) __syncwarp(0x0000ffffu);
  else __syncwarp(0xffff0000u);
  // fix: __syncwarp();
  out[t] = s[t ^ 16];  // there
}
