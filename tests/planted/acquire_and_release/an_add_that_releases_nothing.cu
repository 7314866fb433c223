// A relaxed addition does not publish what was written before it.
// finds: race, box
// launch: <<<2, 1>>>(zeros(1), out(1), out(1))
#include "ptx.cuh"
extern "C" __global__ void an_add_that_releases_nothing(int *lock, float *box, float *out) {
  if (blockIdx.x == 0) {
    box[0] = 1;  // there
    add_relaxed(lock);  // fix: add_release(lock);
  } else {
    while (acquired(lock) == 0) {}
    out[0] = box[0];  // here
    lock[0] = 0;
  }
}
