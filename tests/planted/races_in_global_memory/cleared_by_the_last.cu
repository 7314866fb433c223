// The last of two threads of each block clears the counts, but no fence orders the others' counts before their tickets.
// finds: race, count
// launch: <<<2, 64>>>(zeros(4))
extern "C" __global__ void cleared_by_the_last(int *count) {
  if (threadIdx.x == 0) atomicAdd(&count[0], 1);  // there
  if (threadIdx.x % 32 != 0) return;
  // fix: __threadfence();
  if (atomicAdd(&count[1], 1) != 2 * gridDim.x - 1) return;
  __threadfence();
  *reinterpret_cast<int4 *>(count) = int4{0, 0, 0, 0};  // here
}
