// Lanes of one warp need __syncwarp between a write and another lane's read.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void no_syncwarp(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];  // here
  // fix: __syncwarp();
  out[t] = s[t ^ 1];  // there
}
