// The host has filled the first hundred elements of 128.
// finds: uninitialised, in[100], block 1, thread 36
// launch: <<<2, 64>>>(first(100, of=128), out(128))
extern "C" __global__ void half_of_an_input(const float *in, float *out) {
  int i = blockIdx.x * 64 + threadIdx.x;
  out[i] = in[i];  // here  // fix: out[i] = in[i % 100];
}
