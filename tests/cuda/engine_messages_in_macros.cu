// Of tests/test_engine_messages.py.
#define SHARED(T, name) extern __shared__ __align__(16) T name[]
#define SHARED_AS(T, name)  \
  extern __shared__         \
      unsigned char name##_raw[]; \
  T *name = (T *)name##_raw
extern "C" __global__ void reversed(float *a) {
  SHARED(float, s);
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
template <typename T>
__global__ void rotated(T *a) {
  SHARED_AS(T, s);
  s[threadIdx.x] = a[threadIdx.x];
  __syncthreads();
  a[threadIdx.x] = s[(threadIdx.x + 1) % blockDim.x];
}
