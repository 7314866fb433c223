// mma.sync is an operation of the whole warp.
// finds: deadlock
// launch: <<<1, 32>>>(some(64), out(32))
extern "C" __global__ void half_a_warp_multiplies(const float *in, float *out) {
  int t = threadIdx.x;
  float d[4] = {in[t], 0, 0, 0};
  unsigned a = 0;
  if (t < 16)  // fix: if (t < 32)
    asm volatile(  // here
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4}, {%4}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));
  __syncthreads();  // there
  out[t] = d[0];
}
