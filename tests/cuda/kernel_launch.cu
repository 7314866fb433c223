// Of tests/test_kernel_launch.py.
extern "C" __global__ void scale(const float *__restrict__ in, float *out, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = factor * in[i];
}
template <typename T, int TIMES>
__global__ void repeat(const T *in, T *out, const int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * T(TIMES);
}
extern "C" __global__ void __launch_bounds__(256) many(unsigned char a, const long long b, double c, bool d,
                                                       const void *e, float4 f, unsigned int *g, size_t h) {
  g[0] = a + (unsigned)b + (unsigned)c + d + (e == nullptr) + (unsigned)f.w + (unsigned)h;
}
extern "C" __global__ void dynamic(float *out, int n) {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = i;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = tile[n - 1 - i];
}
