// One shared array ends where the next begins: the read stays in shared memory, in the wrong array.
// finds: out of bounds, first[64], thread 63
// launch: <<<1, 64>>>(some(64), out(64))
extern "C" __global__ void into_the_next_array(const float *in, float *out) {
  __shared__ float first[64];
  __shared__ float second[64];
  int t = threadIdx.x;
  first[t] = in[t];
  second[t] = 0;
  __syncthreads();
  out[t] = first[t + 1] + second[t];  // here  // fix: out[t] = first[t] + second[t];
}
