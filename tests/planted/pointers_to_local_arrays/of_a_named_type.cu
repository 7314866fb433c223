// The array's type is a typedef.
// finds: out of bounds
// launch: <<<1, 64>>>(out(64), int32(4))
typedef float row[4];
extern "C" __global__ void of_a_named_type(float *out, int n) {
  const row kept = {1, 2, 3, 4};
  out[threadIdx.x] = kept[n];  // here  // fix: out[threadIdx.x] = kept[n - 1];
}
