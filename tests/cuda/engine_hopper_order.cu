// Of tests/test_engine_hopper.py.
// Products in two groups; what the sums are before and after the waits.
extern "C" __global__ __launch_bounds__(128) void groups(MAP map, float *out, int spoil) {
  extern __shared__ __align__(1024) __half s[];
  __shared__ unsigned long long b;
  int t = threadIdx.x;
  if (t == 0) init(&b, 1), init_fence();
  __syncthreads();
  if (t == 0) expect(&b, 2 * 64 * 128), load(s, map, &b, 0, 0), load(s + 64 * 64, map, &b, 0, 64);
  wait(&b, 0);
  float d[4] = {1, 1, 1, 1}, e[4] = {1, 1, 1, 1};
  wg_fence();
  multiply(d, tile(s), tile(s + 64 * 64), 0);
  wg_commit();
  multiply(e, tile(s), tile(s + 64 * 64), 1);
  wg_commit();
  out[t] = d[0];
  wg_wait<1>();
  hold(d);
  out[128 + t] = d[0];
  out[256 + t] = e[0];
  if (spoil) s[64 * t % 4096] = 7;
  wg_wait<0>();
  hold(e);
  out[384 + t] = e[0];
}
// Four phases of an mbarrier with two arrivals; each thread of two warps waits for each of them.
extern "C" __global__ void phases(int *out) {
  __shared__ unsigned long long b;
  __shared__ int turn;
  int t = threadIdx.x;
  if (t == 0) init(&b, 2), turn = 0;
  __syncthreads();
  for (int phase = 0; phase < 4; ++phase) {
    if (t == 0) atomicAdd(&turn, 1);
    __syncwarp();
    if (t % 32 == 0) arrive(&b);
    wait(&b, phase & 1);
    out[phase * 64 + t] = *(volatile int *)&turn;
    asm volatile("bar.sync 1, 64;" ::: "memory");
  }
}
// Warps 0 and 1 pass a turn to each other by two named barriers.
extern "C" __global__ void turns(int *out) {
  __shared__ int count;
  int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (warp == 0) asm volatile("bar.arrive 1, 64;" ::: "memory");
  for (int i = 0; i < 3; ++i) {
    if (warp == 1) asm volatile("bar.sync 1, 64;" ::: "memory");
    else asm volatile("bar.sync 2, 64;" ::: "memory");
    if (threadIdx.x % 32 == 0) out[warp * 3 + i] = count++;
    __syncwarp();
    if (warp == 1) asm volatile("bar.arrive 2, 64;" ::: "memory");
    else asm volatile("bar.arrive 1, 64;" ::: "memory");
  }
}
