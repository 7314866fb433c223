// Of tests/test_engine_errors.py.
extern "C" __global__ void write_wild(float *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i == 70) a[i * n] = 1;  // write_wild
}
extern "C" __global__ void read_wild(const float *a, float *b, int at) {
  if (threadIdx.y == 1 && threadIdx.x == 2)
    b[0] = a[at];  // read_wild
}
extern "C" __global__ void absolute(float *a, size_t address) {
  a = (float *)address;
  a[0] = 1;  // absolute
}
extern "C" __global__ void write_one(float *a, int at) { a[at] = 1; }
__device__ float load(const float *p) {
  return *p;  // load
}
extern "C" __global__ void through_function(const float *a, float *b, int at) {
  b[0] = load(a + at);
}
extern "C" __global__ void through_intrinsic(const float *a, float *b, int at) {
  if (b) b[1] = 0;
  b[0] = __ldg(&a[at]);  // through_intrinsic
}
extern "C" __global__ void through_atomic(int *a, int at) {
  a[0] = 1;
  atomicAdd(&a[at], 1);  // through_atomic
}
extern "C" __global__ void through_library(unsigned char *a, int n) {
  a[0] = 3;
  memset(a, 7, n);  // through_library
}
extern "C" __global__ void through_printf(int n) {
  printf("%s\n", (const char *)(size_t)n);  // through_printf
}
extern "C" __global__ void misaligned(float *a, int at) {
  *(float4 *)(a + at) = make_float4(1, 2, 3, 4);  // misaligned
}
extern "C" __global__ void past_static(float *out, int at) {
  __shared__ float tile[64];
  tile[threadIdx.x] = 1;
  __syncthreads();
  tile[at + threadIdx.x] = 2;  // past_static
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}
extern "C" __global__ void past_dynamic(float *out, int at) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = tile[at];  // past_dynamic
}
__device__ __noinline__ int deep(int n, volatile int *out) {
  volatile int local[64];
  for (int i = 0; i < 64; ++i) local[i] = n + out[0];
  return n ? deep(n - 1, out) + local[n % 64] : 0;  // deep
}
extern "C" __global__ void overflow(int *out, int n) { out[0] = deep(n, out); }
extern "C" __global__ void large_local(int *out, int n) {
  volatile int local[200000];  // 800 KB
  for (int i = 0; i < n; ++i) local[i] = i;
  out[0] = local[n / 2];
}
extern "C" __global__ void divide(int *a, int b) {
  a[0] = a[1] / b;  // divide
}
extern "C" __global__ void two_barriers(float *a) {
  if (threadIdx.x < 40) {
    a[0] = 1;
    __syncthreads();  // first barrier
  } else {
    a[1] = 1;
    __syncthreads();  // second barrier
  }
}
extern "C" __global__ void one_sided(int *a) {
  if (threadIdx.x < 16) a[threadIdx.x] = __shfl_sync(0xffffffff, a[threadIdx.x], 3);  // one_sided
  else __syncthreads();
}
extern "C" __global__ void not_named(int *a) {
  a[threadIdx.x] = __shfl_sync(0x0000ffff, a[threadIdx.x], 3);  // not_named
}
extern "C" __global__ void different(int *a) {
  if (threadIdx.x % 2) {
    a[0] = __shfl_sync(0xffffffff, a[0], 3);  // different shuffle
  } else {
    a[1] = __ballot_sync(0xffffffff, a[1]);  // different ballot
  }
}
extern "C" __global__ void other_mask(int *a) {
  a[0] = __any_sync(threadIdx.x < 8 ? 0xff : 0xffffffff, 1);  // other_mask
  __syncthreads();
}
extern "C" __global__ void asserting(const int *a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  assert(i < n && a[i] >= 0);  // asserting
}
extern "C" __global__ void trapping(int n) {
  if (blockIdx.x == n) __trap();  // trapping
}
extern "C" __global__ void each_block_fails(float *a, int first) {
  if (blockIdx.x >= first && threadIdx.x == 5) a[64 + blockIdx.x] = 0;
}
extern "C" __global__ void good(float *a) { a[threadIdx.x] = threadIdx.x; }
extern "C" __global__ void prints_then_fails(int *a) {
  printf("before\n");
  assert(a == nullptr);
}
