// A table of three values is read at four places.
// finds: out of bounds, steps[3], thread 3
// launch: <<<1, 64>>>(some(64, int32), out(64))
extern "C" __global__ void past_a_table_in_the_code(const int *in, float *out) {
  const float steps[3] = {1, 2, 4};
  out[threadIdx.x] = steps[in[threadIdx.x] % 4];  // here  // fix: out[threadIdx.x] = steps[in[threadIdx.x] % 3];
}
