// A flag is set with no fence after the data that it announces.
// finds: race, box, thread 40
// launch: <<<1, 64>>>(some(4), out(1), out(1), zeros(1))
extern "C" __global__ void flag_between_threads(const float *in, float *box, float *out, int *flag) {
  if (threadIdx.x == 0) {
    box[0] = in[0];  // there
    // fix: __threadfence_block();
    atomicExch(flag, 1);
  }
  if (threadIdx.x == 40) {
    while (atomicAdd(flag, 0) == 0) __nanosleep(100);
    __threadfence_block();
    out[0] = box[0];  // here
  }
}
