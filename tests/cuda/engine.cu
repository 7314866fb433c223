// Of tests/test_engine.py.
#include <cuda/std/cstdint>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

// ---------------------------------------------------------------- indices
extern "C" __global__ void indices(int *out, int n) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int at = block * blockDim.x * blockDim.y * blockDim.z + thread;
  dim3 b = blockIdx, t(threadIdx);
  uint3 sizes = blockDim;
  int row[13] = {(int)t.x, (int)t.y, (int)t.z, (int)b.x, (int)b.y, (int)b.z, (int)sizes.x, (int)sizes.y, (int)sizes.z,
                 (int)gridDim.x, (int)gridDim.y, (int)gridDim.z, warpSize};
  for (int k = 0; k < 13; ++k) out[k * n + at] = row[k];
}

// ---------------------------------------------------------------- shared memory
#define TILE 64
__shared__ int of_file[TILE];
extern __shared__ __align__(16) unsigned char dynamic_of_file[];

extern "C" __global__ void shared_function(const int *in, int *out) {
  __shared__ int tile[TILE];
  int at = blockIdx.x * TILE + threadIdx.x;
  tile[threadIdx.x] = in[at];
  __syncthreads();
  out[at] = tile[TILE - 1 - threadIdx.x];
}
extern "C" __global__ void shared_file(const int *in, int *out) {
  int at = blockIdx.x * TILE + threadIdx.x;
  of_file[threadIdx.x] = in[at];
  __syncthreads();
  out[at] = of_file[TILE - 1 - threadIdx.x];
}
extern "C" __global__ void shared_dynamic(const int *in, int *out) {
  extern __shared__ int tile[];
  int at = blockIdx.x * TILE + threadIdx.x;
  tile[threadIdx.x] = in[at];
  __syncthreads();
  out[at] = tile[TILE - 1 - threadIdx.x];
}
__device__ int from_dynamic(int at) { return ((int *)dynamic_of_file)[at]; }
__device__ int own(const int *dynamic_of_file) { return dynamic_of_file[0]; }  // a parameter of the same name
extern "C" __global__ void shared_dynamic_file(const int *in, int *out) {
  int at = blockIdx.x * TILE + threadIdx.x;
  ((int *)dynamic_of_file)[threadIdx.x] = own(in + at);
  __syncthreads();
  out[at] = from_dynamic(TILE - 1 - threadIdx.x);
}
extern "C" __global__ void shared_rows(const int *in, int *out) {
  extern int __shared__ rows[][8];  // another name: a file's dynamic arrays of one name have one type
  int at = blockIdx.x * TILE + threadIdx.x;
  rows[threadIdx.x / 8][threadIdx.x % 8] = in[at];
  __syncthreads();
  out[at] = rows[7 - threadIdx.x / 8][7 - threadIdx.x % 8];
}
extern "C" __global__ void shared_volatile(const int *in, int *out) {
  static __shared__ volatile int tile[TILE];
  int at = blockIdx.x * TILE + threadIdx.x;
  tile[threadIdx.x] = in[at];
  __syncthreads();
  out[at] = tile[TILE - 1 - threadIdx.x];
}
template <typename T>
__global__ void shared_template(const T *in, T *out) {
  __shared__ T tile[TILE];
  int at = blockIdx.x * TILE + threadIdx.x;
  tile[threadIdx.x] = in[at];
  __syncthreads();
  out[at] = tile[TILE - 1 - threadIdx.x];
}
template <typename T>
struct Memory {  // an array for each type, as NVIDIA's samples write it
  __device__ operator T *() {
    extern __shared__ int of_samples[];
    return (T *)of_samples;
  }
};
template <typename T>
__global__ void shared_samples(const T *in, T *out) {
  T *tile = Memory<T>();
  int at = blockIdx.x * TILE + threadIdx.x;
  tile[threadIdx.x] = in[at];
  __syncthreads();
  out[at] = tile[TILE - 1 - threadIdx.x];
}
extern "C" __global__ void alignments(int *out) {
  __shared__ char one[3];
  __shared__ __align__(16) char sixteen[5];
  __shared__ alignas(128) char many[7];
  __shared__ float4 vector;
  __shared__ double real;
  extern __shared__ float4 dynamic[];
  one[0] = sixteen[0] = many[0] = 0;
  vector.x = 0, real = 0, dynamic[0].x = 0;
  out[0] = (size_t)sixteen % 16, out[1] = (size_t)many % 128, out[2] = (size_t)&vector % 16;
  out[3] = (size_t)&real % 8, out[4] = (size_t)dynamic % 16, out[5] = one[0];
}
extern "C" __global__ void transpose(const float *in, float *out, int width, int height) {
  __shared__ float tile[16][16 + 1];
  int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
  if (x < width && y < height) tile[threadIdx.y][threadIdx.x] = in[y * width + x];
  __syncthreads();
  x = blockIdx.y * 16 + threadIdx.x, y = blockIdx.x * 16 + threadIdx.y;
  if (x < height && y < width) out[y * height + x] = tile[threadIdx.x][threadIdx.y];
}
extern "C" __global__ void scan(const int *in, int *out) {  // Hillis and Steele: two barriers a step
  __shared__ int sums[1024];
  int t = threadIdx.x;
  sums[t] = in[t];
  __syncthreads();
  for (int step = 1; step < blockDim.x; step *= 2) {
    int add = t >= step ? sums[t - step] : 0;
    __syncthreads();
    sums[t] += add;
    __syncthreads();
  }
  out[t] = sums[t];
}

// ---------------------------------------------------------------- variables of the module
__constant__ float weights[16];
__constant__ int presets[4] = {5, 6, 7, 8};
__device__ int counter;
__device__ double table[3] = {0.5, 1.5, 2.5};
extern "C" __global__ void variables(float *out, int *counts) {
  out[threadIdx.x] = weights[threadIdx.x] * presets[threadIdx.x % 4] + (float)table[threadIdx.x % 3];
  if (threadIdx.x == 0) counts[0] = ++counter;
}

// ---------------------------------------------------------------- functions, types, templates
__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
__device__ __forceinline__ int twice(int x) { return 2 * x; }
__host__ __device__ constexpr int cube(int x) { return x * x * x; }
struct Point {
  float x, y;
  __device__ Point operator+(const Point &other) const { return {x + other.x, y + other.y}; }
  __device__ float dot(Point other) const { return x * other.x + y * other.y; }
};
template <typename F>
__device__ int apply(F f, int x) { return f(x); }
extern "C" __global__ void __launch_bounds__(64) functions(const int *__restrict__ in, int *__restrict__ out) {
  int x = in[threadIdx.x], local[cube(2)];
#pragma unroll
  for (int i = 0; i < 8; ++i) local[i] = x + i;
  int (*chosen)(int) = x % 2 ? fibonacci : +[](int v) -> int { return -v; };
  Point p = Point{1.0f * x, 2} + Point{3, 4};
  out[threadIdx.x] = apply([=](int v) { return v + local[x % 8]; }, twice(x)) + chosen(x % 12) + (int)p.dot({1, 1});
}
namespace deep {
template <typename T, int SCALE = 3>
__global__ __launch_bounds__(128, 2) void scaled(const T *in, T *out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * T(SCALE);
}
}  // namespace deep
__global__ void plain_cpp(int *out) { out[threadIdx.x] = 7; }
#ifdef NEVER
extern "C" __global__ void left_out(int *out) { this is not C++; }
#endif

// ---------------------------------------------------------------- parameters
struct Options { int width; float scale; double offset; };
extern "C" __global__ void scalars(double *out, bool a, signed char b, unsigned char c, short d, unsigned short e,
                                   int f, unsigned g, long long h, unsigned long long i, float j, double k, half l,
                                   __nv_bfloat16 m, size_t n, int8_t o, uint16_t p, Options q, float4 r, half2 s) {
  double row[] = {(double)a, (double)b, (double)c, (double)d, (double)e, (double)f, (double)g, (double)h, (double)i,
                  (double)j, k, (double)__half2float(l), (double)__bfloat162float(m), (double)n, (double)o, (double)p,
                  (double)q.width, (double)q.scale, q.offset, (double)r.x, (double)r.w, (double)__low2float(s),
                  (double)__high2float(s)};
  for (int z = 0; z < 23; ++z) out[z] = row[z];
}
extern "C" __global__ void nulls(const float *a, void *b, int *out) { out[0] = (a == nullptr) + 2 * (b == NULL); }
extern "C" __global__ void no_parameters() {}
extern "C" __global__ void increment(int *a, int n) { if (threadIdx.x < n) a[threadIdx.x] += 100; }
extern "C" __global__ void neighbours(const int *a, int *b, int n) {
  if (threadIdx.x < n) b[threadIdx.x] += a[threadIdx.x];
}

// ---------------------------------------------------------------- barriers
extern "C" __global__ void barriers(const int *in, int *out) {
  int t = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x, value = in[t];
  out[t] = __syncthreads_count(value > 3);
  out[n + t] = __syncthreads_and(value > 0);
  out[2 * n + t] = __syncthreads_or(value > 8);
  out[3 * n + t] = __syncthreads_count(value);
}
extern "C" __global__ void in_device_function(int *out) {
  __shared__ int turn;
  if (threadIdx.x == 0) turn = 0;
  for (int i = 0; i < blockDim.x; ++i) {
    __syncthreads();
    if (threadIdx.x == i) out[i] = turn++;
    __threadfence_block();
    __syncthreads();
  }
}

// ---------------------------------------------------------------- time, waiting
extern "C" __global__ void clocks(long long *out) {
  long long before = clock64();
  volatile int sum = 0;
  for (int i = 0; i < 10000; ++i) sum += i;
  out[0] = clock64() - before;
  out[1] = clock() != 0;
}
extern "C" __global__ void hand_over(volatile int *flag, int *out) {  // later threads wait for earlier warps' threads
  int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    while (*flag != blockDim.x / 32 - 1 - warp) __nanosleep(20);
    out[warp] = *flag;
    __threadfence();
    *flag = *flag + 1;
  }
}
