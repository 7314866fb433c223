// The reset is not published by a fence, so a later addition may come before it.
// finds: race, lock[0]
// launch: <<<3, 1>>>(zeros(2))
#include "ptx.cuh"
extern "C" __global__ void reset_that_nobody_is_told_of(int *lock) {
  if (blockIdx.x == 0) {
    while (acquired(lock) < 1) {}
    lock[0] = 0;
    // fix: __threadfence();
    atomicExch(lock + 1, 1);
  } else {
    if (blockIdx.x == 2) while (acquired(lock + 1) == 0) {}
    add_release(lock);
  }
}
