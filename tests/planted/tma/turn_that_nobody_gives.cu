// Two warpgroups take turns, and nobody begins.
// finds: deadlock
// launch: <<<1, 256>>>(out(256))
extern "C" __global__ void turn_that_nobody_gives(float *out) {
  int t = threadIdx.x, group = t / 128;
  // fix: if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
  for (int i = 0; i < 2; ++i) {
    if (group == 0) asm volatile("bar.sync 1, 256;" ::: "memory");  // here
    else asm volatile("bar.sync 2, 256;" ::: "memory");
    out[t] = i;
    if (group == 0) asm volatile("bar.arrive 2, 256;" ::: "memory");
    else asm volatile("bar.arrive 1, 256;" ::: "memory");
  }
}
