// The block waits for another word than the one that it resets.
// finds: race, lock[0]
// launch: <<<2, 1>>>(zeros(2))
extern "C" __global__ void seen_by_a_volatile_read(int *lock) {
  if (blockIdx.x == 0) {
    atomicAdd(lock, 1);  // there
  } else {
    while (*(volatile int *)(lock + 1)) {}  // of lock itself  // fix: while (*(volatile int *)(lock) == 0) {}  // of lock itself
    lock[0] = 0;  // here
  }
}
