// A function fills an array of shared memory, and a local one, through a pointer.
// finds: out of bounds
// launch: <<<1, 64>>>(out(64), int32(5))
__device__ void fill(float *p, int n) {
  for (int i = 0; i < n; ++i) p[i] = i;  // here
}
extern "C" __global__ void by_a_functions_pointer(float *out, int n) {
  __shared__ float s[8];
  float kept[4];
  if (threadIdx.x == 0) fill(s, 8);
  fill(kept, n);  // fix: fill(kept, n - 1);
  __syncthreads();
  out[threadIdx.x] = kept[threadIdx.x % 4] + s[threadIdx.x % 8];
}
