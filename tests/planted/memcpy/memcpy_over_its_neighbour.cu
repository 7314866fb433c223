// Neighbours' copies of three words overlap, as they are two words apart.
// finds: race, a
// launch: <<<1, 64>>>(some(300), int32(12))
extern "C" __global__ void memcpy_over_its_neighbour(float *a, int bytes) {
  memcpy(a + 2 * threadIdx.x, a + 200 + threadIdx.x, bytes);  // here // there  // fix: memcpy(a + 2 * threadIdx.x, a + 200 + threadIdx.x, bytes - 4);
}
