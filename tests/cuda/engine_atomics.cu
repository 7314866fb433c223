// Of tests/test_engine_atomics.py.
#define AT (blockIdx.x * blockDim.x + threadIdx.x)

template <typename T>
__global__ void add(T *total, const T *in, T *before) { before[AT] = atomicAdd(total, in[AT]); }
template <typename T>
__global__ void subtract(T *total, const T *in, T *before) { before[AT] = atomicSub(total, in[AT]); }
template <typename T>
__global__ void smallest(T *total, const T *in, T *before) { before[AT] = atomicMin(total, in[AT]); }
template <typename T>
__global__ void largest(T *total, const T *in, T *before) { before[AT] = atomicMax(total, in[AT]); }
template <typename T>
__global__ void conjunction(T *total, const T *in, T *before) { before[AT] = atomicAnd(total, in[AT]); }
template <typename T>
__global__ void disjunction(T *total, const T *in, T *before) { before[AT] = atomicOr(total, in[AT]); }
template <typename T>
__global__ void exclusive(T *total, const T *in, T *before) { before[AT] = atomicXor(total, in[AT]); }
template <typename T>
__global__ void exchange(T *total, const T *in, T *before) { before[AT] = atomicExch(total, in[AT]); }

extern "C" __global__ void wrap(unsigned *total, unsigned limit, unsigned *before, int down) {
  before[AT] = down ? atomicDec(total, limit) : atomicInc(total, limit);
}
template <typename T>
__global__ void compare(T *total, T *before) {  // an increment, the hard way
  T old = *total, assumed;
  do {
    assumed = old;
    old = atomicCAS(total, assumed, assumed + 1);
  } while (assumed != old);
  before[AT] = old;
}
extern "C" __global__ void float_maximum(float *total, const float *in) {  // as kernels write it, by the bits
  float value = in[AT];
  if (value >= 0) atomicMax((int *)total, __float_as_int(value));
  else atomicMin((unsigned *)total, __float_as_uint(value));
}
extern "C" __global__ void histogram(const unsigned char *in, int n, int *bins) {
  __shared__ int own[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) own[i] = 0;
  __syncthreads();
  for (int i = AT; i < n; i += gridDim.x * blockDim.x) atomicAdd_block(&own[in[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], own[i]);
}
extern "C" __global__ void guarded(volatile int *value, int *lock) {  // one thread of a block at a time in a lock
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0, 1) != 0) __nanosleep(10);
    __threadfence();
    for (int i = 0; i < 10; ++i) value[i] = value[i] + 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}
__device__ unsigned done_blocks;
extern "C" __global__ void last_block_sums(const int *in, int *partial, int *out) {
  __shared__ bool last;
  __shared__ int sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, in[AT]);
  __syncthreads();
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;
    __threadfence();
    last = atomicInc(&done_blocks, gridDim.x - 1) == gridDim.x - 1;
    sum = 0;
  }
  __syncthreads();
  if (last) {
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) atomicAdd(&sum, ((volatile int *)partial)[i]);
    __syncthreads();
    if (threadIdx.x == 0) out[0] = sum;
  }
}
