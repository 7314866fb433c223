// A write after bar.arrive is in no order with reads behind the barrier.
// finds: race
// launch: <<<1, 160>>>(zeros(128, float32))
extern "C" __global__ void written_after_the_arrival(float *out) {
  __shared__ float s[128];
  int t = threadIdx.x;
  if (t < 128) {
    s[t] = t;
    asm volatile("bar.arrive 1, 160;" ::: "memory");
    s[t] = 0;  // there  // fix:
  } else {
    asm volatile("bar.sync 1, 160;" ::: "memory");
    out[t - 128] = s[t - 128];  // here
  }
}
