// Three warps meet at a barrier that counts four.
// finds: deadlock, block 0, thread 0
// launch: <<<1, 128>>>(out(128))
extern "C" __global__ void count_of_a_named_barrier(float *out) {
  if (threadIdx.x < 96) {
    asm volatile("bar.sync 3, 128;" ::: "memory");  // here  // fix: asm volatile("bar.sync 3, 96;" ::: "memory");
    out[threadIdx.x] = 1;
  } else {
    __syncwarp();
    out[threadIdx.x] = 2;
    asm volatile("bar.sync 4, 32;" ::: "memory");
  }
  __syncthreads();
}
