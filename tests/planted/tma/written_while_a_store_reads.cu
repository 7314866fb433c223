// The next result is written while TMA still reads the last one.
// finds: race
// launch: <<<1, 160, 16384>>>(map_of(halves(64, 64), (64, 16)), map_of(out((64, 64), float16), (64, 16)))
#include "hopper.cuh"
extern "C" __global__ void written_while_a_store_reads(MAP in, MAP to) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long full[2], empty[2];
  int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < 2; ++i) init(&full[i], 1), init(&empty[i], 4);
    init_fence();
  }
  __syncthreads();
  if (t >= 128) {
    if (t == 128)
      for (int i = 0; i < 4; ++i) {
        wait(&empty[i % 2], (i / 2 & 1) ^ 1);
        expect(&full[i % 2], 2048);
        load(s + 1024 * (i % 2), in, &full[i % 2], 0, 16 * i);
      }
    return;
  }
  __half2 *result = (__half2 *)(s + 2048);
  for (int i = 0; i < 4; ++i) {
    wait(&full[i % 2], i / 2 & 1);
    __half2 mine[4];
    for (int k = 0; k < 4; ++k) mine[k] = ((__half2 *)(s + 1024 * (i % 2)))[t + 128 * k];
    __syncwarp();  // all lanes have read
    if (t % 32 == 0) arrive(&empty[i % 2]);
    for (int k = 0; k < 4; ++k) result[t + 128 * k] = mine[k];  // here
    proxy_fence();
    asm volatile("bar.sync 1, 128;" ::: "memory");  // all have written
    if (t == 0) {
      store(to, result, 0, 16 * i);  // there
      commit();
      wait_read();
    }
// fix: asm volatile("bar.sync 2, 128;" ::: "memory");  // it has been read
  }
}
