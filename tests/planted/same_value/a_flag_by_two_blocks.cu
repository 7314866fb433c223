// Two blocks set a flag to one value: a race whose result is certain.
// finds: same value, found, block 1
// launch: <<<2, 64>>>(some(64), zeros(1))
extern "C" __global__ void a_flag_by_two_blocks(const float *in, int *found) {
  if (threadIdx.x == 0) found[0] = 1;  // here // there  // fix: if (threadIdx.x == 0) atomicExch(&found[0], 1);
}
