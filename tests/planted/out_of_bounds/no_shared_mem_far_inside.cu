// The same, at an index that is far inside.
// finds: out of bounds, dynamic shared memory[20000], thread 0
// launch: <<<1, 64>>>(some(64), zeros(64, float32), int32(20_000))
extern "C" __global__ void no_shared_mem_far_inside(const float *in, float *out, int at) {
  extern __shared__ float s[];  // fix: float *s = out - at;
  s[at + threadIdx.x] = in[threadIdx.x];  // here
  out[threadIdx.x] = s[at + threadIdx.x];
}
