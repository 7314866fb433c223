// The odd lanes exchange words without a sync of their group.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
extern "C" __global__ void coalesced_without_sync(const float *in, float *out) {
  __shared__ float s[64];
  int t = threadIdx.x;
  if (t % 2) {
    auto active = cooperative_groups::coalesced_threads();
    s[t] = in[t];  // here
    // fix: active.sync();
    out[t] = s[t ^ 2];  // there
  } else {
    out[t] = 0;
  }
}
