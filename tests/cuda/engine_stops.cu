// Of tests/test_engine_stops.py.
#include <stdlib.h>
extern "C" __global__ void aborts(int *a) {
  if (threadIdx.x == 5) abort();  // aborts
  a[threadIdx.x] = 1;
}
extern "C" __global__ void exits(int *a) {
  if (blockIdx.x == 1) exit(a[0]);  // exits
}
extern "C" __global__ void exits_at_once(int *a) {
  _Exit(a[0]);  // exits_at_once
}
extern "C" __global__ void frees_an_argument(int *a) {
  free(a);  // frees_an_argument
}
extern "C" __global__ void frees_twice(int *a) {
  int *p = (int *)malloc(64);
  p[0] = a[0];
  free(p);
  a[1] = p != a;
  free(p);  // frees_twice
}
__device__ int *kept;
extern "C" __global__ void deletes_the_middle(int *a) {
  kept = new int[16];
  kept[3] = a[0];
  a[1] = kept[3];
  delete[] (kept + 1);  // deletes_the_middle
}
extern "C" __global__ void asserts(int *a) {
  assert(a[0] == 1);  // asserts
}
__device__ __noinline__ int deeper(int n, int *a) {
  volatile int local[16];
  local[n % 16] = n;
  __syncwarp();  // so that the stack also ends within the engine's own code
  return n < 0 ? 0 : deeper(n + 1, a) + local[a[0]];
}
extern "C" __global__ void recursion(int *a) { a[1] = deeper(a[0], a); }
extern "C" __global__ void endless(volatile int *a) {
  while (a[0] == 0) a[1]++;  // endless
}
extern "C" __global__ void endless_barriers(volatile int *a) {
  while (a[0] == 0)
    __syncthreads();  // endless_barriers
}
extern "C" __global__ void good(int *a) { a[threadIdx.x] = threadIdx.x; }
