// A thread sets a counter to zero and counts itself at once; the other counts without a barrier in between.
// finds: race, count[0]
// launch: <<<1, 64>>>(zeros(1))
extern "C" __global__ void plain_write_before_an_atomic(int *out) {
  __shared__ int count[1];
  int t = threadIdx.x;
  if (t == 0) count[0] = 0;  // there
  // fix: __syncthreads();
  if (t % 32 == 0) atomicAdd(&count[0], 1);  // here
  __syncthreads();
  if (t == 0) out[0] = count[0];
}
