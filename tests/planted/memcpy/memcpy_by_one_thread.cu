// One thread copies a tile that all read, with no barrier between.
// finds: race, dynamic shared memory, thread 1
// launch: <<<1, 64, 256>>>(some(64), out(64), int32(256))
extern "C" __global__ void memcpy_by_one_thread(const float *in, float *out, int bytes) {
  extern __shared__ float s[];
  if (threadIdx.x == 0) memcpy(s, in, bytes);  // there
  // fix: __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];  // here
}
