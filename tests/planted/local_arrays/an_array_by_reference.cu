// A function knows the size of an array that it takes by reference.
// finds: out of bounds, row[8]
// launch: <<<1, 64>>>(some(64), out(64), int32(9))
__device__ float sum(const float (&row)[8], int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += row[i];  // here  // fix: for (int i = 0; i < n - 1; ++i) sum += row[i];
  return sum;
}
extern "C" __global__ void an_array_by_reference(const float *in, float *out, int n) {
  float kept[8];
  for (int i = 0; i < 8; ++i) kept[i] = in[(threadIdx.x + i) % 64];
  out[threadIdx.x] = sum(kept, n);
}
