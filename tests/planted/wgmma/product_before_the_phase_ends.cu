// A product starts before the load of its tile has arrived.
// finds: not waited for
// launch: <<<1, 128, 16384>>>(map_of(halves(256, 64), (64, 64)), out(128))
#include "hopper.cuh"
extern "C" __global__ void product_before_the_phase_ends(MAP in, float *out) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) init(&full, 1), init(&empty, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&full, 8192), load(s, in, &full, 0, 0);  // there
  float d[4] = {};
  // fix: wait(&full, 0);
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // here
  wg_commit();
  wait(&full, 0);
  wg_wait<0>();
  hold(d);
  out[t] = d[0];
}
