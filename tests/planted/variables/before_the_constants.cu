// A read before a __constant__ array.
// finds: out of bounds, steps[-1], thread 0
// launch: <<<1, 64>>>(some(64, int32), zeros(64))
__constant__ int steps[64];
extern "C" __global__ void before_the_constants(const int *in, int *out) {
  int t = threadIdx.x;
  out[t] = in[t] + steps[t - 1];  // here  // fix: out[t] = in[t] + steps[t];
}
