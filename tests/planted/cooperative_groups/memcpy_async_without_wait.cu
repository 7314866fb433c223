// memcpy_async returns before the copy has arrived.
// finds: race, s
// launch: <<<1, 64>>>(some(64), out(64))
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
extern "C" __global__ void memcpy_async_without_wait(const float *in, float *out) {
  __shared__ float s[64];
  auto block = cooperative_groups::this_thread_block();
  cooperative_groups::memcpy_async(block, s, in, sizeof(float) * 64);  // here
  // fix: cooperative_groups::wait(block);
  out[threadIdx.x] = s[63 - threadIdx.x];  // there
}
