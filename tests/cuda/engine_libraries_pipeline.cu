// Of tests/test_engine_libraries.py.
#include <cooperative_groups.h>
#include <cuda/pipeline>
namespace cg = cooperative_groups;
extern "C" __global__ void kernel(const float* x, float* out, int tiles) {
  constexpr int STAGES = 2;
  #pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, STAGES> state;
  __shared__ alignas(16) float tile[STAGES][128];
  cg::thread_block block = cg::this_thread_block();
  auto pipeline = cuda::make_pipeline(block, &state);
  float sum = 0;
  for (int step = 0; step < tiles + STAGES - 1; ++step) {
    if (step < tiles) {
      pipeline.producer_acquire();
      cuda::memcpy_async(block, tile[step % STAGES], x + step * 128, sizeof(float) * 128, pipeline);
      pipeline.producer_commit();
    }
    if (step >= STAGES - 1) {
      pipeline.consumer_wait();
      sum += tile[(step - STAGES + 1) % STAGES][127 - block.thread_rank()];
      pipeline.consumer_release();
    }
  }
  out[block.thread_rank()] = sum;
}
extern "C" __global__ void alone(const float* x, float* out) {
  __shared__ alignas(16) float tile[2][128];
  int t = threadIdx.x;
  auto pipeline = cuda::make_pipeline();
  for (int stage = 0; stage < 2; ++stage) {
    pipeline.producer_acquire();
    cuda::memcpy_async(&tile[stage][t], x + 128 * stage + t, sizeof(float), pipeline);
    pipeline.producer_commit();
  }
  cuda::pipeline_consumer_wait_prior<1>(pipeline);
  float first = tile[0][t];
  pipeline.consumer_release();
  cuda::pipeline_consumer_wait_prior<0>(pipeline);
  out[t] = 2 * first + tile[1][t];
  pipeline.consumer_release();
}
