// Exercise 00: your first kernel. Z = a X + Y, one element per thread.
//
// Launch   grid ceil(n / BLOCK), block BLOCK: there may be more threads than elements
// Shapes   X, Y, Z (n); float32

#ifndef BLOCK
#define BLOCK 128
#endif

extern "C" __global__ void __launch_bounds__(BLOCK)
    axpy(const float* X, const float* Y, float* Z, float a, int n) {
  // BEGIN hole: about 2 lines - which element is mine, and is there one? Then compute it
  // DEFAULT: const int i = threadIdx.x;
  // DEFAULT: Z[i] = a * X[i] + Y[i];
  const int i = blockIdx.x * BLOCK + threadIdx.x;
  if (i < n) Z[i] = a * X[i] + Y[i];
  // END hole
}
