// A static variable of a function is one for all threads.
// finds: race, calls
// launch: <<<1, 64>>>(zeros(64))
__device__ int next() {
  static int calls;
  return ++calls;  // here // there  // fix: return atomicAdd(&calls, 1);
}
extern "C" __global__ void a_static_of_a_function(int *out) {
  out[threadIdx.x] = next();
}
