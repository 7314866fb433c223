// The load acquires what the block's own threads released, and the box is another block's.
// finds: race, box
// launch: <<<2, 1>>>(zeros(1), out(1), out(1))
__device__ int acquired_in_block(const int *p) {
  int v;
  asm volatile("ld.acquire.cta.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
extern "C" __global__ void acquired_for_the_block_alone(int *flag, float *box, float *out) {
  if (blockIdx.x == 0) {
    box[0] = 1;  // there
    __threadfence();
    atomicExch(flag, 1);
  } else {
    while (acquired_in_block(flag) == 0) {}
    // fix: __threadfence();
    out[0] = box[0];  // here
  }
}
