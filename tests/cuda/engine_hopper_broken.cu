// Of tests/test_engine_hopper.py.
#line 1 "broken.cu"
#define START __shared__ unsigned long long b; extern __shared__ __align__(1024) char s[]; int t = threadIdx.x; \
  if (t == 0) init(&b, 1), init_fence(); __syncthreads();
extern "C" __global__ void no_such_map(MAP map, const TensorMap *other) {
  START if (t == 0) load(s, *other, &b, 0, 0);  // no_such_map
}
extern "C" __global__ void wrong_rank(MAP map) {
  START if (t == 0)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "  // wrong_rank
                 "[%0], [%1, {%3, %3, %3}], [%2];" :: "r"(at(s)), "l"(&map), "r"(at(&b)), "r"(0) : "memory");
}
extern "C" __global__ void tile_not_aligned(MAP map) {
  START if (t == 0) load(s + 64, map, &b, 0, 0);  // tile_not_aligned
}
extern "C" __global__ void tile_too_long(MAP map) {
  START if (t == 0) load(s + 1024, map, &b, 0, 0);  // tile_too_long
}
extern "C" __global__ void not_initialised(MAP map) {
  __shared__ unsigned long long b;
  extern __shared__ __align__(1024) char s[];
  load(s, map, &b, 0, 0);  // not_initialised
}
extern "C" __global__ void waits_for_ever(MAP map) {
  START wait(&b, 0);  // waits_for_ever
}
extern "C" __global__ void too_many_arrive(MAP map) {
  START if (t == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" :: "r"(at(&b)));  // too_many_arrive
}
extern "C" __global__ void too_few_bytes(MAP map) {
  START if (t == 0) expect(&b, 8192 + 64), load(s, map, &b, 0, 0);
  wait(&b, 0);  // too_few_bytes
}
extern "C" __global__ void too_many_bytes(MAP map) {
  START if (t == 0) expect(&b, 8192 - 64), load(s, map, &b, 0, 0);
  wait(&b, 0);  // too_many_bytes
}
extern "C" __global__ void descriptor_outside(MAP map) {
  START float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s + 8192), 0);  // descriptor_outside
  wg_commit();
  wg_wait<0>();
}
extern "C" __global__ void descriptor_not_aligned(MAP map) {
  START float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s + 128), 0);  // descriptor_not_aligned
  wg_commit();
  wg_wait<0>();
}
extern "C" __global__ void threads_disagree(MAP map) {
  START float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), t < 64);  // threads_disagree
  wg_commit();
  wg_wait<0>();
}
extern "C" __global__ void a_warp_is_missing(MAP map) {
  START float d[4] = {};
  if (t >= 96) return;
  wg_fence();
  multiply(d, tile(s), tile(s), 0);
  wg_commit();
  wg_wait<0>();  // a_warp_is_missing
}
extern "C" __global__ void no_whole_warpgroup(MAP map) {
  START float d[4] = {};
  wg_fence();
  multiply(d, tile(s), tile(s), 0);  // no_whole_warpgroup
}
extern "C" __global__ void registers_not_known(MAP map) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 256;");  // which ptxas ignores
}
extern "C" __global__ __launch_bounds__(256, 1) void registers_not_given_back(MAP map) {
  if (threadIdx.x >= 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 256;");
  __syncthreads();
}
extern "C" __global__ __launch_bounds__(384, 1) void registers_for_ever(MAP map) {
  if (threadIdx.x >= 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");  // registers_for_ever
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}
extern "C" __global__ __launch_bounds__(384, 1) void registers_fit(MAP map) {
  if (threadIdx.x >= 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
}
extern "C" __global__ __launch_bounds__(128, 1) void fewer_by_inc(MAP map) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 56;");  // fewer_by_inc
}
extern "C" __global__ __launch_bounds__(128, 1) void half_a_warpgroup(MAP map) {
  if (threadIdx.x < 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");  // half_a_warpgroup
}
