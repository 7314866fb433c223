// An integer of an array is used, and only some threads have given it a value.
// finds: uninitialised, out[1], thread 1
// launch: <<<1, 64>>>(some(64, int32), zeros(64))
extern "C" __global__ void an_integer_from_nothing(const int *in, int *out) {
  int most[2];  // fix: int most[2] = {};
  if (in[threadIdx.x] > 60) most[1] = in[threadIdx.x];
  most[0] = 1;
  out[threadIdx.x] = most[in[threadIdx.x] & 1];  // here
}
