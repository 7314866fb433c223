// A __device__ variable counts with += in place of an atomic.
// finds: race, count, thread 5
// launch: <<<1, 64>>>(some(64), zeros(1))
__device__ int count;
extern "C" __global__ void a_counter_of_the_module(const float *in, int *out) {
  if (in[threadIdx.x] > 3) count += 1;  // here // there  // fix: if (in[threadIdx.x] > 3) atomicAdd(&count, 1);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = count;
}
