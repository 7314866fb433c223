// An atomic addition to an input that the kernel takes as const.
// finds: write to const, in[0]
// launch: <<<1, 64>>>(some(64, int32), zeros(64))
extern "C" __global__ void atomic_on_const(const int *in, int *out) {
  atomicAdd((int *)&in[0], 1);  // here  // fix:
  out[threadIdx.x] = 1;  // fix: atomicAdd(&out[threadIdx.x], 1);
}
