// Odd lanes take the value of lane 0, which does not take part.
// finds: inactive lane, thread 1
// launch: <<<1, 64>>>(some(64, int32), zeros(64))
extern "C" __global__ void broadcast_from_an_inactive_lane(const int *in, int *out) {
  int x = in[threadIdx.x];
  if (threadIdx.x % 2) x = __shfl_sync(0xaaaaaaaau, x, 0);  // here  // fix: if (threadIdx.x % 2) x = __shfl_sync(0xaaaaaaaau, x, 1);
  out[threadIdx.x] = x;
}
