// The array's size is a template's argument.
// finds: out of bounds, out_reg[4]
// launch: <<<1, 64>>>(out(64))
template <int N>
__device__ float sum(const float *out) {
  float out_reg[N / 2];
  for (int i = 0; i < N; ++i) out_reg[i / 2] = i;
  float sum = 0;
  for (int i = 0; i <= N / 2; ++i) sum += out_reg[i];  // here  // fix: for (int i = 0; i < N / 2; ++i) sum += out_reg[i];
  return sum;
}
extern "C" __global__ void size_of_a_template(float *out) { out[threadIdx.x] = sum<8>(out); }
