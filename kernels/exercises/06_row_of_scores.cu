// Exercise 06: the log-sum-exp of each row of softmax_scale * Q K^T; a tensor core computes the
// product.
//
// Launch   grid ceil(N / 16), block 32: a warp has 16 rows of Q and goes over the keys, 16 a turn
// Shapes   Q (N, HEAD_DIM), K (N_kv, HEAD_DIM): float16; lse (N): float32; HEAD_DIM % 16 == 0
// Limit    tensor cores compute all products: an mma_sync for each tile and step of 16 columns
#include <cuda_fp16.h>
#include <mma.h>

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#define NEG_INF __int_as_float(0xff800000)
constexpr int STRIDE = HEAD_DIM + 8;  // of a row in Q_smem and K_smem, in elements
constexpr int S_STRIDE = 20;          // of a row in S_smem

namespace tc = nvcuda::wmma;

// The warp copies 16 rows from `first` on; rows past the end become zeros.
__device__ void load_tile(__half* tile, const __half* source, int first, int end) {
  for (int i = threadIdx.x; i < 16 * HEAD_DIM; i += 32) {
    const int r = i / HEAD_DIM, c = i % HEAD_DIM;
    tile[r * STRIDE + c] =
        first + r < end ? source[(first + r) * HEAD_DIM + c] : __float2half(0.0f);
  }
}

extern "C" __global__ void __launch_bounds__(32)
    row_lse(const __half* Q, const __half* K, float* lse, int N, int N_kv, float softmax_scale) {
  __shared__ __align__(128) __half Q_smem[16 * STRIDE], K_smem[16 * STRIDE];
  __shared__ __align__(128) float S_smem[16 * S_STRIDE];
  const int lane = threadIdx.x, first_row = blockIdx.x * 16;
  load_tile(Q_smem, Q, first_row, N);
  float m_i = NEG_INF, l_i = 0.0f;

  for (int first = 0; first < N_kv; first += 16) {
    __syncwarp();  // hazard: K_smem and S_smem are overwritten while another lane still reads them
    load_tile(K_smem, K, first, N_kv);
    __syncwarp();  // hazard: the tiles are read before the other lanes have written their part

    tc::fragment<tc::accumulator, 16, 16, 16, float> S;
    tc::fill_fragment(S, 0.0f);
    for (int k = 0; k < HEAD_DIM; k += 16) {
      // BEGIN hole: about 5 lines - S += Q K^T for columns k .. k + 15: two fragments, multiplied
      tc::fragment<tc::matrix_a, 16, 16, 16, __half, tc::row_major> q_frag;
      tc::fragment<tc::matrix_b, 16, 16, 16, __half, tc::col_major> k_frag;
      tc::load_matrix_sync(q_frag, Q_smem + k, STRIDE);
      tc::load_matrix_sync(k_frag, K_smem + k, STRIDE);
      tc::mma_sync(S, q_frag, k_frag, S);
      // END hole
    }

    // BEGIN hole: about 2 lines - S goes to S_smem, row by row; no lane may read its row too early
    tc::store_matrix_sync(S_smem, S, S_STRIDE, tc::mem_row_major);
    __syncwarp();
    // END hole

    for (int j = 0; lane < 16 && j < 16; ++j) {  // lane r has row r; 16 lanes have none
      // BEGIN hole: about 1 line - a key past the end must not count, but a score of 0 must
      // DEFAULT: const float s = softmax_scale * S_smem[lane * S_STRIDE + j];
      const float s = first + j < N_kv ? softmax_scale * S_smem[lane * S_STRIDE + j] : NEG_INF;
      // END hole
      const float m_new = fmaxf(m_i, s);
      l_i = l_i * expf(m_i - m_new) + expf(s - m_new);
      m_i = m_new;
    }
  }
  if (lane < 16 && first_row + lane < N) lse[first_row + lane] = m_i + logf(l_i);
}
