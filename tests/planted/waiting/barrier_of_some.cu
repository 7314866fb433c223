// Threads wait at two different barriers, as one stands in a branch.
// finds: barrier divergence
// launch: <<<1, 64>>>(some(64), out(64), int32(50))
extern "C" __global__ void barrier_of_some(const float *in, float *out, int n) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t < n) {
    s[t] = in[t];
    __syncthreads();  // there  // fix:
    out[t] = s[n - 1 - t];  // fix:
  }
  __syncthreads();  // here
  if (t >= n) out[t] = s[t - n];  // fix: out[t] = s[t % n];
}
