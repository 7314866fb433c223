// Local arrays of two functions have the name of the kernel's parameter.
// finds: out of bounds, out[2]
// launch: <<<1, 64>>>(out(64), int32(2))
__device__ float first(int i) {
  const float out[2] = {1, 2};
  return out[i % 2];
}
__device__ float second(int i) {
  const float out[2] = {1, 2};
  return out[i];  // here
}
extern "C" __global__ void of_the_name_of_a_parameter(float *out, int n) {
  out[threadIdx.x] = first(n) + second(n);  // fix: out[threadIdx.x] = first(n) + second(n - 1);
}
