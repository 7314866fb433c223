// Threads exchange words in a __device__ array with no barrier.
// finds: race, row
// launch: <<<1, 64>>>(some(64), out(64))
static __device__ float row[64];
extern "C" __global__ void a_row_of_the_module(const float *in, float *out) {
  row[threadIdx.x] = in[threadIdx.x];  // here
  // fix: __syncthreads();
  out[threadIdx.x] = row[63 - threadIdx.x];  // there
}
