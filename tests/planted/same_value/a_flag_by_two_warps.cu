// Two warps set a flag to one value: a race whose result is certain.
// finds: same value, found[0], thread 32
// launch: <<<1, 64>>>(some(64), zeros(1))
extern "C" __global__ void a_flag_by_two_warps(const float *in, int *found) {
  if (in[threadIdx.x] > 30) found[0] = 1;  // here // there  // fix: if (in[threadIdx.x] > 31) found[0] = 1;
}
