// Of tests/test_engine_hopper.py.
// A tile of rows of 64 halves from one array to another, and rows of the first over again before `wait_read`.
extern "C" __global__ void copy(MAP from, MAP to, int rows, int y, int x, int to_y, int spoil) {
  extern __shared__ __align__(1024) __half s[];
  unsigned long long &b = *(unsigned long long *)(s + rows * 64);
  if (threadIdx.x == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&b, rows * 128);
    load(s, from, &b, 0, y);
    wait(&b, 0);
    store(to, s, x, to_y);
    commit();
    if (spoil == 1) s[0] = 77.0f;
    if (spoil != 2) wait_read();
    if (spoil == 3) s[0] = 77.0f;
  }
}
