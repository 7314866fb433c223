// The consumer arrives at the barrier of the empty stage before it has read the stage.
// finds: race
// launch: <<<1, 64>>>(out(128))
extern "C" __global__ void released_before_it_is_read(float *out) {
  __shared__ float s[32];
  int t = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x < 32) {
      if (i > 0) asm volatile("bar.sync 2, 64;" ::: "memory");
      s[t] = i + t;  // there
      asm volatile("bar.arrive 1, 64;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 64;" ::: "memory");
      if (i < 3) asm volatile("bar.arrive 2, 64;" ::: "memory");  // fix:
      out[i * 32 + t] = s[31 - t];  // here
      // fix: if (i < 3) asm volatile("bar.arrive 2, 64;" ::: "memory");
    }
  }
}
