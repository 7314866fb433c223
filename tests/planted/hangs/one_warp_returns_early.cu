// The last warp has no row and returns, and the mbarrier counts on all four.
// finds: deadlock, block 0, thread 0
// launch: <<<1, 128>>>(some(100), out(100))
#include "hopper.cuh"
extern "C" __global__ void one_warp_returns_early(const float *in, float *out) {
  __shared__ unsigned long long loaded;
  __shared__ float row[96];
  int t = threadIdx.x;
  if (t == 0) init(&loaded, 128), init_fence();
  __syncthreads();
  if (t >= 96) return;  // fix: if (t >= 96) { arrive(&loaded); return; }
  row[t] = in[t];
  arrive(&loaded);
  wait(&loaded, 0);  // here
  out[t] = row[95 - t];
  if (t < 4) out[96 + t] = 0;
}
