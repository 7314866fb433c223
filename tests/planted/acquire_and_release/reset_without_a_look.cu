// A lock is reset by a block that has not seen the addition to it.
// finds: race, lock
// launch: <<<2, 1>>>(zeros(1))
#include "ptx.cuh"
extern "C" __global__ void reset_without_a_look(int *lock) {
  if (blockIdx.x == 0) add_release(lock);
  else {
    // fix: while (acquired(lock) == 0) {}
    lock[0] = 0;
  }
}
