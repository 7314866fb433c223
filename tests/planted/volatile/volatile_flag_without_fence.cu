// A volatile flag with no fence between the data and the flag.
// finds: race, flag, thread 40
// launch: <<<1, 64>>>(zeros(1), out(1), out(1))
extern "C" __global__ void volatile_flag_without_fence(volatile int *flag, float *box, float *out) {
  if (threadIdx.x == 0) {
    box[0] = 3;
    // fix: __threadfence_block();
    flag[0] = 1;  // there
  }
  if (threadIdx.x == 40) {
    while (flag[0] == 0) __nanosleep(100);  // here
    out[0] = 1;
  }
}
