// The reader polls a flag, and nothing keeps its read of the box behind that.
// finds: race, box
// launch: <<<2, 1>>>(zeros(1), out(1), out(1))
extern "C" __global__ void read_without_a_fence(int *flag, float *box, float *out) {
  if (blockIdx.x == 0) {
    box[0] = 1;  // there
    __threadfence();
    atomicExch(flag, 1);
  } else {
    while (atomicAdd(flag, 0) == 0) {}
    // fix: __threadfence();
    out[0] = box[0];  // here
  }
}
