// A shared array whose size is a template's argument: N - threadIdx.x is N for thread 0.
// finds: out of bounds, kept[64], thread 0
// launch: <<<1, 64>>>(some(64), out(64))
template <int N>
__device__ float turned(const float *in) {
  __shared__ float kept[N];
  __shared__ float beside[N];
  kept[threadIdx.x] = in[threadIdx.x];
  beside[threadIdx.x] = 1;
  __syncthreads();
  return kept[N - threadIdx.x] + beside[threadIdx.x];  // here  // fix: return kept[N - 1 - threadIdx.x] + beside[threadIdx.x];
}
extern "C" __global__ void template_static(const float *in, float *out) {
  out[threadIdx.x] = turned<64>(in);
}
