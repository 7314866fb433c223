// The array is captured by a generic lambda.
// finds: out of bounds, acc[4]
// launch: <<<1, 64>>>(out(64), int32(4))
extern "C" __global__ void in_a_generic_lambda(float *out, int n) {
  float acc[4] = {1, 2, 3, 4};
  auto take = [&](auto i) { return acc[i]; };  // here
  out[threadIdx.x] = take(n);  // fix: out[threadIdx.x] = take(n - 1);
}
