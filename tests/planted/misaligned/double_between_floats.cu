// A double in shared memory must begin at a multiple of 8 bytes.
// finds: misaligned, dynamic shared memory, thread 0
// launch: <<<1, 8, 128>>>(some(8), out(8, float64))
extern "C" __global__ void double_between_floats(const float *in, double *out) {
  extern __shared__ float s[];
  double *wide = (double *)(s + 1);  // fix: double *wide = (double *)(s + 2);
  wide[threadIdx.x] = in[threadIdx.x];  // here
  out[threadIdx.x] = in[threadIdx.x];
}
