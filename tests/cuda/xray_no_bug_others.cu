// Of tests/test_xray_no_bug.py.
#line 1 "others.cu"
extern "C" __global__ void branches(const float *even, const float *odd, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t % 2 == 0) {
    s[t] = even[t];
  } else {
    s[t] = odd[t];
    s[t] += 1;
  }
  __syncthreads();
  out[t] = s[t ^ 1];
}
extern "C" __global__ void trips(const float *in, float *out) {
  int t = threadIdx.x;
  float sum = 0;
  for (int i = 0; i <= t; ++i) {
    sum += in[i * 32 + t];
  }
  out[t] = sum;
}
extern "C" __global__ void leavers(const float *in, float *out, int n) {
  int t = threadIdx.x;
  if (t >= n) return;
  float x = in[t];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(__activemask(), x, 0);
  __syncwarp(__activemask());
  out[t] = x;
}
extern "C" __global__ void halves(const unsigned short *in, unsigned short *out) {
  __shared__ unsigned short s[64];
  s[63 - threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
template <int N>
__global__ void turned(const float *in, float *out) {
  __shared__ float s[N];
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[N - 1 - threadIdx.x];
}
extern "C" __global__ void tile_of(const float *in, float *out, int n) {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = in[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = tile[n - 1 - i];
}
extern "C" __global__ void same_value(const float *in, float *out) {
  __shared__ float sums[2];
  float x = in[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  sums[threadIdx.x / 32] = x;  // all lanes of the warp write what all have
  __syncthreads();
  out[threadIdx.x] = sums[0] + sums[1];
}
extern "C" __global__ void own_value(const float *in, float *out) {
  __shared__ float sums[2];
  sums[threadIdx.x / 32] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = sums[0] + sums[1];
}
extern "C" __global__ void guess(unsigned *sum) {
  unsigned old = *sum, assumed;
  do {
    assumed = old;
    old = atomicCAS(sum, assumed, assumed + 1);
  } while (old != assumed);
}
extern "C" __global__ void no_guess(unsigned *sum, unsigned *out) {
  atomicAdd(sum, 1);
  out[blockIdx.x * blockDim.x + threadIdx.x] = *sum;
}
struct alignas(16) Packed {
  Packed() = default;
  __device__ explicit Packed(int4 bits) { memcpy(&x, &bits, sizeof bits); }
  float x[4];
};
__device__ Packed load(const float *from) { return Packed{*reinterpret_cast<const int4 *>(from)}; }
extern "C" __global__ void packed(const float *in, float *out) {
  extern __shared__ char bytes[];
  Packed *s = reinterpret_cast<Packed *>(bytes);
  s[threadIdx.x] = load(in + 4 * threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1].x[0];
}
__shared__ float4 of_the_module[64];
extern "C" __global__ void late(const float *in, float *out, int n) {
  float x = in[threadIdx.x];
  if (threadIdx.x % 2) x += in[threadIdx.x + 64];
  of_the_module[threadIdx.x] = make_float4(x, x, x, x);
  __syncthreads();
  if (threadIdx.x >= 32)
    for (int i = 0; i < n; ++i) x += of_the_module[threadIdx.x ^ i].x;
  __syncthreads();
  out[threadIdx.x] = x;
}
extern "C" __global__ void neighbour(float *a) {
  a[threadIdx.x + 1] += 1;
}
