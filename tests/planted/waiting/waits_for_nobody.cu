// A thread waits for a flag that nobody sets.
// finds: endless loop
// launch: <<<1, 64>>>(zeros(1), out(64))
extern "C" __global__ void waits_for_nobody(volatile int *flag, float *out) {
  while (flag[0] == 0) __nanosleep(100);  // here  // fix: while (flag[0] == 1) __nanosleep(100);
  out[threadIdx.x] = 1;
}
