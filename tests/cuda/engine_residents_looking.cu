// Of tests/test_engine_residents.py.
extern "C" __global__ void chain(volatile int *flag, int *out) {  // each block waits for the one that begins after it
  const int b = blockIdx.x, i = b * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0 && b + 1 < gridDim.x) {
    while (flag[b + 1] == 0);
    __threadfence();
  }
  __syncthreads();
  out[i] = (b + 1 < gridDim.x ? ((volatile int *)out)[i + blockDim.x] : 0) + 1;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) flag[b] = 1;
}
extern "C" __global__ void meet(int *count, const int *in, int *out) {  // a barrier of the grid, by hand
  const int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[i] = in[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(count, 1);
    while (atomicAdd(count, 0) < gridDim.x);
    __threadfence();
  }
  __syncthreads();
  out[n + i] = ((volatile int *)out)[n - 1 - i];
}
extern "C" __global__ void locked(int *lock, int *out) {
  for (int turn = 0; turn < 3; ++turn) {
    if (threadIdx.x % 32 == 0) {
      while (atomicCAS(lock, 0, 1) != 0);
      __threadfence();
      const int before = *(volatile int *)out;
      *(volatile int *)out = before + 1;
      __threadfence();
      atomicExch(lock, 0);
    }
  }
}
extern "C" __global__ void polite(volatile int *flag, int *out) {  // the block meets in barriers between its looks
  __shared__ int ready;
  for (;;) {
    if (threadIdx.x == 0) ready = blockIdx.x + 1 == gridDim.x ? 1 : flag[blockIdx.x + 1];
    __syncthreads();
    if (ready) break;
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) flag[blockIdx.x] = 1;
}
extern "C" __global__ void within(int *unused, int *out) {  // a warp waits for another one of its block
  __shared__ volatile int go;
  if (threadIdx.x == 0) go = 0;
  __syncthreads();
  if (threadIdx.x == 0)
    while (go == 0);
  if (threadIdx.x == 40) {
    __threadfence_block();
    go = 7;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x == 0 ? go : 7;
}
