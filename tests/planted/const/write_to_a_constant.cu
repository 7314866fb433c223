// A kernel writes to __constant__ memory.
// finds: write to const, weights[0]
// launch: <<<1, 64>>>(out(64))
__constant__ float weights[64];
extern "C" __global__ void write_to_a_constant(float *out) {
  float *scale = const_cast<float *>(weights);
  scale[threadIdx.x] = 2;  // here  // fix:
  out[threadIdx.x] = scale[threadIdx.x];
}
