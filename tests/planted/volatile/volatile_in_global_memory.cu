// volatile in place of a barrier, in global memory.
// finds: race, a
// launch: <<<1, 64>>>(zeros(64, float32), out(64))
extern "C" __global__ void volatile_in_global_memory(volatile float *a, float *out) {
  int t = threadIdx.x;
  a[t] = 2 * t;  // here
  // fix: __syncwarp();
  out[t] = a[t ^ 1];  // there
}
