// Blocks wait for a flag of the last one, which begins when another one has ended.
// finds: endless loop
// launch: <<<2000, 1024>>>(zeros(1), out(2000))
extern "C" __global__ void waits_for_a_block_without_room(int *flag, float *out) {
  if (threadIdx.x == 0) {
    if (blockIdx.x == gridDim.x - 1) atomicExch(flag, 1);
    while (atomicAdd(flag, 0) == 0) __nanosleep(100);  // here  // fix:
    out[blockIdx.x] = 1;
  }
}
