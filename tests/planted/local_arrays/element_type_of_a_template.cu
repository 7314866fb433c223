// The array's type is a template's argument.
// finds: out of bounds, kept[3]
// launch: <<<1, 64>>>(out(64), int32(3))
template <typename T>
__device__ T last(int n) {
  T kept[3] = {T(1), T(2), T(3)};
  return kept[n];  // here  // fix: return kept[n - 1];
}
extern "C" __global__ void element_type_of_a_template(float *out, int n) { out[threadIdx.x] = last<float>(n) + last<int>(2); }
