// A plain load beside atomic additions sees some of them.
// finds: race, total[0]
// launch: <<<1, 64>>>(some(64, int32), zeros(1), zeros(1))
extern "C" __global__ void atomic_and_plain(const int *in, int *total, int *out) {
  atomicAdd(total, in[threadIdx.x]);  // here
  // fix: __syncthreads();
  if (threadIdx.x == 0) out[0] = total[0];  // there
}
