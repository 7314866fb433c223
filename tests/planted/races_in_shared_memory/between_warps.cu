// __syncwarp orders lanes of one warp; the word comes from the other warp.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void between_warps(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  s[t] = in[t];  // here
  __syncwarp();  // fix: __syncthreads();
  out[t] = s[t ^ 32];  // there
}
